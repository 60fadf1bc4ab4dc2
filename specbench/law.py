"""Does sampled text have the target's law? A test of each run, where drafts were sampled and equality says nothing.

The replies are decoded once more, with the laws q that the drafts were drawn from, and re-scored by the target
alone: p, the law of the next token at every place. Whatever the draft and whatever was accepted, the token x
that comes out at place i of a round is drawn from p if the method is lossless. So each of these has known moments
under p, and their sums over places, less their means, are a martingale:

    surprisal     log p(x)                  of all tokens, and of those that no draft was behind (bonus)
    overlap       min(1, q(x) / p(x))       text that leans to the drafter, or away from it
    acceptance    1 if the draft was kept   has mean sum_v min(p, q): Leviathan et al. 2023, theorem 3.5
    integral      P(p(X) > p(x)) + u P(p(X) = p(x)), u uniform, is uniform (Rosenblatt 1952)

Each is tested at its share of the level (Bonferroni). A tail of a sum is the heavier of the normal law's and of that
with its skewness (Pearson's third type, of which the normal is the limit): where drafts are hardly ever refused, one
that is refused proves nothing, nor that none is. In float32 a token that p rules out settles the matter alone; in half
precision rounding may carry one across the edge of a truncated law, and it counts as the least likely that is in.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from specbench.decoding import Step, decode
from specbench.drafting import Batch, Drafter, Request
from specbench.model import CausalLM
from specbench.sampling import Sampling
from specbench.stopping import StopRule
from specbench.verification import Draft, Verdict

LEVEL = 0.001  # chance of blaming an honest method
POWER = 0.95  # chance of noticing an error of the size that is stated
FEWEST = 100  # places below which nothing is said
SURE = 1e-10  # variance of a place, on average, below which all is as good as certain, and rounding is all there is
AT_ONCE = 64  # tokens whose logits are held at a time


@dataclass
class Score:
    """A sum of ``value - mean`` over places, with its variance and third central moment."""

    excess: float = 0.0
    variance: float = 0.0
    third: float = 0.0
    places: int = 0

    def add(self, value: float, mean: float, variance: float, third: float) -> None:
        """One place."""
        self.excess += value - mean
        self.variance += max(variance, 0.0)
        self.third += third if variance > 0 else 0.0
        self.places += 1

    @property
    def z(self) -> float:
        """Standard deviations from what is expected."""
        return self.excess / self.variance**0.5 if self.variance > 0 else 0.0

    @property
    def p_value(self) -> float:
        """Of a deviation as large, both ways."""
        if self.variance <= SURE * self.places:
            return 1.0
        skew = self.third / self.variance**1.5
        below = max(stats.norm.cdf(self.z), stats.pearson3.cdf(self.z, skew))
        above = max(stats.norm.sf(self.z), stats.pearson3.sf(self.z, skew))
        return float(min(1.0, 2 * min(below, above)))


@dataclass
class Evidence:
    """What the places of all replies say."""

    surprisal: Score = field(default_factory=Score)
    bonus: Score = field(default_factory=Score)
    overlap: Score = field(default_factory=Score)
    acceptance: Score = field(default_factory=Score)
    integrals: list[float] = field(default_factory=list)
    ruled_out: int = 0

    def verdict(self) -> dict[str, Any]:
        """For the record: ``verdict`` is law, mismatch or untested; ``p_value`` that of the whole; what an error must
        exceed to be noticed with the stated power."""
        scores = {"surprisal": self.surprisal, "bonus": self.bonus, "overlap": self.overlap}
        scores["acceptance"] = self.acceptance
        tests = {name: score.p_value for name, score in scores.items() if score.places >= FEWEST}
        if len(self.integrals) >= FEWEST:
            tests["integral"] = float(stats.kstest(self.integrals, "uniform").pvalue)
        p_value = min(1.0, len(tests) * min(tests.values())) if tests else None
        found = {
            "places": len(self.integrals),
            "ruled_out": self.ruled_out,
            "level": LEVEL,
            "p_value": p_value,
            "p_values": tests,
            "z": {name: scores[name].z for name in tests if name in scores},
            "power": POWER,
            **self._smallest(max(1, len(tests))),
        }
        if self.ruled_out or (p_value is not None and p_value < LEVEL):
            return {"verdict": "mismatch", **found}
        return {"verdict": "law" if tests else "untested", **found}

    def _smallest(self, tests: int) -> dict[str, float | None]:
        """Errors that are noticed with probability POWER, to first order: of the temperature, as a share of it (the
        mean of log p moves with the exponent of p by its variance); of the acceptance rate."""
        reach = float(stats.norm.isf(LEVEL / tests / 2) + stats.norm.ppf(POWER))
        told, kept = self.surprisal, self.acceptance
        return {
            "noticed_temperature": reach / told.variance**0.5 if told.variance > 0 else None,
            "noticed_acceptance": reach * kept.variance**0.5 / kept.places if kept.places else None,
        }


@torch.inference_mode()
def check(
    target: CausalLM,
    drafter: Drafter,
    batches: Sequence[Sequence[Request]],
    k: int,
    sampling: Sampling,
    seed: int,
    stop: StopRule,
) -> Evidence:
    """Decode the ``batches`` with ``k`` drafts a round, and gather what the replies say of their law."""
    evidence = Evidence()
    drafter.reset()
    heard = Listener(drafter)
    chance = np.random.default_rng(seed)
    for requests in batches:
        rounds: list[list[Round]] = [[] for _ in requests]
        for step in decode(target, heard, requests, k, sampling, seed, stop):
            for row, made in _rounds(step, heard):
                rounds[row].append(made)
        for request, all_made in zip(requests, rounds, strict=True):
            _weigh(target, request, all_made, sampling, chance, evidence)
    return evidence


@dataclass(frozen=True)
class Round:
    """What came out of a round for one row: the tokens; how many of them were drafts; the laws [n, V] that the first n
    were drafted from, none where nothing was drafted."""

    tokens: list[int]
    accepted: int
    laws: Tensor | None


class Listener(Drafter):
    """A drafter whose last draft can be looked at."""

    def __init__(self, drafter: Drafter):
        self._drafter = drafter
        self.taps, self.max_k = drafter.taps, drafter.max_k
        self.last: Draft | None = None

    def prepare(self, rows: int, slots: int, k: int) -> None:
        """See ``Drafter``."""
        self._drafter.prepare(rows, slots, k)

    def start(self, batch: Batch, taps: list[Tensor] | None) -> None:
        """See ``Drafter``."""
        self.last = None
        self._drafter.start(batch, taps)

    def propose(self, batch: Batch, k: int) -> Draft:
        """See ``Drafter``."""
        self.last = self._drafter.propose(batch, k)
        return self.last

    def observe(self, batch: Batch, verdict: Verdict, taps: Tensor | None) -> None:
        """See ``Drafter``."""
        self._drafter.observe(batch, verdict, taps)


def _rounds(step: Step, heard: Listener) -> Iterator[tuple[int, Round]]:
    """A step row by row; a round's laws are those of the drafts that came to be judged."""
    for i, row in enumerate(step.rows):
        laws = None
        if step.round and heard.last is not None and heard.last.probs is not None:
            judged = min(len(step.drafted[i]), len(step.committed[i]))
            laws = heard.last.probs[row, :judged].clone()
        yield row, Round(step.committed[i], step.accepted[i], laws)


