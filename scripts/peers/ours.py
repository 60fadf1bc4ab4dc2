"""specbench itself. Arguments: model folder, dtype, quantisation or -, small model's folder or -."""

import sys
import time
from typing import Any

import torch
import transformers
from protocol import Jobs, serve

from drafters.ngram import NGram
from drafters.none import NoDrafter
from drafters.small_lm import SmallLM
from specbench.decoding import decode
from specbench.drafting import Drafter, Request
from specbench.sampling import Sampling
from specbench.stopping import StopRule
from specbench.targets import load_hf

MAX_N = 4  # longest n-gram that is looked up, as asked of the others, which continue its first occurrence


def start() -> tuple[Jobs, dict[str, str]]:
    folder, dtype, quant, small = sys.argv[1:]
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    target = load_hf(folder, dtype=dtype, device="cpu", quant=None if quant == "-" else quant)
    drafters: dict[str, Drafter] = {"plain": NoDrafter(), "ngram": NGram(max_n=MAX_N, match="first")}
    if small != "-":
        drafters["assisted"] = SmallLM(small)
    for drafter in drafters.values():
        drafter.bind(target)

    def job(name: str) -> Any:
        def generate(tokens: list[int], new: int, k: int = 0) -> dict[str, Any]:
            reply: list[int] = []
            began = time.perf_counter()
            for step in decode(target, drafters[name], [Request("p", tokens)], k, Sampling(), 0, StopRule(new)):
                reply += step.committed[0]
            return {"seconds": time.perf_counter() - began, "tokens": reply}

        return generate

    return {name: job(name) for name in drafters}, {"torch": torch.__version__}


if __name__ == "__main__":
    serve(start)
