"""Did a method say what plain decoding said? Token by token, and where not, was it a floating-point near-tie?

A verify pass of several tokens may round differently from a pass of one; where two tokens are almost equally likely the
arms can then part without any bug. So where a reply differs, its tokens from there on are judged by the target itself,
which scores the whole reply in one go. In float32 no greedy tie is forgiven.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.law import Evidence, rescore
from specbench.model import CausalLM
from specbench.sampling import Noise, Sampling

# Largest margin that counts as a near-tie. Greedy: in logits, so many roundings of the dtype at the size of the largest
# logit. Sampling: in probability, between the noise and the interval of the CDF that stands for the method's token; it
# must hold for every place of every reply: of 1,000 places of the default model in bfloat16 the largest were 0.04-0.06.
ROUNDINGS = {torch.float32: 0, torch.bfloat16: 4, torch.float16: 4}
PROBABILITY_TIE = {torch.float32: 1e-5, torch.bfloat16: 0.15, torch.float16: 0.02}


@dataclass(frozen=True)
class Divergence:
    """Where a method's reply is not what plain decoding says: ``position`` in the reply; the ``margin`` by which the
    target, asked alone, prefers its own choice (sampling: the distance of the noise from where it would have chosen the
    method's token); the ``tolerance`` up to which that is a near-tie."""

    position: int
    margin: float
    tolerance: float

    @property
    def verdict(self) -> str:
        """``near-tie`` or ``mismatch``."""
        return "near-tie" if self.margin <= self.tolerance else "mismatch"


def parting(baseline: Sequence[int], reply: Sequence[int]) -> int | None:
    """The first place at which two replies differ, or one has ended; None if they are equal."""
    if list(baseline) == list(reply):
        return None
    shared = min(len(baseline), len(reply))
    return next((i for i in range(shared) if baseline[i] != reply[i]), shared)


def divergence(
    target: CausalLM,
    uid: str,
    prompt: Sequence[int],
    baseline: Sequence[int],
    reply: Sequence[int],
    sampling: Sampling,
    seed: int,
) -> Divergence | None:
    """None if the replies are equal, else the first place that is a mismatch, or where there is none the first at which
    they differ.

    From there on the reply is one of its own, so each of its tokens is judged by what the target says after those
    before it. A reply that is a mere beginning of the other is a mismatch of infinite margin: both arms stop by the
    same rule.
    """
    position = parting(baseline, reply)
    if position is None:
        return None
    if position == min(len(baseline), len(reply)):
        return Divergence(position, math.inf, 0.0)
    text = torch.tensor([*prompt, *reply], device=target.device)
    places = torch.arange(len(prompt), len(text), device=target.device)
    noise = Noise(seed, [uid], len(text), target.device).at(places[None], "target")[0].tolist()
    seen = None
    if sampling.needs_history:
        seen = torch.zeros(1, target.vocab_size, dtype=torch.bool, device=target.device)
        seen[0, text[: len(prompt)]] = True
    first = None
    for i, logits in enumerate(rescore(target, text, len(prompt))):
        if i >= position:
            scores = sampling.scores(logits[None], seen)[0]
            both = (reply[i], baseline[i]) if i == position else (reply[i],)
            found = Divergence(i, *_margin(scores, both, None if sampling.greedy else noise[i], target.dtype, sampling))
            first = first or found
            if found.verdict == "mismatch":
                return found
        if seen is not None:
            seen[0, reply[i]] = True
    return first


def _margin(
    scores: Tensor, tokens: Sequence[int], noise: float | None, dtype: torch.dtype, sampling: Sampling
) -> tuple[float, float]:
    """Of a place with these ``scores`` [V]: by how much the target prefers its own choice to the least likely of the
    ``tokens`` (sampling: to the first of them), and up to where that is a near-tie."""
    if noise is not None:
        # where a law is sharpened, a rounding of a logit moves more of it
        tolerance = PROBABILITY_TIE[dtype] / min(1.0, sampling.temperature)
        return _distance(scores, tokens[0], noise, exact=dtype == torch.float32), tolerance
    top = scores.max().item()
    return top - scores[list(tokens)].min().item(), ROUNDINGS[dtype] * torch.finfo(dtype).eps * abs(top)


def _distance(scores: Tensor, token: int, noise: float, exact: bool) -> float:
    """How far ``noise`` is, in probability, from the interval of the CDF that stands for ``token``. For a token that
    the law rules out it is infinite if the law is ``exact``; else rounding may have carried the token across the edge
    of a truncated law, and its interval is a point."""
    law = scores.softmax(dim=-1).double()
    if law[token] == 0 and exact:
        return math.inf
    high = law.cumsum(0)[token].item()
    return max(high - law[token].item() - noise, noise - high, 0.0)


def summarise(
    divergences: Sequence[Divergence | None], evidence: Evidence | None = None, by_law: bool = False
) -> dict[str, object]:
    """The verdict over all prompts, with counts and the largest margin of each kind.

    ``by_law``: drafts were sampled, so the text should have the target's law but need not be plain sampling's; then
    replies that differ say nothing, and the verdict is that of the ``evidence``: law, mismatch, or untested.
    """
    if by_law:
        same = sum(d is None for d in divergences)
        tested = (evidence or Evidence()).verdict()
        return {"prompts": len(divergences), "equal": same, **tested}
    found = [d for d in divergences if d is not None]
    return counts(["equal" if d is None else d.verdict for d in divergences]) | {
        "largest_near_tie_margin": max((d.margin for d in found if d.verdict == "near-tie"), default=None),
        "largest_mismatch_margin": max(
            (d.margin for d in found if d.verdict == "mismatch" and d.margin != math.inf), default=None
        ),
    }


def holds(lossless: Mapping[str, Any]) -> bool:
    """Whether a verdict, as records have it, is that of a lossless method; a near-tie is the target's own rounding."""
    return lossless["verdict"] in ("equal", "near-tie", "law")


def counts(verdicts: Sequence[str]) -> dict[str, object]:
    """How many prompts there are of each verdict, and the worst."""
    of = Counter(verdicts)
    worst = next((verdict for verdict in ("mismatch", "near-tie") if of[verdict]), "equal")
    return {
        "verdict": worst,
        "prompts": len(verdicts),
        "equal": of["equal"],
        "near_ties": of["near-tie"],
        "mismatches": of["mismatch"],
    }
