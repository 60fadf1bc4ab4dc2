"""Did a method say what plain decoding said? Token by token, and where not, was it a floating-point near-tie?

A verify pass of several tokens may round differently from a pass of one; where two tokens are almost equally likely the
arms can then part without any bug. So the first divergence of each prompt is judged by the target itself, re-scored at
that context in one plain pass. In float32 no tie is forgiven.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specbench.model import CausalLM
from specbench.sampling import Noise, Sampling

# Largest margin that counts as a near-tie. Greedy: in logits, so many roundings of the dtype at the size of the largest
# logit. Sampling: in probability, between the noise and the interval of the CDF that stands for the method's token.
ROUNDINGS = {torch.float32: 0, torch.bfloat16: 4, torch.float16: 4}
PROBABILITY_TIE = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


@dataclass(frozen=True)
class Divergence:
    """Where a method's reply first differs from the baseline's: ``position`` in the reply, the ``margin`` by which the
    target prefers the baseline's token, the ``tolerance`` below which that is a near-tie."""

    position: int
    margin: float
    tolerance: float

    @property
    def verdict(self) -> str:
        """``near-tie`` or ``mismatch``."""
        return "near-tie" if self.margin <= self.tolerance else "mismatch"


def first_divergence(
    target: CausalLM,
    uid: str,
    prompt: Sequence[int],
    baseline: Sequence[int],
    reply: Sequence[int],
    sampling: Sampling,
    seed: int,
) -> Divergence | None:
    """None if the replies are equal. A reply that is a mere beginning of the other is a mismatch of infinite margin:
    both arms stop by the same rule."""
    if list(baseline) == list(reply):
        return None
    shared = min(len(baseline), len(reply))
    position = next((i for i in range(shared) if baseline[i] != reply[i]), shared)
    if position == shared:
        return Divergence(position, float("inf"), 0.0)
    context = [*prompt, *baseline[:position]]
    cache = target.new_cache(1, len(context))
    tokens = torch.tensor([context], device=target.device)
    logits = target.forward(tokens, cache, last_only=True).logits[0, -1:]
    seen = None
    if sampling.needs_history:
        seen = torch.zeros(1, target.vocab_size, dtype=torch.bool, device=target.device)
        seen[0, tokens[0]] = True
    ours, theirs = baseline[position], reply[position]
    if sampling.greedy:
        scores = sampling.scores(logits, seen)[0]
        margin = (scores[ours] - scores[theirs]).abs().item()
        tolerance = ROUNDINGS[target.dtype] * torch.finfo(target.dtype).eps * scores.abs().max().item()
        return Divergence(position, margin, tolerance)
    law = sampling.law(logits, seen)[0].double()
    cdf = law.cumsum(0)
    noise = Noise(seed, [uid], len(context) + 1, target.device).at(torch.tensor([[len(context)]]), "target").item()
    low, high = (cdf[theirs] - law[theirs]).item(), cdf[theirs].item()
    return Divergence(position, max(low - noise, noise - high, 0.0), PROBABILITY_TIE[target.dtype])


def summarise(divergences: Sequence[Divergence | None]) -> dict[str, object]:
    """The verdict over all prompts, with counts and the largest margin of each kind."""
    found = [d for d in divergences if d is not None]
    ties = [d.margin for d in found if d.verdict == "near-tie"]
    bad = [d.margin for d in found if d.verdict == "mismatch"]
    verdict = "mismatch" if bad else "near-tie" if ties else "equal"
    return {
        "verdict": verdict,
        "prompts": len(divergences),
        "equal": len(divergences) - len(found),
        "near_ties": len(ties),
        "mismatches": len(bad),
        "largest_near_tie_margin": max(ties, default=None),
        "largest_mismatch_margin": max((m for m in bad if m != float("inf")), default=None),
    }
