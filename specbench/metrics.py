"""Every metric, computed from the raw steps and nothing else.

Definitions are pooled (sum over sum). A step is one (prompt, round); round 0 is the prefill, which yields each reply's
first token and is no verify pass. What stands past a text's end was never recorded as proposed, accepted or committed.
"""

import warnings
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

RESAMPLES = 5000
MIN_UNITS = 8  # units below which no interval is given: a bootstrap over fewer is too narrow
CONFIDENCE = 0.95

DEFINITIONS = {
    "acceptance_rate": "accepted tokens / proposed tokens",
    "tokens_per_pass": "committed tokens / (row, verify pass) pairs, prefill's token not counted; plain decoding is 1",
    "acceptance_by_position.joint": "rounds whose first i drafts were all accepted / rounds that proposed at least i",
    "acceptance_by_position.conditional": "of rounds that proposed >= i and accepted >= i-1, the share that accepted i",
    "accepted_length_histogram": "(row, verify pass) pairs by number of accepted drafts, 0..k",
    "decode_tokens_per_s": "committed tokens of verify passes / wall seconds of those rounds; prefill excluded",
    "baseline_decode_tokens_per_s": "the same, of plain decoding (k=0) on the same prompts in the same run",
    "speedup": "decode_tokens_per_s / baseline_decode_tokens_per_s",
    "speedup_ci95": "95 % interval of speedup: paired bootstrap over conversations (at batch sizes above 1 over the "
    "groups decoded together), percentiles expanded for their number; none below 8 of them",
    "tokens_per_pass_ci95": "95 % interval of tokens_per_pass: the same bootstrap over the same units",
    "end_to_end_speedup": "speedup with prefill's token and seconds included on both sides",
    "ttft_s": "mean wall seconds from the start of a batch to its first tokens, drafter's start included",
    "lossless": "token by token against plain decoding: equal; near-tie where every token that differs is one between "
    "which and its own choice the target is undecided within its precision; mismatch. Where drafts were "
    "sampled, by a test of the target's law: law, mismatch, or untested",
    "peak_memory_bytes": "most memory held while this method ran: resident bytes of the process on a CPU, everything "
    "loaded for the run included; bytes allocated by PyTorch on a GPU",
    "baseline_peak_memory_bytes": "the same while plain decoding ran",
    "joules_per_token": "energy counted by the machine (processor packages or GPU) while this method ran, prefill "
    "included, / all tokens it gave; none where the machine does not count",
    "baseline_joules_per_token": "the same of plain decoding",
    "clock_spread": "95th / 5th percentile of the seconds of plain decoding's rounds, which do the same work: 1 is a "
    "steady machine; what it exceeds 1 by is noise that the intervals see only in part",
    "repeat_spread": "longest / shortest time of the same plain decoding in the repeats of the run, median over units; "
    "none without repeats",
    "round_seconds": "mean wall seconds of a verify round",
    "baseline_round_seconds": "mean wall seconds of plain decoding's rounds",
    "rounds": "verify passes over a batch",
    "committed_tokens": "tokens committed by verify passes",
    "model.predicted_speedup": "speedup by the measured acceptance and the costs of a profiling pass: "
    "(1 + accepted drafts per pass) * plain round / (draft + verify + rest)",
    "model.predicted_speedup_ci95": "95 % interval of it over the profile's slices, acceptance being given: what the "
    "profile can tell of the costs; none below 8 slices",
    "model.bound": "the same were every draft accepted",
    "model.break_even": "acceptance of each draft, were all alike and independent, at which speedup is 1",
    "model.best_k": "draft length up to k of the highest predicted speedup",
    "model.residual": "speedup / model.predicted_speedup - 1",
    "model.shares": "shares of a round's seconds in the profiling pass",
    "units": "conversations (groups of them above batch size 1) that the intervals resample",
}


