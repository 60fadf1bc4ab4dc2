"""A drafting network at work: its forward on a ragged cache of its own, as fast as the target's.

On a CPU the forward is traced; on a GPU it is recorded, as the target's is.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specbench.cache import RaggedCache
from specbench.model import SPARE_CACHES, CausalLM, recorded_slots
from specbench.traced import Traced


class Cached:
    """``network`` with caches of layers of so many ``widths`` numbers a token.

    The network's forward takes tensors [B, S, ...], then where to put its entries: ``starts`` [B], ``ids`` [T'] and
    what each layer has ``kept``; then constants. It returns tensors."""

    def __init__(self, network: nn.Module, target: CausalLM, widths: Sequence[int], name: str, eager: bool = False):
        """``name`` is for people. ``eager``: the network looks at what tensors hold, and so is neither traced nor
        recorded."""
        self._recorded = target.recorded and not eager
        self._forward: Any = network if eager or target.device.type == "cuda" else Traced(network, name)
        self._entries = [torch.empty(width, dtype=target.dtype, device=target.device) for width in widths]
        self._spare: list[RaggedCache] = []  # with what was recorded on them, the latest first
        self._device = target.device

    @property
    def recorded(self) -> bool:
        """Whether forwards are recorded, and so must be of few shapes, which ``prepare`` knows."""
        return self._recorded

    def new_cache(self, batch: int, slots: int) -> RaggedCache:
        """An empty cache of ``batch`` rows of ``slots`` tokens. One given out before may be given out again."""
        if not self._recorded:
            return RaggedCache(batch, slots, self._device)
        slots = recorded_slots(slots)
        fitting = [cache for cache in self._spare if (cache.batch, cache.slots) == (batch, slots)]
        cache = fitting[0] if fitting else RaggedCache(batch, slots, self._device, whole=True)
        self._spare = [cache, *(other for other in self._spare if other is not cache)][:SPARE_CACHES]
        cache.clear()
        return cache

    def zeros(self, *shape: int) -> Tensor:
        """An input to record a forward with."""
        return torch.zeros(*shape, dtype=self._entries[0].dtype, device=self._device)

    def __call__(
        self, cache: RaggedCache, *inputs: Tensor, writes: int, row: int | None = None, **constants: Any
    ) -> tuple[Tensor, ...]:
        """The network's outputs for ``inputs``, of which each row ``writes`` so many slots; of one ``row`` alone, or of
        all rows. The cache's lengths stay as they are."""
        cache.place(writes, row)
        kept = [cache.layer(i, entry) for i, entry in enumerate(self._entries)]

        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            return self._forward(*inputs, cache.starts, cache.ids, kept, **constants)

        if not self._recorded or row is not None:
            return run(*inputs)
        key = (*(tuple(given.shape) for given in inputs), *sorted(constants.items()))
        # what is kept from one call to the next must not lie where the next call writes
        return tuple(output.clone() for output in cache.recordings.replay(key, run, *inputs))
