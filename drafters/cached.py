"""A drafting network at work: its forward on a ragged cache of its own, as fast as the target's.

On a CPU the forward is traced; on a GPU it is recorded, as the target's is.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specbench.cache import RaggedCache
from specbench.drafting import Batch
from specbench.model import CausalLM, recorded_slots
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
        self._spare: RaggedCache | None = None

    def new_cache(self, batch: Batch, further: int) -> RaggedCache:
        """An empty cache for the texts of ``batch`` and ``further`` tokens a row. The one given out before is no longer
        of use."""
        slots = batch.tokens.shape[1] + further
        if not self._recorded:
            return RaggedCache(len(batch), slots, batch.device)
        slots = recorded_slots(slots)
        if self._spare is None or (self._spare.batch, self._spare.slots) != (len(batch), slots):
            self._spare = RaggedCache(len(batch), slots, batch.device, whole=True)
        self._spare.clear()  # and keep what was recorded on it
        return self._spare

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
