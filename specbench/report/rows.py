"""The table of the runs of a setting."""

from collections.abc import Mapping, Sequence
from typing import Any

from specbench import tables
from specbench.raw import Run

# columns, and of which metric each is, for its definition
COLUMNS = {
    "drafter": None,
    "k": None,
    "batch": None,
    "tokens/pass": "tokens_per_pass",
    "acceptance": "acceptance_rate",
    "tokens/s": "decode_tokens_per_s",
    "plain": "baseline_decode_tokens_per_s",
    "speedup": "speedup",
    "predicted": None,
    "bound": None,
    "lossless": "lossless",
    "flags": None,
}
IN_FULL = (
    *("run", "drafter", "k", "batch"),
    *("tokens_per_pass", "tokens_per_pass_low", "tokens_per_pass_high", "acceptance_rate"),
    *("decode_tokens_per_s", "baseline_decode_tokens_per_s", "speedup", "speedup_low", "speedup_high"),
    *("predicted_speedup", "bound", "lossless", "flags", "error"),
)


def of_group(runs: Sequence[Run]) -> dict[str, Any]:
    """The runs' main numbers as they are read, and ``data``, as they are."""
    named = list(zip(runs, tables.labels(runs), strict=True))
    return {
        "columns": [{"name": name, "metric": metric} for name, metric in COLUMNS.items()],
        "rows": [_row(*run) for run in named],
        "data": {"columns": list(IN_FULL), "rows": [_in_full(*run) for run in named]},
    }


def _row(run: Run, label: str) -> dict[str, Any]:
    """Cells up to the flags; of a failed run those that are known. A cell has ``text``, and where it needs them a
    ``value`` to sort by and an ``interval``."""
    k, batch = run["drafter"]["k"], run["config"]["batch_size"]
    row = {"run": run["id"], "error": run["error"], "flags": run["flags"]}
    cells = [{"text": label}, {"text": str(k), "value": k}, {"text": str(batch), "value": batch}]
    if run["status"] != "ok":
        return {**row, "cells": cells}
    told = dict(zip(tables.COLUMNS, tables.row(run, label), strict=True))
    metrics = run["metrics"]
    for name in ("tokens/pass", "acceptance", "tokens/s", "plain", "speedup"):
        metric = COLUMNS[name]
        cells.append({"text": told[name], "value": metrics[metric], "interval": metrics.get(f"{metric}_ci95")})
    cells += [{"text": tables.show(value, "{:.2f}x"), "value": value} for value in _model(run)]
    return {**row, "cells": [*cells, {"text": told["lossless"]}]}


def _in_full(run: Run, label: str) -> list[Any]:
    """The values under ``IN_FULL``."""
    start = [run["id"], label, run["drafter"]["k"], run["config"]["batch_size"]]
    flags = " ".join(dict.fromkeys(flag["flag"] for flag in run["flags"]))
    if run["status"] != "ok":
        return [*start, *[None] * (len(IN_FULL) - len(start) - 3), "failed", flags, run["error"]]
    metrics = run["metrics"]
    return [
        *start,
        metrics["tokens_per_pass"],
        *_limits(metrics["tokens_per_pass_ci95"]),
        metrics["acceptance_rate"],
        metrics["decode_tokens_per_s"],
        metrics["baseline_decode_tokens_per_s"],
        metrics["speedup"],
        *_limits(metrics["speedup_ci95"]),
        *_model(run),
        metrics["lossless"]["verdict"],
        flags,
        None,
    ]


def _model(run: Run) -> tuple[float | None, float | None]:
    """The predicted speedup and the bound, of a run that was profiled."""
    model: Mapping[str, Any] = run["model"] or {}
    return model.get("predicted_speedup"), model.get("bound")


def _limits(interval: Sequence[float] | None) -> Sequence[float | None]:
    return interval or (None, None)
