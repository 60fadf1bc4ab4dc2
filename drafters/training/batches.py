"""Batches to train on: passages of conversations with what is right after them.

Legend: B conversations, T tokens of the longest, A positions, K drafts, D width, V vocabulary, Vd draft vocabulary.

At position t the target has been through the text up to t, token t+1 is known, and draft k (from 0) is a guess at token
t+2+k. Replies alone are learned from: the first position is a prompt's last token, the last leaves one token to guess.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.draft_model import OutputHead
from drafters.neural import Passages
from drafters.training.corpus import Conversation
from drafters.training.objective import Truth
from drafters.training.streams import Source, Streams, pack
from specbench.model import CausalLM

BUCKET = 16  # batches whose conversations are sorted by length together, against padding

# Sizes are multiples of these: each shape of a matrix product is prepared when it is first met, which takes a CPU
# several times as long as the product itself.
TOKENS, POSITIONS = 64, 32


@dataclass(frozen=True)
class Batch:
    """passages: with as many positions of each conversation as the longest reply has, and padding; ``real`` [B, A]
    bool: those that are not padding. hidden [B, T, D]: what the target's head reads. total, best [B, T]: see
    ``Streams``. lengths [B]: tokens of each conversation. numbers: which conversations."""

    passages: Passages
    real: Tensor
    hidden: Tensor
    total: Tensor
    best: Tensor
    lengths: Tensor
    numbers: Sequence[int]

    @property
    def positions(self) -> int:
        """How many positions are learned from."""
        return int(self.real.sum())


class Batches:
    """Makes batches of conversations."""

    def __init__(self, target: CausalLM, conversations: Sequence[Conversation], source: Source):
        """``source`` has the streams that the drafter reads, and after them the last one."""
        self._target, self._conversations, self._source = target, conversations, source

    def epoch(self, numbers: Sequence[int], tokens: int, seed: str) -> list[list[int]]:
        """``numbers`` of conversations in random order, in batches of so many ``tokens``."""
        draw = random.Random(seed)
        order = draw.sample(numbers, len(numbers))
        per_batch = max(1, tokens * len(order) // max(1, sum(map(self._length, order))))
        size = BUCKET * per_batch
        order = [
            i for start in range(0, len(order), size) for i in sorted(order[start : start + size], key=self._length)
        ]
        batches = pack(order, self._conversations, tokens)
        draw.shuffle(batches)
        return batches

    def make(self, numbers: Sequence[int], share: float, seed: str) -> Batch:
        """Of these conversations; at a ``share`` of their positions, drawn by ``seed``."""
        members = [self._conversations[i] for i in numbers]
        found = padded(self._source.of(numbers))
        device = self._target.device
        tokens = torch.zeros(found.total.shape, dtype=torch.long)
        draws = torch.Generator().manual_seed(random.Random(seed).getrandbits(63))
        chosen = []
        for row, member in enumerate(members):
            text = torch.tensor(member.tokens)
            tokens[row, : len(text)] = text
            places = torch.arange(len(member.prompt) - 1, len(text) - 2)
            if share < 1 and len(places):
                count = max(1, round(share * len(places)))
                places = places[torch.randperm(len(places), generator=draws)[:count]].sort().values
            chosen.append(places)
        at = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        at = F.pad(at, (0, -at.shape[1] % POSITIONS))
        real = torch.arange(at.shape[1]) < torch.tensor([[len(places)] for places in chosen])
        # out of inference mode: a copy may take part in gradients
        streams, last = found.taps[:, :, :-1].clone(), found.taps[:, :, -1].clone()
        return Batch(
            Passages(tokens.to(device), streams, at.to(device)),
            real.to(device),
            self._target.norm(last),
            found.total.clone(),
            found.best.clone(),
            torch.tensor([len(m.tokens) for m in members], device=device),
            numbers,
        )

    def _length(self, number: int) -> int:
        return len(self._conversations[number].prompt) + len(self._conversations[number].reply)


def padded(found: Streams) -> Streams:
    """With tokens up to a multiple of ``TOKENS``."""
    more = -found.total.shape[1] % TOKENS
    return Streams(
        F.pad(found.taps, (0, 0, 0, 0, 0, more)), F.pad(found.total, (0, more)), F.pad(found.best, (0, more))
    )


def truths(
    batch: Batch, head: OutputHead, depth: int, scaled: Callable[[Tensor], Tensor] | None = None
) -> Iterator[Truth]:
    """What is right at each of ``depth`` drafts, over the draft vocabulary of ``head``, whose rows are the target's.
    ``scaled``: see ``CausalLM``; without it the target's own logits are left out."""
    passages = batch.passages
    places = Places(head.ids, batch.best.device)
    before = [(passages.at + 1 + k).clamp(max=passages.tokens.shape[1] - 1) for k in range(depth)]
    logits = None if scaled is None else _laws(batch, head, before, scaled)
    for k in range(depth):
        known = batch.real & (passages.at + 2 + k < batch.lengths[:, None])
        yield Truth(
            torch.where(known, places(passages.tokens_after(2 + k)), -1),
            None if logits is None else logits(before[k]),
            batch.total.gather(1, before[k]),
            places(batch.best.gather(1, before[k])) >= 0,
            known,
        )


@torch.no_grad()
def _laws(
    batch: Batch, head: OutputHead, before: Sequence[Tensor], scaled: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """The target's logits [B, A, Vd] after given tokens: computed once for all tokens that any draft asks for."""
    wanted = torch.zeros_like(batch.best, dtype=torch.bool)
    for positions in before:
        wanted.scatter_(1, positions, True)
    assert head.lm_head is not None
    read = batch.hidden[wanted]
    read = F.pad(read, (0, 0, 0, -len(read) % POSITIONS))
    logits = scaled(head.lm_head(read))  # [N, Vd]
    row = wanted.flatten().cumsum(0).view_as(wanted) - 1
    return lambda positions: logits[row.gather(1, positions)]


class Places:
    """Places of tokens in a draft vocabulary."""

    def __init__(self, ids: Tensor | None, device: torch.device):
        """``ids`` [Vd], ascending; None for all tokens."""
        self._ids = None if ids is None else ids.to(device)

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens [...] -> places [...]; -1 for those that have none."""
        if self._ids is None:
            return tokens
        found = torch.searchsorted(self._ids, tokens).clamp(max=len(self._ids) - 1)
        return torch.where(self._ids[found] == tokens, found, -1)
