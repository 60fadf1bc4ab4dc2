"""Intervals of shares of verify passes, from a record's raw steps, resampled as the record's own intervals are."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from specbench import metrics, raw, record
from specbench.tables import Run

Interval = Sequence[float] | None


def accepted_up_to(run: Run) -> list[Interval]:
    """Of ``acceptance_by_position.joint``, at positions 1..k; None where the steps are not at hand, or too few."""
    k, passes = run["drafter"]["k"], _passes(run)
    if passes is None:
        return [None] * k
    return [_interval(passes, passes["accepted"] >= i, passes["proposed"] >= i) for i in range(1, k + 1)]


def accepted(run: Run) -> list[Interval]:
    """Of the shares of ``accepted_length_histogram``, 0..k drafts; None where the steps are not at hand, or too few."""
    k, passes = run["drafter"]["k"], _passes(run)
    if passes is None:
        return [None] * (k + 1)
    return [_interval(passes, passes["accepted"] == n, passes["accepted"] >= 0) for n in range(k + 1)]


def _passes(run: Run) -> pd.DataFrame | None:
    """The verify passes of a run that was read from a folder."""
    steps = raw.table(run, record.STEPS, ("arm", "round", "unit", "proposed", "accepted")) if "folder" in run else None
    return None if steps is None else steps[(steps["arm"] == "method") & (steps["round"] > 0)]


def _interval(passes: pd.DataFrame, hit: "pd.Series[bool]", counted: "pd.Series[bool]") -> Interval:
    units = pd.DataFrame({"hits": hit & counted, "counted": counted}).groupby(passes["unit"]).sum()
    return metrics.interval(_share, units["hits"], units["counted"])


def _share(hits: np.ndarray, counted: np.ndarray, axis: int = -1) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # a sample in which no draft was so long has no share
        return hits.sum(axis=axis) / counted.sum(axis=axis)
