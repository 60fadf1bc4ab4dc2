"""Continues many texts with a target, as many together as are asked for, where only throughput counts.

Legend: B rows, P tokens of the longest prompt, V vocabulary.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from specbench.cache import RaggedCache
from specbench.errors import RunError
from specbench.model import PREFILL_CHUNK, CausalLM
from specbench.sampling import Noise, Sampling


@dataclass(frozen=True)
class Task:
    """A text to continue. uid: keys its noise. prompt: its tokens. sampling: how the next ones are drawn. limit: most
    tokens to add."""

    uid: str
    prompt: Sequence[int]
    sampling: Sampling
    limit: int


@torch.inference_mode()
def continue_all(
    target: CausalLM, tasks: Sequence[Task], stop_ids: Collection[int], rows: int, seed: int
) -> Iterator[tuple[int, list[int]]]:
    """Continue each task until one of ``stop_ids``, which is kept, or up to its limit; ``rows`` texts together.

    Yields the number of a task and its continuation. What is drawn depends on ``seed`` and uid, and, but for rounding,
    not on the company. Raises RunError where the target's logits are not numbers.
    """
    # texts of like length together: a forward attends to as many slots as its longest row has
    order = sorted(range(len(tasks)), key=lambda i: (tasks[i].limit, len(tasks[i].prompt)))
    for start in range(0, len(order), rows):
        members = order[start : start + rows]
        yield from zip(members, _continue(target, [tasks[i] for i in members], stop_ids, seed), strict=True)


def _continue(target: CausalLM, tasks: Sequence[Task], stop_ids: Collection[int], seed: int) -> list[list[int]]:
    """The continuations of ``tasks``, which run together until the last has ended."""
    slots = max(len(task.prompt) + task.limit for task in tasks)
    cache = target.new_cache(len(tasks), slots)
    target.prepare(cache, (1,))
    _prefill(target, cache, tasks)
    noise = Noise(seed, [task.uid for task in tasks], slots, target.device)
    alike = {s: [i for i, task in enumerate(tasks) if task.sampling == s] for s in {task.sampling for task in tasks}}
    last = torch.tensor([task.prompt[-1] for task in tasks], device=target.device)
    replies: list[list[int]] = [[] for _ in tasks]
    going = torch.ones(len(tasks), dtype=torch.long)
    while going.any():
        logits = target.forward(last[:, None], cache).logits[:, -1]
        cache.advance(going)
        if not bool(logits.amax(dim=-1).isfinite().all()):
            raise RunError("the target's logits are NaN or infinite")
        last = torch.empty_like(last)
        uniforms = noise.at(cache.lengths[:, None].clamp(max=slots - 1).to(target.device), "target")[:, 0]
        for sampling, members in alike.items():
            last[members] = sampling.choose(logits[members], uniforms[members])
        for row, token in enumerate(last.tolist()):
            if going[row]:
                replies[row].append(token)
                if token in stop_ids or len(replies[row]) == tasks[row].limit:
                    going[row] = 0
    target.recycle(cache)
    return replies


def _prefill(target: CausalLM, cache: RaggedCache, tasks: Sequence[Task]) -> None:
    """Run all prompts but for their last tokens."""
    lengths = torch.tensor([len(task.prompt) - 1 for task in tasks])
    if target.recorded:  # the cache is one of a few sizes, and rows that are run alone are not recorded
        for row, task in enumerate(tasks):
            if lengths[row]:
                target.prefill(torch.tensor(task.prompt[:-1], device=target.device), cache, row)
        return
    tokens = torch.zeros(len(tasks), int(lengths.max()), dtype=torch.long)  # [B, P-1]
    for row, task in enumerate(tasks):
        tokens[row, : lengths[row]] = torch.tensor(task.prompt[:-1])
    for chunk in tokens.to(target.device).split(PREFILL_CHUNK, dim=1):
        if chunk.shape[1]:
            target.forward(chunk, cache, last_only=True)
            cache.advance((lengths - cache.lengths).clamp(max=chunk.shape[1]))
