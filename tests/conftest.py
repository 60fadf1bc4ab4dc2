"""What the tests share: tiny models made once, and the plain decoding they are all judged by."""

import inspect
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from rich.console import Console

from specbench import cache as cache_module
from specbench import cli, fused, unmodified
from specbench.comparison import Arm
from specbench.decoding import decode
from specbench.drafting import Drafter, Request
from specbench.model import CausalLM
from specbench.sampling import Sampling
from specbench.stopping import StopRule
from specbench.targets import load_tiny

torch.set_num_threads(1)  # tiny models lose more to handing work over than they gain

FAMILIES = ("llama", "qwen3", "gemma3", "gpt_neox")


@cache
def tiny(family: str, seed: int = 0, engine: str = "auto") -> CausalLM:
    return load_tiny(family, seed=seed, engine=engine)


@pytest.fixture(params=FAMILIES)
def lm(request) -> CausalLM:
    return tiny(request.param)


@pytest.fixture
def llama() -> CausalLM:
    return tiny("llama")


@torch.inference_mode()
def plain_greedy(lm: CausalLM, prompt: Sequence[int], n: int) -> list[int]:
    """Greedy continuation by whole forwards of the bare Hugging Face model: no cache, none of our code."""
    text = list(prompt)
    for _ in range(n):
        text.append(int(lm.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


def run(
    lm: CausalLM,
    drafter: Drafter,
    requests: Sequence[Request],
    k: int = 4,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: StopRule | None = None,
) -> tuple[list[list[int]], list]:
    """Replies of ``requests`` decoded together, and the steps."""
    drafter.bind(lm)
    replies: list[list[int]] = [[] for _ in requests]
    steps = []
    for step in decode(lm, drafter, requests, k, sampling or Sampling(), seed, stop or StopRule(24)):
        steps.append(step)
        for row, committed in zip(step.rows, step.committed, strict=True):
            replies[row] += committed
    return replies, steps


def prompts(lm: CausalLM, count: int = 3) -> list[list[int]]:
    """Prompts of different lengths, with repeats for n-grams to find."""
    texts = ["one two one two one", "abc abc abd abc abc abd ab", "x", "the end of the line of the"]
    return [lm.tokenizer(text).input_ids for text in texts[:count]]


def baseline(lm: CausalLM) -> Arm:
    from drafters.none import NoDrafter

    return Arm("baseline", NoDrafter(), 0)


def untrace(monkeypatch: pytest.MonkeyPatch, lm: CausalLM) -> None:
    """Run the fused forward itself: a trace remembers the code as it was."""
    monkeypatch.setattr(lm._decoder, "_forward", lm._decoder._forward.module)


def ragged_rounds(lm: CausalLM, rounds: int = 3, steps: int = 4) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Uneven acceptance with junk in the rejected slots: texts, and our logits at their last ``steps`` tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = [7, 19, 12]  # beyond gemma3's window of 8
    text = torch.randint(3, lm.vocab_size, (3, 60), generator=generator)
    cache = lm.new_cache(3, 64)
    for row, length in enumerate(lengths):
        lm.forward(text[row : row + 1, :length], cache, row=row)
        cache.advance(torch.tensor(length), row=row)
    for _ in range(rounds):
        block = torch.stack([text[row, length : length + steps] for row, length in enumerate(lengths)])
        right = torch.randint(1, steps + 1, (3,), generator=generator)
        junk = torch.randint(3, lm.vocab_size, block.shape, generator=generator)
        block = torch.where(torch.arange(steps) < right[:, None], block, junk)
        logits = lm.forward(block, cache).logits
        for row, length in enumerate(lengths):
            yield torch.cat([text[row, :length], block[row]]), logits[row]
        cache.advance(right)
        lengths = [length + int(r) for length, r in zip(lengths, right, strict=True)]


def break_cache(monkeypatch: pytest.MonkeyPatch, name: str, *replacements: tuple[str, str]) -> None:
    """Put a deliberate bug into a function of specbench.cache, wherever it is used."""
    broken = mutated(getattr(cache_module, name), *replacements)
    for module in (cache_module, fused, unmodified):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, broken)


class CommandLine:
    """A command line is made for a process of its own: undo what it finds and may change. A context manager."""

    def __init__(self, width: int = 80):
        self._width = width

    def __enter__(self) -> pytest.MonkeyPatch:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(sys, "argv", ["specbench"])
        self._patch.setenv("HYDRA_FULL_ERROR", "1")
        self._patch.setattr(cli, "out", Console(width=self._width))
        self._patch.setattr(cli, "err", Console(width=self._width, stderr=True))
        logger = logging.getLogger("specbench")
        self._logger = logger.handlers, logger.level, logger.propagate
        return self._patch

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        logger = logging.getLogger("specbench")
        logger.handlers, logger.level, logger.propagate = self._logger


def put_outside(files: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Modules and YAMLs that a user keeps outside of the project; returns the options that add them."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
    monkeypatch.syspath_prepend(folder)
    return ["--config-dir", str(folder / "conf")]


def mutated(function: Callable, *replacements: tuple[str, str]) -> Callable:
    """``function`` with parts of its source replaced: a deliberate bug, to show that a test would find it."""
    bare = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(bare))
    source = source[source.index("def ") :]  # without decorators
    for old, new in replacements:
        assert old in source, f"{old!r} is not in the source of {function.__name__}"
        source = source.replace(old, new)
    space = dict(bare.__globals__)
    exec(source, space)
    return space[function.__name__]
