"""Computations on tensors of fixed shape, recorded once on a GPU and replayed by a single launch.

A small or fast step is many short kernels; launching them one by one from Python takes longer than they run. A CUDA
graph (Gray 2019) keeps the list, with every address in it: inputs are copied to where the recording read them, and
outputs lie where it wrote them, until another replay overwrites them.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

Run = Callable[..., tuple[Tensor, ...]]  # of tensors

REHEARSALS = 2  # runs before a recording, in which libraries choose kernels and allocate their workspaces


class Recordings:
    """Recorded computations that share their working memory, by key."""

    def __init__(self, device: torch.device):
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._made: dict[Hashable, _Recorded] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._made

    def __len__(self) -> int:
        return len(self._made)

    def replay(self, key: Hashable, run: Run, *inputs: Tensor) -> tuple[Tensor, ...]:
        """``run(*inputs)``, recorded at the first call with this ``key``; valid until the next replay.

        ``run`` may read other tensors, whose contents at each replay count. It must not wait for the device, nor
        decide anything by what tensors hold; then RuntimeError is raised.
        """
        if key not in self._made:
            self._made[key] = _Recorded(run, inputs, self._pool)
        return self._made[key](*inputs)


class _Recorded:
    """Off a GPU nothing is recorded: the same buffers are filled by running again, so that whoever keeps an output too
    long gets the same wrong answer everywhere."""

    def __init__(self, run: Run, inputs: tuple[Tensor, ...], pool: Any):
        self._inputs = tuple(given.clone() for given in inputs)
        device = inputs[0].device
        if device.type != "cuda":
            self._outputs = tuple(output.clone() for output in run(*self._inputs))
            self._refill: Callable[[], object] = lambda: [
                o.copy_(n) for o, n in zip(self._outputs, run(*self._inputs), strict=True)
            ]
            return
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(REHEARSALS):
                run(*self._inputs)
        torch.cuda.current_stream(device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._outputs = run(*self._inputs)
        self._refill = graph.replay

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        for held, given in zip(self._inputs, inputs, strict=True):
            held.copy_(given, non_blocking=True)
        self._refill()
        return self._outputs
