"""How well a drafter drafts on known texts, computed without decoding anything.

A text is walked as decoding would walk it: from the last committed token the drafts are compared with what the text
says; those before the first wrong one are accepted, and one token of the target's own follows. For a text that the
target decoded greedily, or drew with drafts judged token by token, that is what decoding does, round by round.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafters.draft_model import OutputHead
from drafters.neural import Unrolled
from drafters.training.batches import Batch, Places, truths


@dataclass(frozen=True)
class Validation:
    """acceptance [K]: joint, by position, over the rounds that proposed so many. tokens_per_pass: committed tokens per
    verify pass. coverage: share of the tokens that the draft vocabulary has. loss: the objective's."""

    acceptance: list[float]
    tokens_per_pass: float
    coverage: float
    loss: float


def right(drafts: Unrolled, batch: Batch, head: OutputHead) -> Tensor:
    """Which drafts are what the text says: [B, A, K] bool."""
    answers = truths(batch, head, len(drafts.logits))
    return torch.stack(
        [logits.argmax(dim=-1) == truth.label for logits, truth in zip(drafts.logits, answers, strict=True)], dim=-1
    )


def walk(right: np.ndarray) -> Iterator[tuple[int, int]]:
    """Rounds over a reply whose position t, of N, has its drafts ``right`` [N, K] or not: how many were proposed and
    accepted in each. From position t on N-t tokens are left; in the round that ends the text nothing past its end
    counts, neither as proposed nor as accepted.

    >>> list(walk(np.array([[True, False], [True, True], [False, False]])))
    [(2, 1), (1, 0)]
    """
    position, size = 0, len(right)
    while position < size:
        hits = right[position]
        accepted = len(hits) if hits.all() else int(hits.argmin())
        left = size - position
        ends = accepted + 1 >= left
        yield (min(len(hits), left), min(accepted, left)) if ends else (len(hits), accepted)
        position += accepted + 1


@dataclass
class Tally:
    """Counts of rounds, to be turned into rates."""

    depth: int

    def __post_init__(self) -> None:
        self.proposed = np.zeros(self.depth, dtype=int)  # rounds that proposed at least so many
        self.accepted = np.zeros(self.depth, dtype=int)
        self.rounds = self.committed = 0

    def add(self, right: np.ndarray) -> None:
        """A reply, by what is ``right`` [N, K] at each of its positions."""
        for proposed, accepted in walk(right):
            self.rounds += 1
            self.proposed[:proposed] += 1
            self.accepted[:accepted] += 1
        self.committed += len(right)

    @property
    def acceptance(self) -> list[float]:
        """Joint acceptance by position."""
        return (self.accepted / self.proposed.clip(min=1)).tolist()

    @property
    def tokens_per_pass(self) -> float:
        """Committed tokens per round, the target's own included."""
        return self.committed / max(1, self.rounds)


def covered(batches: Sequence[Batch], ids: Tensor | None) -> float:
    """Share of the tokens to be guessed that are in the draft vocabulary ``ids``."""
    found = total = 0
    for batch in batches:
        places = Places(ids, batch.best.device)(batch.passages.tokens_after(2))
        found += int(((places >= 0) & batch.real).sum())
        total += batch.positions
    return found / max(1, total)
