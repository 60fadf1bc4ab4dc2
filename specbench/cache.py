"""One static key/value cache for a batch whose rows advance unevenly.

Legend: B rows, S tokens in this forward, T slots, H key/value heads, E head width.

Every layer keeps ``[B, H, T, E]`` keys and values; every row has a length, the number of slots that hold committed
tokens. A forward of S tokens writes row b at slots ``length[b] .. length[b]+S-1`` and attends, under a mask made from
the lengths, to what stands before. Rejecting drafted tokens is not advancing the length: rollback costs nothing, leaves
no holes, and a sliding window is only another mask. Slot and logical position are the same number.

Two rows, lengths 3 and 5, S=2: row 0 writes slots 3, 4 and row 1 writes 5, 6. If row 0 keeps one token and row 1 both,
the lengths become 4 and 7; what stands in row 0's slot 4 is junk that no mask shows and the next forward overwrites.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

BUCKET = 64  # slots; forwards attend to a multiple of this, so that few distinct shapes occur


class RaggedCache(Cache):
    """Keys and values of every layer for ``batch`` rows of ``slots`` slots, with a length per row.

    It is a transformers ``Cache``, so unmodified models write to it; layers are allocated when first written.
    """

    is_compileable = False

    def __init__(self, batch: int, slots: int, device: torch.device, max_position: int | None = None):
        """``max_position``: largest position id to hand out (learned position tables end there); None for no limit."""
        super().__init__(layers=[])
        self.batch = batch
        self.slots = slots
        self.device = device
        self.max_position = max_position
        self.lengths = torch.zeros(batch, dtype=torch.long)  # host; [B]
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._rows = slice(None)
        self._slot_ids = torch.empty(0)
        self._attended = 0

    def place(self, steps: int, row: int | None = None) -> tuple[Tensor, Tensor]:
        """Say where the next forward writes: ``steps`` tokens for all rows, or for one ``row`` alone.

        Returns the slots written [B, S] (B=1 for one row) and the ids [T'] of the slots attended to.
        Raises ValueError when a row would run past its slots.
        """
        self._rows = slice(None) if row is None else slice(row, row + 1)
        lengths = self.lengths[self._rows]
        end = int(lengths.max()) + steps
        if end > self.slots:
            raise ValueError(f"a row needs {end} cache slots and there are {self.slots}")
        self._attended = _bucketed(end)
        self._slot_ids = (lengths[:, None] + torch.arange(steps)).to(self.device, non_blocking=True)
        return self._slot_ids, torch.arange(self._attended, device=self.device)

    def position_ids(self) -> Tensor:
        """Logical positions [B, S] of the tokens placed last. Past the last position only tokens that can never be
        committed stand, so they are given the last one."""
        if self.max_position is None:
            return self._slot_ids
        return self._slot_ids.clamp(max=self.max_position)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's attention: write [B, H, S, E] where ``place`` said, return what is attended to."""
        if layer_idx not in self._keys:
            self._keys[layer_idx] = self._allocate(key_states)
            self._values[layer_idx] = self._allocate(value_states)
        keys = self._keys[layer_idx][self._rows]
        values = self._values[layer_idx][self._rows]
        rows = torch.arange(keys.shape[0], device=self.device)[:, None]
        keys[rows, :, self._slot_ids] = key_states.transpose(1, 2)
        values[rows, :, self._slot_ids] = value_states.transpose(1, 2)
        return keys[:, :, : self._attended], values[:, :, : self._attended]

    def advance(self, counts: Tensor, row: int | None = None) -> None:
        """Commit the first ``counts`` ([B] or scalar, int64, on the host) of the tokens written last."""
        self.lengths[slice(None) if row is None else row] += counts

    def rewind(self, lengths: Tensor) -> None:
        """Forget what stands past ``lengths`` [B] (int64, on the host) in rows that are longer."""
        self.lengths = torch.minimum(self.lengths, lengths)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest committed row. Models ask only where no position ids are given; ours always are."""
        return int(self.lengths.max())

    def __len__(self) -> int:
        return len(self._keys)

    def _allocate(self, like: Tensor) -> Tensor:
        # zeros, not empty: a masked slot is multiplied by zero, and zero times a stray NaN is NaN
        # whole buckets: were the last one cut short at `slots`, which grows with k, arms that draft differently would
        # attend to different lengths, and in low precision the kernels would round the same prefill differently
        return like.new_zeros(self.batch, like.shape[1], _bucketed(self.slots), like.shape[3])


def _bucketed(slots: int) -> int:
    return -(-slots // BUCKET) * BUCKET