def compute(steps: pd.DataFrame, baseline: pd.DataFrame, k: int) -> dict[str, Any]:
    """Metrics of a method from its ``steps`` and those of the paired ``baseline``.

    Columns: unit, batch, round, uid, proposed, accepted, committed, seconds (of the round, shared by the batch's rows).
    Both must cover the same batches.
    A metric that the steps cannot tell (no verify pass, nothing proposed) is None.
    """
    passes = steps[steps["round"] > 0]
    joint, conditional = acceptance_by_position(passes, k)
    if set(steps["batch"]) != set(baseline["batch"]):
        raise ValueError("method and baseline were not measured on the same batches")
    ours, theirs = per_unit(steps), per_unit(baseline)
    units = ours.join(theirs, rsuffix="_baseline")
    return {
        "acceptance_rate": _ratio(passes["accepted"].sum(), passes["proposed"].sum()),
        "tokens_per_pass": _ratio(passes["committed"].sum(), len(passes)),
        "tokens_per_pass_ci95": interval(_ratio_of_sums, units["committed"], units["passes"]),
        "acceptance_by_position": {"joint": joint, "conditional": conditional},
        "accepted_length_histogram": np.bincount(passes["accepted"], minlength=k + 1).tolist(),
        "decode_tokens_per_s": _ratio(ours["committed"].sum(), ours["seconds"].sum()),
        "baseline_decode_tokens_per_s": _ratio(theirs["committed"].sum(), theirs["seconds"].sum()),
        "speedup": _ratio_of_ratios(units),
        "speedup_ci95": interval(
            _speedup,
            units["committed"],
            units["seconds"],
            units["committed_baseline"],
            units["seconds_baseline"],
        ),
        "end_to_end_speedup": _end_to_end(units),
        "ttft_s": _ratio(ours["prefill_seconds"].sum(), ours["batches"].sum()),
        "clock_spread": clock_spread(baseline),
        "repeat_spread": repeat_spread(baseline),
        "round_seconds": _ratio(ours["seconds"].sum(), _rounds(steps)),
        "baseline_round_seconds": _ratio(theirs["seconds"].sum(), _rounds(baseline)),
        "rounds": _rounds(steps),
        "committed_tokens": int(passes["committed"].sum()),
        "units": len(units),
    }


def by_category(
    steps: pd.DataFrame, baseline: pd.DataFrame, category: dict[str, str], k: int
) -> dict[str, dict[str, Any]]:
    """``compute`` for the prompts of each category. Where a batch mixes categories its seconds belong to none, so
    metrics of time are None for every category with a share in such a batch."""
    timed = (
        "decode_tokens_per_s",
        "baseline_decode_tokens_per_s",
        "speedup",
        "speedup_ci95",
        "end_to_end_speedup",
        "ttft_s",
        "round_seconds",
        "baseline_round_seconds",
        "clock_spread",
        "repeat_spread",
    )
    labels = steps["uid"].map(category)
    mixed = set(steps["batch"][labels.groupby(steps["batch"]).transform("nunique") > 1])
    found = {}
    for name in sorted(labels.unique()):
        chosen = steps[labels == name]
        found[name] = compute(chosen, baseline[baseline["uid"].map(category) == name], k)
        if mixed & set(chosen["batch"]):
            found[name] |= dict.fromkeys(timed)
    return found


def clock_spread(baseline: pd.DataFrame) -> float | None:
    """95th over 5th percentile of the seconds of plain decoding's rounds; None below 20 of them."""
    rounds = baseline[baseline["round"] > 0].drop_duplicates(["batch", "round"])
    if len(rounds) < 20:
        return None
    low, high = np.percentile(rounds["seconds"], [5, 95])
    return float(high / low)


def repeat_spread(baseline: pd.DataFrame) -> float | None:
    """Longest over shortest time of a unit's verify rounds in its repeats, median over units; None without repeats."""
    rounds = baseline[baseline["round"] > 0].drop_duplicates(["batch", "round"])
    seconds = rounds.groupby(["unit", "repeat"])["seconds"].sum().unstack()
    if seconds.shape[1] < 2:
        return None
    return float((seconds.max(axis=1) / seconds.min(axis=1)).median())


def _rounds(steps: pd.DataFrame) -> int:
    return int(steps[steps["round"] > 0].groupby(["batch", "round"]).ngroups)


