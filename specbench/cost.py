"""What a pass of a model costs, by how many tokens it sees, and what that leaves for drafting to win.

A pass reads all weights whatever it computes, so a few more tokens are nearly free as long as reading them takes longer
than computing with them (the roofline of Williams et al. 2009). Where that ends, so does the free lunch of speculative
decoding.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from scipy.optimize import brentq

from specbench.model import CausalLM

REHEARSALS = 2  # passes of a shape before those that count
PROBE_BYTES = 1 << 30  # read to measure bandwidth: far more than any cache holds
PROBE_WIDTH = 4096  # of the matrices multiplied to measure arithmetic
PROBE_REPEATS = 5


@dataclass(frozen=True)
class Shape:
    """A pass of ``tokens`` per row over ``batch`` rows that each hold ``cached`` tokens."""

    batch: int
    tokens: int
    cached: int


def time_passes(
    target: CausalLM, shapes: Sequence[Shape], repeats: int, progress: Callable[[], object] = lambda: None
) -> dict[Shape, list[float]]:
    """Seconds of ``repeats`` passes of each shape, taken in turn so that the machine's moods fall on all alike."""
    passes = [_prepared(target, shape) for shape in shapes]
    seconds: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    for _ in range(repeats):
        for shape, run in zip(shapes, passes, strict=True):
            began = time.perf_counter()
            run()
            _wait(target.device)
            seconds[shape].append(time.perf_counter() - began)
        progress()
    return seconds


def bytes_read(target: CausalLM, shape: Shape) -> int:
    """Bytes that a pass must read: every weight once, and the keys and values attended to."""
    return target.pass_bytes + shape.batch * target.attended(shape.cached, shape.tokens) * target.bytes_per_slot


def operations(target: CausalLM, shape: Shape) -> int:
    """Floating-point operations of a pass in its weights' products: two per weight and token."""
    weights = target.parameters - _table_only(target)
    return 2 * weights * shape.batch * shape.tokens


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second that this machine reads from memory with all threads: a sum over a large array."""
    array = torch.ones(PROBE_BYTES // 4, device=device)
    return PROBE_BYTES / _typical(lambda: array.sum(), device)


def arithmetic_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large matrix product."""
    matrix = torch.ones(PROBE_WIDTH, PROBE_WIDTH, dtype=dtype, device=device)
    return 2 * PROBE_WIDTH**3 / _typical(lambda: matrix @ matrix, device)


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens per verify pass when each of ``k`` drafts is right with probability ``alpha``, independently: 1 to k+1
    (Leviathan et al. 2023, equation 1)."""
    return float(sum(alpha**i for i in range(k + 1)))


def break_even(pass_cost: float, draft_cost: float, k: int) -> float | None:
    """The acceptance at which drafting ``k`` tokens a round neither wins nor loses; None where it cannot win.

    ``pass_cost``: time of a pass over k+1 tokens a row, over that of one token; ``draft_cost``: time of drafting one
    token, over the same.
    """
    round_cost = pass_cost + k * draft_cost
    if round_cost >= k + 1:
        return None
    if round_cost <= 1:
        return 0.0
    return float(brentq(lambda alpha: expected_tokens(alpha, k) - round_cost, 0.0, 1.0))


def curves(points: Sequence[Mapping[str, Any]], cached: int) -> dict[int, dict[int, float]]:
    """Seconds by batch size and tokens per row, of the ``points`` measured at ``cached`` tokens."""
    found: dict[int, dict[int, float]] = {}
    for point in points:
        if point["cached"] == cached:
            found.setdefault(point["batch"], {})[point["tokens"]] = point["seconds"]
    return found


def break_evens(points: Sequence[Mapping[str, Any]], cached: int, draft_costs: Sequence[float]) -> list[dict[str, Any]]:
    """``break_even`` for every batch size, draft cost and k whose passes were measured."""
    return [
        {
            "batch": batch,
            "draft_cost": draft_cost,
            "k": tokens - 1,
            "acceptance": break_even(seconds / by_tokens[1], draft_cost, tokens - 1),
        }
        for batch, by_tokens in curves(points, cached).items()
        for draft_cost in draft_costs
        for tokens, seconds in by_tokens.items()
        if tokens > 1
    ]


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles."""
    ordered = sorted(seconds)
    quarter = len(ordered) // 4
    return {"seconds": median(ordered), "quartiles": [ordered[quarter], ordered[-1 - quarter]], "repeats": len(ordered)}


def _prepared(target: CausalLM, shape: Shape) -> Callable[[], object]:
    cache = target.new_cache(shape.batch, shape.cached + shape.tokens, steps=shape.tokens)
    cache.advance(torch.tensor(shape.cached))
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch, shape.tokens)
    tokens = torch.randint(0, target.vocab_size, size, generator=generator).to(target.device)
    for _ in range(REHEARSALS):  # here, so that the next shape finds this one's memory taken
        target.forward(tokens, cache)
    return lambda: target.forward(tokens, cache)


def _typical(run: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(PROBE_REPEATS):
        began = time.perf_counter()
        run()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return median(seconds)  # as passes are summed up: on a machine of moods the best of one is not the other's limit


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _table_only(target: CausalLM) -> int:
    """Parameters of an embedding table that multiplies nothing: looked up, and not the head's as well."""
    table = target.model.get_input_embeddings().weight
    tied = target.model.config.get_text_config().tie_word_embeddings
    return 0 if tied else table.numel()