def _weigh(
    target: CausalLM,
    request: Request,
    rounds: Sequence[Round],
    sampling: Sampling,
    chance: np.random.Generator,
    evidence: Evidence,
) -> None:
    """Add the places of one reply."""
    reply = [token for found in rounds for token in found.tokens]
    text = torch.tensor([*request.tokens, *reply], device=target.device)
    seen = None
    if sampling.needs_history:
        seen = torch.zeros(1, target.vocab_size, dtype=torch.bool, device=target.device)
        seen[0, text[: len(request.tokens)]] = True
    logits = rescore(target, text, len(request.tokens))
    for found in rounds:
        for i, token in enumerate(found.tokens):
            law = _sums_to_1(sampling.law(next(logits)[None], seen)[0])
            drafted_from = _sums_to_1(found.laws[i]) if found.laws is not None and i < len(found.laws) else None
            kept = i < found.accepted
            _judge(law, token, drafted_from, kept, float(chance.random()), evidence, target.dtype == torch.float32)
            if seen is not None:
                seen[0, token] = True


def _sums_to_1(law: Tensor) -> Tensor:
    """A law [V] without the rounding of the precision it was computed in."""
    exact = law.double()
    return exact / exact.sum()


@torch.inference_mode()
def rescore(target: CausalLM, text: Tensor, prompt: int) -> Iterator[Tensor]:
    """The target's logits [V] at each place of a reply, which follows the first ``prompt`` tokens of ``text``."""
    cache = target.new_cache(1, len(text))
    yield target.prefill(text[:prompt], cache, 0).logits[0, -1]
    for chunk in text[prompt:-1].split(AT_ONCE) if len(text) - prompt > 1 else ():
        yield from target.forward(chunk[None], cache, row=0).logits[0]
        cache.advance(torch.tensor(len(chunk)), row=0)


def _judge(p: Tensor, token: int, q: Tensor | None, kept: bool, u: float, evidence: Evidence, exact: bool) -> None:
    """Add one place: ``token`` came out where the target's law is ``p`` [V], and the draft, if any, was from ``q``.
    exact: rounding cannot explain a token that p rules out."""
    possible = p > 0
    chosen = p[token].item()
    if chosen == 0:
        evidence.ruled_out += exact
        chosen = p[possible].min().item()
    log_p = p.log().where(possible, 0.0)
    mean = (p * log_p).sum()
    off = log_p - mean
    surprisal = (math.log(chosen), mean.item(), (p * off.square()).sum().item(), (p * off.pow(3)).sum().item())
    evidence.surprisal.add(*surprisal)
    more_likely, as_likely = p[p > chosen].sum().item(), p[p == chosen].sum().item()
    evidence.integrals.append(min(1.0, more_likely + u * as_likely))
    if q is None:
        evidence.bonus.add(*surprisal)
        return
    overlap = (q / p).clamp(max=1.0).where(possible, 1.0)
    mass = (p * overlap).sum().item()
    off = overlap - mass
    evidence.overlap.add(overlap[token].item(), mass, (p * off.square()).sum().item(), (p * off.pow(3)).sum().item())
    spread = mass * (1 - mass)
    evidence.acceptance.add(float(kept), mass, spread, spread * (1 - 2 * mass))


@torch.inference_mode()
def surprise(target: CausalLM, texts: Sequence[Sequence[int]]) -> float | None:
    """Nats by which one of the first tokens of the ``texts`` surprises the target, on average; None if none has a
    second token."""
    total, places = 0.0, 0
    for text in texts:
        if len(text) > 1:
            tokens = torch.tensor(text[: 1 + AT_ONCE], device=target.device)
            logits = target.forward(tokens[None, :-1], target.new_cache(1, len(text)), row=0).logits[0].float()
            total += torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum").item()
            places += len(tokens) - 1
    return total / places if places else None
