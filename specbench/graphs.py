"""A computation on tensors of fixed shape, recorded once on a GPU and replayed by a single launch.

A small or fast step is many short kernels; launching them one by one from Python takes longer than they run. A CUDA
graph (Gray 2019) keeps the list, with every address in it: inputs are copied to where the recording read them, and
outputs lie where it wrote them, until the next replay overwrites them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

REHEARSALS = 2  # runs before the recording, in which libraries choose kernels and allocate their workspaces


class Recorded:
    """``run(inputs)`` for inputs of one shape. Off a GPU nothing is recorded: the same buffers are filled by running
    ``run`` again, so that whoever keeps an output too long gets the same wrong answer everywhere."""

    def __init__(self, run: Callable[[Tensor], tuple[Tensor, ...]], inputs: Tensor):
        """Records ``run``; it may read other tensors, whose contents at each replay count, and must not wait for the
        device nor make decisions by what tensors hold."""
        self._inputs = inputs.clone()
        self._run = run
        self._graph: torch.cuda.CUDAGraph | None = None
        if inputs.device.type != "cuda":
            self._outputs = tuple(output.clone() for output in run(self._inputs))
            return
        aside = torch.cuda.Stream(inputs.device)
        aside.wait_stream(torch.cuda.current_stream(inputs.device))
        with torch.cuda.stream(aside):
            for _ in range(REHEARSALS):
                run(self._inputs)
        torch.cuda.current_stream(inputs.device).wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = run(self._inputs)

    def __call__(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs for ``inputs``, valid until the next call."""
        self._inputs.copy_(inputs, non_blocking=True)
        if self._graph is None:
            for kept, output in zip(self._outputs, self._run(self._inputs), strict=True):
                kept.copy_(output)
        else:
            self._graph.replay()
        return self._outputs
