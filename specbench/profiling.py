"""Where the time of a round goes: some of the measured prompts once more, with a clock between the parts of a round.

Host and device wait for each other at each reading of that clock, so these rounds may be longer than those of the
headline, and neither stand in for the other. Shorter drafts are timed as well, on fewer tokens: they say what each
position of a draft costs, and what another k would have given.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from scipy import stats

from specbench.comparison import Arm, Settings, Turn, in_turns, requests_of
from specbench.decoding import PARTS, decode
from specbench.model import CausalLM
from specbench.prediction import Costs

BRIEF = 24  # new tokens on which drafts shorter than k are timed
TRIM = 0.05  # share of the rounds left out at each end of a mean: hiccups of the machine


def profile(
    target: CausalLM, batches: Sequence[Sequence[Turn]], arms: Sequence[Arm], settings: Settings
) -> tuple[dict[str, pd.DataFrame], dict[str, Exception]]:
    """Rounds of each arm, by name: columns k, batch, round, rows, and the seconds of each of PARTS; and the errors of
    those that failed, which have no rounds.

    arms: the baseline first. Within a batch they take turns, as when they are measured.
    """
    found: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    failures: dict[str, Exception] = {}
    brief = replace(settings, stop=replace(settings.stop, max_new_tokens=min(BRIEF, settings.stop.max_new_tokens)))
    for arm in arms:
        arm.drafter.reset()
    for number, members in enumerate(batches):
        for arm in in_turns(arms, number):
            if arm.name in failures:
                continue
            try:
                for k in range(arm.k, 0, -1) if arm.k else (0,):
                    asked = settings if k == arm.k else brief
                    found[arm.name] += _rounds(target, arm, k, number, members, asked, arms[0])
            except Exception as error:  # what it was measured to do stands all the same
                failures[arm.name] = error.with_traceback(None)
    return {name: pd.DataFrame(rows) for name, rows in found.items() if rows and name not in failures}, failures


def _rounds(
    target: CausalLM, arm: Arm, k: int, batch: int, members: Sequence[Turn], settings: Settings, baseline: Arm
) -> list[dict[str, Any]]:
    requests = requests_of(arm, members, baseline)
    steps = decode(target, arm.drafter, requests, k, settings.sampling, settings.seed, settings.stop, split=True)
    return [
        {"k": k, "batch": batch, "round": step.round, "rows": len(step.rows), **step.parts}
        for step in steps
        if step.parts is not None
    ]


def shares(rounds: pd.DataFrame, k: int) -> dict[str, float]:
    """Which share of the time of rounds of ``k`` drafts each of PARTS took; they sum to 1."""
    total = rounds.loc[rounds["k"] == k, list(PARTS)].sum()
    return {part: float(total[part] / total.sum()) for part in PARTS}


def costs(rounds: pd.DataFrame, plain: pd.DataFrame, k: int) -> Costs:
    """What an arm that drafts ``k`` tokens pays, of its ``rounds`` and those of ``plain`` decoding.

    A round's seconds are means over rounds, as the headline's are sums, without the longest and shortest twentieth.
    """
    of = {n: rounds[rounds["k"] == n] for n in sorted(rounds["k"].unique()) if n}
    rest = _mean(of[k]["accept"] + of[k]["bookkeeping"]) if k else 0.0
    return Costs(
        plain=_mean(plain[list(PARTS)].sum(axis=1)),
        passes={1: _mean(plain["verify"]), **{int(n) + 1: _mean(found["verify"]) for n, found in of.items()}},
        drafts={int(n): _mean(found["draft"]) for n, found in of.items()},
        rest=rest,
    )


def _mean(seconds: "pd.Series[float]") -> float:
    return float(stats.trim_mean(seconds.to_numpy(), TRIM))
