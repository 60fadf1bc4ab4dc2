"""Where the time of a round goes: some of the measured prompts once more, with a clock between the parts of a round.

Host and device wait for each other at each reading of that clock, so these rounds may be longer than those of the
headline, and neither stand in for the other. Shorter drafts are timed as well: they say what each position of a draft
costs, and what another k would have given.

A machine changes its speed for seconds at a time. So all is timed in slices of a few rounds: in each, all methods
take their turn, and plain decoding, by which the others' seconds of that slice are measured.
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

BRIEF = 12  # new tokens of each text in a slice
TURNS = 3  # slices, at least, in which each shorter length is timed
TRIM = 0.05  # share of the rounds left out at each end of a mean: hiccups of the machine


def profile(
    target: CausalLM, batches: Sequence[Sequence[Turn]], arms: Sequence[Arm], settings: Settings
) -> tuple[dict[Arm, pd.DataFrame], dict[Arm, Exception]]:
    """Rounds of each arm: columns slice, k, round, rows, and the seconds of each of PARTS; and the errors of
    those that failed, which have no rounds.

    arms: the baseline first. Of each batch there are two slices: one with drafts of the arm's own length, and one with
    shorter ones, each length in its turn; of few batches, several in a slice, so that every length has its TURNS.
    """
    found: dict[Arm, list[dict[str, Any]]] = {arm: [] for arm in arms}
    failures: dict[Arm, Exception] = {}
    brief = replace(settings, stop=replace(settings.stop, max_new_tokens=min(BRIEF, settings.stop.max_new_tokens)))
    for arm in arms:
        arm.drafter.reset()
    for slice_ in range(2 * len(batches)):
        number, shorter = divmod(slice_, 2)
        for arm in in_turns(arms, slice_):
            if arm in failures:
                continue
            lengths = _shorter(arm.k, number, len(batches)) if shorter and arm.k > 1 else [arm.k]
            try:
                for k in lengths:
                    found[arm] += _rounds(target, arm, k, slice_, batches[number], brief, arms[0])
            except Exception as error:  # what it was measured to do stands all the same
                failures[arm] = error.with_traceback(None)
    return {arm: pd.DataFrame(rows) for arm, rows in found.items() if rows and arm not in failures}, failures


def _shorter(k: int, number: int, batches: int) -> list[int]:
    """The draft lengths below ``k`` whose turn it is in batch ``number`` of so many.

    >>> [_shorter(4, number, 9) for number in range(3)], [_shorter(4, number, 4) for number in range(4)]
    ([[1], [2], [3]], [[1, 3], [1, 2], [1, 2, 3], [2, 3]])
    """
    turns = min(batches, max(TURNS, batches // (k - 1)))  # of each length, in as many batches
    stride = batches // turns
    return [n for n in range(1, k) if number in {(n - 1 + turn * stride) % batches for turn in range(turns)}]


def _rounds(
    target: CausalLM, arm: Arm, k: int, slice_: int, members: Sequence[Turn], settings: Settings, baseline: Arm
) -> list[dict[str, Any]]:
    requests = requests_of(arm, members, baseline)
    steps = decode(target, arm.drafter, requests, k, settings.sampling, settings.seed, settings.stop, split=True)
    return [
        {"slice": slice_, "k": k, "round": step.round, "rows": len(step.rows), **step.parts}
        for step in steps
        if step.parts is not None
    ]


def shares(rounds: pd.DataFrame, k: int) -> dict[str, float]:
    """Which share of the time of rounds of ``k`` drafts each of PARTS took; they sum to 1."""
    total = rounds.loc[rounds["k"] == k, list(PARTS)].sum()
    return {part: float(total[part] / total.sum()) for part in PARTS}


def costs(rounds: pd.DataFrame, plain: pd.DataFrame, k: int) -> Costs:
    """What an arm that drafts ``k`` tokens pays, of its ``rounds`` and those of ``plain`` decoding.

    Seconds are those of a machine at its mean speed: those of a slice are scaled by how fast plain decoding was in it.
    They are means over rounds, as the headline's are sums, without the longest and shortest twentieth.
    """
    whole = plain[list(PARTS)].sum(axis=1)
    steady = _mean(whole)
    pace = steady / whole.groupby(plain["slice"]).agg(_mean)
    ours, theirs = (table[list(PARTS)].mul(table["slice"].map(pace), axis=0) for table in (rounds, plain))
    of = {int(n): ours[rounds["k"] == n] for n in sorted(rounds["k"].unique()) if n}
    return Costs(
        plain=steady,
        passes={1: _mean(theirs["verify"]), **{n + 1: _mean(found["verify"]) for n, found in of.items()}},
        drafts={n: _mean(found["draft"]) for n, found in of.items()},
        rest=_mean(of[k]["accept"] + of[k]["bookkeeping"]) if k else 0.0,
    )


def relative_rounds(rounds: pd.DataFrame, plain: pd.DataFrame, k: int) -> "pd.Series[float]":
    """Of each slice, the mean time of a round of ``k`` drafts over that of a plain one: how much it varies says how
    well the profile knows the one by the other."""
    ours, theirs = (
        table[list(PARTS)].sum(axis=1).groupby(table["slice"]).mean() for table in (rounds[rounds["k"] == k], plain)
    )
    return (ours / theirs).dropna()


def _mean(seconds: "pd.Series[float]") -> float:
    return float(stats.trim_mean(seconds.to_numpy(), TRIM))
