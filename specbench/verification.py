"""The accept/reject rule of speculative decoding. Pure: tensors in, tensors out.

Legend: B rows, K drafted tokens, V vocabulary.

Position i of the verify pass (0-based) is the target's law after the last committed token and the first i drafts; it
judges draft i, and position ``count`` yields the bonus token when every draft was accepted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.sampling import Sampling, draw


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for one round.

    tokens [B, K] int64; entries at and past ``count`` are padding.
    count  [B] int64 in 0..K: how many tokens the row proposes.
    probs  [B, K, V] float32: the law each token was sampled from; None means the proposal was deterministic.
    confidence [B, K] float32: how likely the drafter takes each token to be accepted if those before it are; None where
           it does not say.
    """

    tokens: Tensor
    count: Tensor
    probs: Tensor | None = None
    confidence: Tensor | None = None

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> "Draft":
        """A draft of no tokens."""
        none = torch.zeros(batch, 0, dtype=torch.long, device=device)
        return cls(none, torch.zeros(batch, dtype=torch.long, device=device))


@dataclass(frozen=True)
class Verdict:
    """What the target made of a draft: ``accepted`` [B] leading drafts are kept, ``next`` [B] is the token the target
    adds after them (the correction of the first rejected draft, or the bonus)."""

    accepted: Tensor
    next: Tensor


def verify(
    draft: Draft,
    logits: Tensor,
    sampling: Sampling,
    noise_target: Tensor | None = None,
    noise_accept: Tensor | None = None,
    seen: Tensor | None = None,
) -> Verdict:
    """Judge ``draft`` by the target's ``logits`` [B, K+1, V] so that the emitted text has exactly the target's law.

    noise_target [B, K+1] and noise_accept [B, K] are uniforms of the positions being decided (unused when greedy);
    ``seen`` [B, K+1, V] marks the tokens before each position, for the repetition penalty.

    A deterministic draft is accepted while it equals what the target itself draws at that position with that
    position's noise; so sampled text equals, token for token, what plain decoding yields. A sampled draft x ~ q is
    accepted with probability min(1, p(x)/q(x)); the first rejected one is replaced by a draw from norm((p - q)+)
    (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Theorem 1).
    """
    drafted = draft.tokens.shape[1]
    proposed = torch.arange(drafted, device=draft.tokens.device) < draft.count[:, None]  # [B, K]
    if draft.probs is None or sampling.greedy:
        own = sampling.choose(logits, noise_target, seen)  # [B, K+1]
        accepted = _leading(proposed & (own[:, :drafted] == draft.tokens))
        return Verdict(accepted, own.gather(1, accepted[:, None]).squeeze(1))

    if noise_target is None or noise_accept is None:
        raise ValueError("judging a sampled draft needs noise for acceptance and for the target's own token")
    p = sampling.law(logits, seen)  # [B, K+1, V]
    q = draft.probs
    p_x = p[:, :drafted].gather(2, draft.tokens[..., None]).squeeze(2)  # [B, K]
    q_x = q.gather(2, draft.tokens[..., None]).squeeze(2)
    accepted = _leading(proposed & (noise_accept * q_x < p_x))  # u < p/q without the division
    rows = torch.arange(len(accepted), device=accepted.device)
    p_next = p[rows, accepted]  # [B, V]
    padded_q = torch.cat([q, torch.zeros_like(q[:, :1])], dim=1)
    bonus = accepted == draft.count
    q_next = torch.where(bonus[:, None], 0.0, padded_q[rows, accepted])
    residual = (p_next - q_next).clamp(min=0)
    # p == q everywhere leaves nothing over; then a rejection can only come from rounding and p itself is right
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p_next)
    return Verdict(accepted, draw(residual, noise_target[rows, accepted]))


def _leading(kept: Tensor) -> Tensor:
    """How many of ``kept`` [B, K] hold before the first that does not: [B] int64."""
    return kept.long().cumprod(dim=1).sum(dim=1)
