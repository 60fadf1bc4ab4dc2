"""What speedup should have come out, from acceptance and costs alone; so that a measured one can be doubted.

A round drafts k tokens, verifies k+1, judges and keeps books, and leaves E(k) tokens; plain decoding leaves one in a
round of its own. So

    E(k) = 1 + sum_{i=1..k} P(first i drafts accepted)         speedup(k) = E(k) plain / (draft(k) + pass(k+1) + rest)

(Leviathan et al. 2023, theorem 3.8, whose acceptances are independent and whose pass costs the same whatever it sees;
here both are as measured). All times are seconds of a round, at one batch size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench.cost import break_even, curves
from specbench.errors import ConfigError

BELIEVABLE = 0.10  # largest share by which measured and predicted may differ without an explanation


@dataclass(frozen=True)
class Costs:
    """Seconds of a round and its parts. plain: a round of plain decoding. passes: of the target over so many tokens a
    row. drafts: of drafting so many tokens, 1 and more. rest: judging and keeping books."""

    plain: float
    passes: Mapping[int, float]
    drafts: Mapping[int, float]
    rest: float = 0.0

    def known(self, k: int) -> bool:
        """Whether all that a round of ``k`` drafts is made of was measured."""
        return k == 0 or (k + 1 in self.passes and k in self.drafts)

    def round(self, k: int) -> float:
        """Seconds of a round of ``k`` drafts; of none it is plain decoding's."""
        return self.plain if k == 0 else self.drafts[k] + self.passes[k + 1] + self.rest


@dataclass(frozen=True)
class Prediction:
    """What ``k`` drafts a round should give. seconds: of a round. bound: the speedup were every draft right, at the
    same cost. break_even: the acceptance, were it the same for every draft and independent of the others, at which
    drafting neither wins nor loses; None where it cannot win, or there is nothing to accept."""

    k: int
    tokens_per_pass: float
    seconds: float
    speedup: float
    bound: float
    break_even: float | None


def survival(histogram: Sequence[int]) -> list[float]:
    """Share of all rounds whose first i drafts were accepted, i = 1..k, of the counts of rounds by accepted drafts.

    >>> survival([2, 1, 1])
    [0.5, 0.25]
    """
    rounds = sum(histogram)
    return [sum(histogram[i:]) / rounds if rounds else 0.0 for i in range(1, len(histogram))]


def tokens_per_pass(survived: Sequence[float], k: int) -> float:
    """E(k).

    >>> tokens_per_pass([0.75, 0.5, 0.25], 2)
    2.25
    """
    return 1.0 + sum(survived[:k])


def speedup(tokens: float, plain: float, seconds: float) -> float:
    """Of rounds of so many ``seconds`` that leave ``tokens`` each, over ``plain`` seconds a token.

    >>> round(speedup(4, plain=0.020, seconds=4 * 0.002 + 0.025), 1)
    2.4
    >>> round(speedup(1.5, plain=0.020, seconds=4 * 0.002 + 0.025), 1)
    0.9
    """
    return tokens * plain / seconds


def predict(survived: Sequence[float], costs: Costs) -> list[Prediction]:
    """For every k from 0 to the number of drafts that were judged, as far as its costs are known."""
    return [_predict(survived, costs, k) for k in range(len(survived) + 1) if costs.known(k)]


def _predict(survived: Sequence[float], costs: Costs, k: int) -> Prediction:
    seconds, expected = costs.round(k), tokens_per_pass(survived, k)
    even = None
    if k:
        even = break_even((seconds - costs.drafts[k]) / costs.plain, costs.drafts[k] / k / costs.plain, k)
    return Prediction(
        k,
        expected,
        seconds,
        speedup(expected, costs.plain, seconds),
        speedup(k + 1, costs.plain, seconds),
        even,
    )


def best(predictions: Sequence[Prediction]) -> Prediction:
    """The best fixed draft length in hindsight: the shortest of equals, 0 where drafting does not pay."""
    return max(predictions, key=lambda found: (found.speedup, -found.k))


def elsewhere(survived: Sequence[float], costs: Costs, curve: Mapping[str, Any], batch: int) -> list[Prediction]:
    """The same acceptance on the machine of ``curve`` (what scripts/verify_cost.py writes), at a batch size of it.

    What drafting and the rest cost there is not known; they are taken to be the same multiples of a plain round as
    here, and a plain round the same multiple of its pass. Raises ConfigError for a batch size that was not measured.
    """
    by_batch = curves(curve["points"], curve["cached"])
    if 1 not in by_batch.get(batch, {}):
        known = ", ".join(str(size) for size, by_tokens in by_batch.items() if 1 in by_tokens)
        raise ConfigError(f"batch_size={batch} was not measured on the other machine; it has {known}")
    passes = by_batch[batch]
    scale = passes[1] / costs.passes[1]
    drafts = {k: seconds * scale for k, seconds in costs.drafts.items()}
    return predict(survived, Costs(costs.plain * scale, passes, drafts, costs.rest * scale))


def explain(
    predicted: Prediction, costs: Costs, measured: Mapping[str, float], limits: Sequence[float] | None = None
) -> str | None:
    """Where the ``measured`` speedup comes from that was not ``predicted``; None if they differ by a tenth at most.

    measured: speedup, tokens_per_pass, seconds of a round and of a plain one (round, plain), and in a batch the rows of
    a round over those of a plain one (rows). limits: of an interval of the predicted speedup.
    """
    difference = measured["speedup"] / predicted.speedup - 1
    if abs(difference) <= BELIEVABLE:
        return None
    factors = {
        "a plain round": measured["plain"] / costs.plain,
        "a round": measured["round"] / predicted.seconds,
        "tokens per pass": measured["tokens_per_pass"] / predicted.tokens_per_pass,
        "rows": measured.get("rows", 1.0),
    }
    words = {
        "a plain round": "plain decoding's rounds took {} time than in the profile",
        "a round": "its rounds took {} time than in the profile",
        "tokens per pass": "tokens per pass were {} than predicted, as texts end within a round",
        "rows": "its rounds held {} of the batch than plain decoding's, as its texts end at different times",
    }
    told = [
        words[name].format(f"{abs(factor - 1):.0%} {'more' if factor > 1 else 'less'}")
        for name, factor in factors.items()
        if abs(factor - 1) > BELIEVABLE / 2
    ]
    known = ""
    of_time = all(abs(factors[name] - 1) <= BELIEVABLE / 2 for name in ("tokens per pass", "rows"))
    if of_time and limits is not None and limits[0] <= measured["speedup"] <= limits[1]:
        known = f", within what the profile can tell ({limits[0]:.2f}–{limits[1]:.2f})"
    causes = "; ".join(told or ["many small differences add up"])
    return f"the measured speedup is {difference:+.0%} off the predicted one{known}: {causes}"
