"""All that is said of a run, from its raw tables and nothing else: so that anyone can compute it again.

steps and prompts as the record keeps them (see ``record``), rounds those of the profiling pass, if there was one.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pandas as pd

from specbench import metrics, prediction, profiling


def analyse(
    steps: pd.DataFrame, prompts: pd.DataFrame, rounds: pd.DataFrame | None, k: int
) -> dict[str, dict[str, Any] | None]:
    """``metrics``, ``by_category`` and ``model`` of a method that drafted ``k`` tokens a round."""
    ours, plain = _arms(steps)
    computed = metrics.compute(ours, plain, k)
    return {
        "metrics": computed,
        "by_category": metrics.by_category(ours, plain, dict(zip(prompts["uid"], prompts["category"], strict=True)), k),
        "model": None if rounds is None else model(rounds, computed, k),
    }


def model(rounds: pd.DataFrame, computed: Mapping[str, Any], k: int) -> dict[str, Any]:
    """What the measured acceptance and the costs of a profile say the speedup should be, beside what it is."""
    ours, plain = _arms(rounds)
    costs = profiling.costs(ours, plain, k)
    by_k = prediction.predict(prediction.survival(computed["accepted_length_histogram"]), costs)
    here = by_k[-1]
    measured = {
        "speedup": computed["speedup"],
        "tokens_per_pass": computed["tokens_per_pass"],
        "round": computed["round_seconds"],
        "plain": computed["baseline_round_seconds"],
    }
    known = all(value is not None for value in measured.values())
    if known:  # rows of a round, of those of one of plain decoding, which all end together more often
        of_plain = computed["baseline_decode_tokens_per_s"] * computed["baseline_round_seconds"]
        measured["rows"] = computed["committed_tokens"] / computed["tokens_per_pass"] / computed["rounds"] / of_plain
    limits = None
    if k:
        relative = profiling.relative_rounds(ours, plain, k)
        ends = metrics.mean_interval(relative)
        limits = ends and [here.speedup * relative.mean() / seconds for seconds in reversed(ends)]
    return {
        "shares": profiling.shares(ours, k),
        "plain_seconds": costs.plain,
        "pass_seconds": {str(n): seconds for n, seconds in costs.passes.items()},
        "draft_seconds": {str(n): seconds for n, seconds in costs.drafts.items()},
        "rest_seconds": costs.rest,
        "by_k": [asdict(found) for found in by_k],
        "predicted_speedup": here.speedup,
        "predicted_speedup_ci95": limits,
        "residual": computed["speedup"] / here.speedup - 1 if known else None,
        "explanation": prediction.explain(here, costs, measured, limits) if known else None,
        "bound": here.bound,
        "break_even": here.break_even,
        "best_k": prediction.best(by_k).k,
    }


def _arms(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    return table[table["arm"] == "method"], table[table["arm"] == "baseline"]
