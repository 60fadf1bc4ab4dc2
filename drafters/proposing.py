"""How logits become a draft: the choice of each token, greedily or by a draw, and the law it was drawn from.

Legend: B rows, K drafted tokens, V the target's vocabulary, Vd the draft vocabulary.

A token outside of the draft vocabulary is never proposed: its q is 0, which verification takes as it takes any q.
"""

import torch
from torch import Tensor

from specbench.drafting import Batch
from specbench.errors import ConfigError
from specbench.sampling import draw
from specbench.verification import Draft

PROPOSALS = ("greedy", "sample")


def check_proposal(proposal: str) -> None:
    """Raise ConfigError unless ``proposal`` is one of PROPOSALS."""
    if proposal not in PROPOSALS:
        raise ConfigError(f"drafter.proposal={proposal} is unknown; choices: {', '.join(PROPOSALS)}")


class Proposal:
    """A draft in the making: one token per row at a time, from logits over the draft vocabulary.

    Laws are those of ``batch.sampling``, as the target's are, so that no draft is drawn under another law than the one
    it is judged by.
    """

    def __init__(self, batch: Batch, proposal: str, vocab_size: int, ids: Tensor | None = None):
        """``ids`` [Vd]: target ids of the draft vocabulary, None where it is the whole vocabulary of ``vocab_size``."""
        self._batch = batch
        self._sampled = proposal == "sample" and not batch.sampling.greedy
        self._ids = ids
        self._vocab_size = vocab_size
        self._seen = batch.seen
        self._tokens: list[Tensor] = []
        self._laws: list[Tensor] = []

    def add(self, logits: Tensor) -> Tensor:
        """Choose the next token of each row by logits [B, Vd]: [B] target ids."""
        sampling, seen = self._batch.sampling, self._seen
        if seen is not None and self._ids is not None:
            seen = seen[:, self._ids]
        if self._sampled:
            noise = self._batch.noise_at(len(self._tokens), 1, "draft")
            assert noise is not None
            law = sampling.law(logits, seen)
            chosen = draw(law, noise[:, 0])
            self._laws.append(law)
        else:
            chosen = sampling.likeliest(logits, seen)
        tokens = chosen if self._ids is None else self._ids[chosen]
        self._tokens.append(tokens)
        if self._seen is not None:
            self._seen = self._seen.scatter(1, tokens[:, None], True)
        return tokens

    def draft(self, confidence: Tensor | None = None) -> Draft:
        """All that was chosen. ``confidence`` [B, K]: see ``Draft``."""
        if not self._tokens:
            return Draft.empty(len(self._batch), self._batch.device)
        tokens = torch.stack(self._tokens, dim=1)
        count = torch.full((len(tokens),), tokens.shape[1], dtype=torch.long, device=tokens.device)
        return Draft(tokens, count, self._probs() if self._laws else None, confidence)

    def _probs(self) -> Tensor:
        """[B, K, V]."""
        laws = torch.stack(self._laws, dim=1)
        if self._ids is None:
            return laws
        return laws.new_zeros(*laws.shape[:2], self._vocab_size).index_copy_(2, self._ids, laws)