def acceptance_by_position(passes: pd.DataFrame, k: int) -> tuple[list[float | None], list[float | None]]:
    """Joint and conditional acceptance at positions 1..k."""
    joint, conditional = [], []
    for i in range(1, k + 1):
        reached = passes[passes["proposed"] >= i]
        so_far = reached[reached["accepted"] >= i - 1]
        accepted = int((reached["accepted"] >= i).sum())
        joint.append(_ratio(accepted, len(reached)))
        conditional.append(_ratio(accepted, len(so_far)))
    return joint, conditional


def per_unit(steps: pd.DataFrame) -> pd.DataFrame:
    """Sums by unit, what the bootstrap resamples: decode tokens, verify passes and seconds, and those of the prefills.

    The rows of a round share its seconds, so these are counted once per (batch, round).
    """
    rounds = steps.groupby(["unit", "batch", "round"]).agg(
        committed=("committed", "sum"), passes=("uid", "size"), seconds=("seconds", "first")
    )
    decode = rounds[rounds.index.get_level_values("round") > 0].groupby("unit").sum()
    prefill = (
        rounds[rounds.index.get_level_values("round") == 0]
        .groupby("unit")
        .agg(first_tokens=("committed", "sum"), batches=("passes", "size"), prefill_seconds=("seconds", "sum"))
    )
    return decode.reindex(prefill.index, fill_value=0).join(prefill)


def _ratio(above: float, below: float) -> float | None:
    return float(above / below) if below > 0 else None


def _ratio_of_ratios(units: pd.DataFrame) -> float | None:
    ours = _ratio(units["committed"].sum(), units["seconds"].sum())
    theirs = _ratio(units["committed_baseline"].sum(), units["seconds_baseline"].sum())
    return ours / theirs if ours is not None and theirs else None


def _end_to_end(units: pd.DataFrame) -> float | None:
    tokens = (units["committed"] + units["first_tokens"]).sum()
    seconds = (units["seconds"] + units["prefill_seconds"]).sum()
    tokens_baseline = (units["committed_baseline"] + units["first_tokens_baseline"]).sum()
    seconds_baseline = (units["seconds_baseline"] + units["prefill_seconds_baseline"]).sum()
    ours, theirs = _ratio(tokens, seconds), _ratio(tokens_baseline, seconds_baseline)
    return ours / theirs if ours is not None and theirs else None


def _ratio_of_sums(above: np.ndarray, below: np.ndarray, axis: int = -1) -> np.ndarray:
    return above.sum(axis=axis) / below.sum(axis=axis)


def _speedup(
    tokens: np.ndarray, seconds: np.ndarray, tokens_baseline: np.ndarray, seconds_baseline: np.ndarray, axis: int = -1
) -> np.ndarray:
    return _ratio_of_sums(tokens, seconds, axis) / _ratio_of_sums(tokens_baseline, seconds_baseline, axis)


def interval(statistic: Any, *columns: pd.Series) -> list[float] | None:
    """Bootstrap interval over units, resampling the columns together; None for too few units.

    Percentiles are expanded: bare ones are those of a normal law whose variance is 1/n too small, and cover 89 % at 8
    units where they should 95 (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", section 3.2).
    """
    data = [column.to_numpy(dtype=float) for column in columns]
    if len(data[0]) < MIN_UNITS or data[1].sum() == 0:
        return None
    with warnings.catch_warnings():  # scipy warns of a degenerate sample; a zero-width interval says it too
        warnings.simplefilter("ignore", category=stats.DegenerateDataWarning)
        found = stats.bootstrap(
            data,
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=RESAMPLES,
            confidence_level=_expanded(len(data[0])),
            method="percentile",
            rng=np.random.default_rng(0),
        ).confidence_interval
    if not np.isfinite([found.low, found.high]).all():
        return None
    return [float(found.low), float(found.high)]


def mean_interval(values: "pd.Series[float]") -> list[float] | None:
    """``interval`` of the mean of values that are units of their own."""
    return interval(_ratio_of_sums, values, pd.Series(1.0, index=values.index))


def _expanded(units: int) -> float:
    """The share of resamples between the ends of an interval of CONFIDENCE.

    >>> round(_expanded(8), 3), round(_expanded(1000), 3)
    (0.989, 0.95)
    """
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, units - 1) * (units / (units - 1)) ** 0.5
    return float(2 * stats.norm.cdf(quantile) - 1)
