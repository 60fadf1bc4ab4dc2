"""What specbench's speed is made of: load time, memory, passes, rounds, memory traffic. Argument: a small model's
folder, to draft with."""

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from hydra.utils import instantiate
from omegaconf import OmegaConf
from protocol import Jobs, serve

from drafters.ngram import NGram
from drafters.none import NoDrafter
from drafters.small_lm import SmallLM
from specbench import cost
from specbench.__main__ import conf_dir
from specbench.cost import Shape
from specbench.decoding import decode
from specbench.drafting import Drafter, Request
from specbench.model import CausalLM
from specbench.sampling import Sampling
from specbench.stopping import StopRule

CACHED = 128  # tokens before a measured pass
REPEATS = 7  # passes of each shape that is compared, in turn
STATUS = Path("/proc/self/status")
POLL_SECONDS = 0.002


def start() -> tuple[Jobs, dict[str, str]]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    yaml = OmegaConf.load(conf_dir() / "target" / "smollm2.yaml")
    settings = OmegaConf.create({"dtype": "bfloat16", "device": "cpu", "target": yaml}).target
    with AnonymousPeak() as memory:
        began = time.perf_counter()
        target: CausalLM = instantiate(settings)
        load_seconds = time.perf_counter() - began
        _run(target, NoDrafter(), [list(range(100))], 128, 0)
    held = target.weight_bytes + target.bytes_per_slot * (100 + 128)
    small = SmallLM(sys.argv[1])
    drafters: dict[str, Drafter] = {"none": NoDrafter(), "ngram": NGram(), "small_lm": small}
    for drafter in drafters.values():
        drafter.bind(target)
    forwards = [Timed(target), Timed(small.lm)]

    def once() -> dict[str, Any]:
        return {"load_seconds": load_seconds, "memory_gained": memory.gained, "memory_held": held}

    def passes(shapes: list[list[int]]) -> dict[str, Any]:
        """Seconds of a pass of each [batch, tokens a row]."""
        asked = [Shape(batch, tokens, CACHED) for batch, tokens in shapes]
        timed = cost.time_passes(target, asked, REPEATS)
        return {"seconds": [cost.summary(timed[shape])["seconds"] for shape in asked]}

    def traffic() -> dict[str, Any]:
        """Bytes a second: of a pass over one token, and of just reading."""
        shape = Shape(1, 1, CACHED)
        seconds = cost.summary(cost.time_passes(target, [shape], REPEATS)[shape])["seconds"]
        return {
            "achieved": cost.bytes_read(target, shape) / seconds,
            "bandwidth": cost.read_bandwidth(target.device),
        }

    def rounds(drafter: str, prompts: list[list[int]], new: int, k: int) -> dict[str, Any]:
        """Seconds of all rounds, seconds of them in the models' passes, and tokens committed."""
        return _run(target, drafters[drafter], prompts, new, k, forwards)

    jobs = {"once": once, "passes": passes, "traffic": traffic, "rounds": rounds}
    return jobs, {"torch": torch.__version__, "engine": target.engine}


class Timed:
    """Counts the seconds of a model's passes."""

    def __init__(self, lm: CausalLM):
        self.seconds = 0.0
        self._forward = lm.forward
        lm.forward = self._timed  # type: ignore[method-assign]

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        output = self._forward(*args, **kwargs)
        self.seconds += time.perf_counter() - began
        return output


class AnonymousPeak:
    """Context manager; afterwards ``gained`` is the most memory held inside over what was held before: anonymous pages,
    as pages of a mapped file can be dropped at any time."""

    def __enter__(self) -> "AnonymousPeak":
        self._before = self._peak = _anonymous()
        self._done = threading.Event()
        self._poller = threading.Thread(target=self._poll, daemon=True)
        self._poller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._poller.join()
        self.gained = self._peak - self._before

    def _poll(self) -> None:
        while not self._done.wait(POLL_SECONDS):
            self._peak = max(self._peak, _anonymous())


def _anonymous() -> int:
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024  # the kernel reports KiB


def _run(
    target: CausalLM, drafter: Drafter, prompts: list[list[int]], new: int, k: int, forwards: Sequence[Timed] = ()
) -> dict[str, Any]:
    requests = [Request(str(i), tokens) for i, tokens in enumerate(prompts)]
    seconds = inside = before = 0.0
    tokens = 0
    for step in decode(target, drafter, requests, k, Sampling(), 0, StopRule(new)):
        spent = sum(timed.seconds for timed in forwards)
        if step.round > 0:
            seconds += step.seconds
            inside += spent - before
            tokens += sum(map(len, step.committed))
        before = spent
    return {"seconds": seconds, "inside": inside, "tokens": tokens}


if __name__ == "__main__":
    serve(start)
