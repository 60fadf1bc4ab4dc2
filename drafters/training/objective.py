"""What a drafter is trained for: the losses of the published recipes, in one formula.

Legend: B texts, A positions of each, K drafts, V the target's vocabulary, Vd the draft vocabulary; p the target's law
after the true tokens, q the network's.

    loss = sum_k w_k mean( hard * -log q(x_k)  +  soft * -sum_v p(v) log q(v)  +  distance * sum_v |p(v) - q(v)|
                           +  confidence * BCE(c_k, 1 - TV(p, q)) ),          w_k = decay^k / sum_j decay^j

EAGLE-3 (Li et al. 2025) is soft alone, MTP (FastMTP, Cai et al. 2025) and Medusa (Cai et al. 2024) are hard alone, as
is DFlash (Chen et al. 2026), whose exp(-k / gamma) is a decay; DSpark (DeepSeek-AI 2026) is 0.1 hard, 0.9 distance and
1 confidence. Tokens outside of the draft vocabulary cannot be learned: where x_k is one, hard says nothing, and where
the most likely one is, soft says nothing. Where a text has no further token, nothing is said at all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.neural import Unrolled
from specbench.errors import ConfigError


@dataclass(frozen=True)
class Objective:
    """See the top of the file. depth: drafts that are trained. positions: share of a reply's positions that a step
    trains, drawn anew each time. rate: highest learning rate."""

    depth: int
    decay: float = 1.0
    hard: float = 0.0
    soft: float = 0.0
    distance: float = 0.0
    confidence: float = 0.0
    positions: float = 1.0
    rate: float = 1e-3

    def __post_init__(self) -> None:
        if type(self.depth) is not int or self.depth < 1:
            raise ConfigError(f"recipe.depth={self.depth} trains nothing; give 1 or more")
        for name in ("hard", "soft", "distance", "confidence"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"recipe.{name}={getattr(self, name)} is no weight; give 0 or more")
        if self.hard + self.soft + self.distance == 0:
            raise ConfigError(
                "recipe: hard, soft and distance are all 0, so that nothing is learned; give one a weight"
            )
        for name in ("decay", "positions"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"recipe.{name}={getattr(self, name)} is not in (0, 1]")
        if not self.rate > 0:
            raise ConfigError(f"recipe.rate={self.rate} is no learning rate")

    @property
    def weights(self) -> list[float]:
        """w_k."""
        total = sum(self.decay**k for k in range(self.depth))
        return [self.decay**k / total for k in range(self.depth)]

    @property
    def reads_law(self) -> bool:
        """Whether the target's law is asked for, or its tokens alone."""
        return self.soft + self.distance + self.confidence > 0


@dataclass(frozen=True)
class Truth:
    """What is right at one draft of each position. label [B, A]: place of the true token in the draft vocabulary, -1
    for none. logits [B, A, Vd]: the target's, at the tokens of the draft vocabulary, if they are asked for. total
    [B, A]: logsumexp of all the target's logits. likely [B, A] bool: the target's most likely token is in the draft
    vocabulary. known [B, A] bool: the text goes on that far."""

    label: Tensor
    logits: Tensor | None
    total: Tensor
    likely: Tensor
    known: Tensor


def loss(objective: Objective, drafts: Unrolled, truths: Iterator[Truth]) -> Tensor:
    """The loss of a batch; see the top of the file."""
    found = []
    for k, (logits, truth, weight) in enumerate(zip(drafts.logits, truths, objective.weights, strict=True)):
        each, accepted = Losses.apply(logits, truth, objective)
        if objective.confidence and drafts.confidence is not None:
            guess = drafts.confidence[..., k].float()
            bce = F.binary_cross_entropy_with_logits(guess, accepted, reduction="none")
            each = each + objective.confidence * bce
        found.append(weight * each.where(truth.known, 0).sum() / truth.known.sum().clamp(min=1))
    return torch.stack(found).sum()


class Losses(torch.autograd.Function):
    """The terms that depend on logits [B, A, Vd], of each position [B, A]; and the share of drafts drawn from q that
    would be accepted, 1 - TV(p, q) [B, A], which has no gradient.

    A few rows are done at a time, loss and gradient together, so that their float32 laws never leave the processor's
    cache: with autograd's own steps they took longer than the network. With s = sign(q - p), the gradients by the
    logits are  hard: q - [v = x];  soft: q - p;  distance: q (s - sum_v s q).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, truth: Truth, goal: Objective) -> tuple[Tensor, Tensor]:
        """See above."""
        shape, rows = logits.shape[:2], logits.flatten(0, 1)
        gradient = torch.empty_like(rows)
        each = torch.zeros(len(rows), device=rows.device)
        accepted = torch.zeros_like(each)
        label, total, likely = (t.flatten() for t in (truth.label, truth.total, truth.likely))
        laws = None if truth.logits is None else truth.logits.flatten(0, 1)
        step = ROWS if rows.device.type == "cpu" else len(rows)
        for start in range(0, len(rows), max(1, step)):
            part = slice(start, start + step)
            log_q = rows[part].log_softmax(dim=-1, dtype=torch.float32)
            if goal.hard:
                seen = goal.hard * (label[part] >= 0)
                place = label[part].clamp(min=0)[:, None]
                each[part] -= seen * log_q.gather(1, place)[:, 0]
            if laws is not None and goal.soft:
                liked = goal.soft * likely[part]
                p_drafted = laws[part].softmax(dim=-1, dtype=torch.float32)  # over the draft vocabulary
                each[part] -= liked * (p_drafted * log_q).sum(dim=-1)
            q = log_q.exp_()
            if laws is not None and (goal.distance or goal.confidence):
                p = (laws[part].float() - total[part][:, None]).exp_()  # of the whole vocabulary; the rest is missed
                difference = q - p
                accepted[part] = torch.minimum(p, q).sum(dim=-1).clamp(0, 1)
                each[part] += goal.distance * (difference.abs().sum(dim=-1) + (1 - p.sum(dim=-1)).clamp(min=0))
                sign = difference.sign_()
                slope = sign.sub_((sign * q).sum(dim=-1, keepdim=True)).mul_(goal.distance).mul_(q)
            else:
                slope = torch.zeros((), device=q.device)
            if laws is not None and goal.soft:
                slope = slope + liked[:, None] * (q - p_drafted)
            if goal.hard:
                slope = slope + q.mul_(seen[:, None])
                slope.scatter_add_(1, place, -seen[:, None])
            gradient[part] = slope
        ctx.save_for_backward(gradient)
        accepted = accepted.view(shape)
        ctx.mark_non_differentiable(accepted)
        return each.view(shape), accepted

    @staticmethod
    def backward(ctx: Any, by_each: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        """See above."""
        (gradient,) = ctx.saved_tensors
        weights = by_each.flatten().to(gradient.dtype)
        gradient.mul_(weights[:, None])  # in place: it is read once
        gradient[weights == 0] = 0  # where nothing is known there may be infinities
        return gradient.view(*by_each.shape, -1), None, None


ROWS = 16  # of logits done at a time on a CPU
