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
    for none. logits [B, A, Vd]: the target's, at the tokens of the draft vocabulary, if they are asked for. total [B, A]: logsumexp of all the
    target's logits. likely [B, A] bool: the target's most likely token is in the draft vocabulary. known [B, A] bool:
    the text goes on that far."""

    label: Tensor
    logits: Tensor | None
    total: Tensor
    likely: Tensor
    known: Tensor


def loss(objective: Objective, drafts: Unrolled, truths: Iterator[Truth]) -> Tensor:
    """The loss of a batch; see the top of the file."""
    found = []
    for k, (logits, truth, weight) in enumerate(zip(drafts.logits, truths, objective.weights, strict=True)):
        log_q = logits.float().log_softmax(dim=-1)
        each = torch.zeros_like(truth.total)
        if objective.hard:
            nll = F.nll_loss(log_q.flatten(0, 1), truth.label.flatten(), ignore_index=-1, reduction="none")
            each = each + objective.hard * nll.view_as(each)
        if truth.logits is None:
            found.append(weight * _mean(each, truth.known))
            continue
        if objective.soft:
            p = truth.logits.float().softmax(dim=-1)  # over the draft vocabulary
            each = each - objective.soft * torch.einsum("abv,abv->ab", p, log_q) * truth.likely
        if objective.distance or objective.confidence:
            p = (truth.logits.float() - truth.total[..., None]).exp()  # of the whole vocabulary; the rest is missed
            q = log_q.exp()
            if objective.distance:
                each = each + objective.distance * ((p - q).abs().sum(dim=-1) + (1 - p.sum(dim=-1)).clamp(min=0))
            if objective.confidence and drafts.confidence is not None:
                accepted = torch.minimum(p, q).sum(dim=-1).detach().clamp(0, 1)  # 1 - TV
                bce = F.binary_cross_entropy_with_logits(drafts.confidence[..., k].float(), accepted, reduction="none")
                each = each + objective.confidence * bce
        found.append(weight * _mean(each, truth.known))
    return torch.stack(found).sum()


def _mean(each: Tensor, counted: Tensor) -> Tensor:
    """The mean of what is ``counted``; 0 where nothing is."""
    return (each * counted).sum() / counted.sum().clamp(min=1)
