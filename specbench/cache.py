"""One static key/value cache for a batch whose rows advance unevenly.

Legend: B rows, S tokens in this forward, T slots, T' slots attended to, H key/value heads, E head width, W numbers kept
per slot and layer (all key heads, then all value heads).

Every layer keeps one tensor ``[B, T, W]``; every row has a length, the number of slots that hold committed tokens. A
forward of S tokens writes row b at slots ``length[b] .. length[b]+S-1`` and attends, under a mask made from the
lengths, to what stands before. Rejecting drafted tokens is not advancing the length: rollback costs nothing, leaves no
holes, and a sliding window is only another mask. Slot and logical position are the same number.

Two rows, lengths 3 and 5, S=2: row 0 writes slots 3, 4 and row 1 writes 5, 6. If row 0 keeps one token and row 1 both,
the lengths become 4 and 7; what stands in row 0's slot 4 is junk that no mask shows and the next forward overwrites.

``place`` is the host's part of a forward; all that follows reads tensors only, and so can be recorded and replayed for
other lengths.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from specbench.graphs import Recordings

BUCKET = 64  # slots; forwards attend to a multiple of this, so that few distinct shapes occur


class RaggedCache(Cache):
    """Keys and values of every layer for ``batch`` rows of ``slots`` slots, with a length per row.

    It is a transformers ``Cache``, so unmodified models write to it; layers are allocated when first written.
    """

    is_compileable = False

    def __init__(
        self, batch: int, slots: int, device: torch.device, max_position: int | None = None, whole: bool = False
    ):
        """``max_position``: largest position id to hand out (learned position tables end there); None for no limit.
        ``whole``: always attend to all slots, so that forwards of S tokens have one shape whatever the lengths are.
        """
        super().__init__(layers=[])
        self.batch = batch
        self.slots = slots
        self.device = device
        self.max_position = max_position
        self.whole = whole
        self.lengths = torch.zeros(batch, dtype=torch.long)  # host; [B]
        # whole buckets: were the last one cut short at `slots`, which grows with k, arms that draft differently would
        # attend to different lengths, and in low precision the kernels would round the same prefill differently
        self._capacity = bucketed(slots)
        self.recordings = Recordings(device)  # of forwards on this cache
        self._kept: dict[int, Tensor] = {}
        self._starts = torch.zeros(batch, dtype=torch.long, device=device)  # one buffer: recorded forwards read it
        self._ids = torch.arange(self._capacity, device=device)
        self._rows = slice(None)
        self._attended = 0
        self._where = self._ids[:0]  # of the writes of this forward

    def place(self, steps: int, row: int | None = None) -> None:
        """Say where the next forward writes: ``steps`` tokens for all rows, or for one ``row`` alone.

        Raises ValueError when a row would run past its slots.
        """
        self._rows = slice(None) if row is None else slice(row, row + 1)
        end = int(self.lengths[self._rows].max()) + steps
        if end > self.slots:
            raise ValueError(f"a row needs {end} cache slots and there are {self.slots}")
        self._attended = self._capacity if self.whole else bucketed(end)
        self._starts.copy_(self.lengths, non_blocking=True)

    @property
    def starts(self) -> Tensor:
        """First slot that the forward writes in each of its rows, [B]."""
        return self._starts[self._rows]

    @property
    def ids(self) -> Tensor:
        """The slots it attends to, [T']."""
        return self._ids[: self._attended]

    def locate(self, tokens: Tensor) -> Tensor:
        """Slots [B, S] of ``tokens`` [B, S], to which ``update`` will write. Part of what is recorded, and so done by
        every forward."""
        slots = written_slots(tokens, self.starts)
        self._where = places(slots, self._capacity)
        return slots

    def position_ids(self, slots: Tensor) -> Tensor:
        """Logical positions of ``slots``. Past the last position only tokens that can never be committed stand, so
        they are given the last one."""
        return slots if self.max_position is None else slots.clamp(max=self.max_position)

    def layer(self, index: int, like: Tensor) -> Tensor:
        """What a layer keeps of the forward's rows, [B, T, W]: a view, to write to. ``like`` [..., W] gives the width
        and kind of a layer that is not there yet."""
        if index not in self._kept:
            # zeros, not empty: a masked slot is multiplied by zero, and zero times a stray NaN is NaN
            self._kept[index] = like.new_zeros(self.batch, self._capacity, like.shape[-1])
        return self._kept[index][self._rows]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by an unmodified model's attention: keys and values [B, H, S, E] in, those attended to out."""
        keys, values = key_states.transpose(1, 2).flatten(2), value_states.transpose(1, 2).flatten(2)
        entries = torch.cat((keys, values), dim=-1)
        kept = self.layer(layer_idx, entries)
        write(kept, entries, self._where)
        kept = kept[:, : self._attended]
        heads = (kept[..., : keys.shape[-1]], key_states), (kept[..., keys.shape[-1] :], value_states)
        keys, values = (part.unflatten(-1, (like.shape[1], like.shape[3])).transpose(1, 2) for part, like in heads)
        return keys, values

    def advance(self, counts: Tensor, row: int | None = None) -> None:
        """Commit the first ``counts`` ([B] or scalar, int64, on the host) of the tokens written last."""
        self.lengths[slice(None) if row is None else row] += counts

    def rewind(self, lengths: Tensor) -> None:
        """Forget what stands past ``lengths`` [B] (int64, on the host) in rows that are longer."""
        self.lengths = torch.minimum(self.lengths, lengths)

    def clear(self) -> None:
        """Forget everything, and keep the memory for other texts."""
        self.lengths = torch.zeros_like(self.lengths)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one token takes in all layers written so far."""
        return sum(kept.shape[-1] * kept.element_size() for kept in self._kept.values())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest committed row. Models ask only where no position ids are given; ours always are."""
        return int(self.lengths.max())

    def __len__(self) -> int:
        return len(self._kept)


def written_slots(tokens: Tensor, starts: Tensor) -> Tensor:
    """Slots [B, S] that a forward of ``tokens`` [B, S] writes, from ``starts`` [B] on."""
    return starts[:, None] + torch.arange(tokens.shape[1], device=tokens.device)


def visible(slots: Tensor, ids: Tensor, window: int | None = None) -> Tensor:
    """Which of the slots ``ids`` [T'] each written one of ``slots`` [B, S] sees: [B, S, T'] bool. ``window``: only so
    many back, itself included."""
    distance = slots[..., None] - ids
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def places(slots: Tensor, capacity: int) -> Tensor:
    """Where the slots [B, S] stand among all slots of all rows, of ``capacity`` slots each: [B*S]."""
    rows = torch.arange(slots.shape[0], device=slots.device)
    return (slots + rows[:, None] * capacity).flatten()


def write(kept: Tensor, entries: Tensor, where: Tensor) -> None:
    """Put ``entries`` [B, S, W] into ``kept`` [B, T, W], in place, at the ``places`` [B*S]."""
    kept.view(-1, kept.shape[2]).index_copy_(0, where, entries.flatten(0, 1))


def bucketed(slots: int) -> int:
    """``slots`` rounded up to whole buckets."""
    return -(-slots // BUCKET) * BUCKET
