"""One row of plain values for each run: which, of what type, and where in its record they are.

An interval is two columns, ``_low`` and ``_high``. What a run has not (a failed one has no metrics) is missing. Names
are stable: analyses depend on them.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

TEXT, WHOLE, NUMBER, TRUTH, TIME = "string", "Int64", "float64", "boolean", "datetime64[us, UTC]"

# column: (path in run.json, type); a number in a path is a place in a list
COLUMNS: dict[str, tuple[str, str]] = {
    "id": ("id", TEXT),
    "folder": ("folder", TEXT),
    "status": ("status", TEXT),
    "error": ("error", TEXT),
    # what was asked
    "drafter": ("drafter.name", TEXT),
    "drafter_options": ("config.drafter", TEXT),  # JSON
    "k": ("drafter.k", WHOLE),
    "batch_size": ("config.batch_size", WHOLE),
    "temperature": ("config.sampling.temperature", NUMBER),
    "top_k": ("config.sampling.top_k", WHOLE),
    "top_p": ("config.sampling.top_p", NUMBER),
    "min_p": ("config.sampling.min_p", NUMBER),
    "repetition_penalty": ("config.sampling.repetition_penalty", NUMBER),
    "max_new_tokens": ("config.max_new_tokens", WHOLE),
    "stop": ("config.stop", TEXT),  # JSON
    "seed": ("config.seed", WHOLE),
    "repeats": ("config.repeats", WHOLE),
    "profile": ("config.profile", WHOLE),
    "dataset": ("dataset.name", TEXT),
    "dataset_sha256": ("dataset.sha256", TEXT),
    "conversations": ("prompts.conversations", WHOLE),
    "turns": ("prompts.turns", WHOLE),
    "target": ("target.name", TEXT),
    "dtype": ("target.dtype", TEXT),
    "quant": ("target.quant", TEXT),
    "engine": ("target.engine", TEXT),
    "device": ("target.device", TEXT),
    "parameters": ("target.parameters", WHOLE),
    # what was measured, as metrics.DEFINITIONS defines it
    "speedup": ("metrics.speedup", NUMBER),
    "speedup_low": ("metrics.speedup_ci95.0", NUMBER),
    "speedup_high": ("metrics.speedup_ci95.1", NUMBER),
    "tokens_per_pass": ("metrics.tokens_per_pass", NUMBER),
    "tokens_per_pass_low": ("metrics.tokens_per_pass_ci95.0", NUMBER),
    "tokens_per_pass_high": ("metrics.tokens_per_pass_ci95.1", NUMBER),
    "acceptance_rate": ("metrics.acceptance_rate", NUMBER),
    "decode_tokens_per_s": ("metrics.decode_tokens_per_s", NUMBER),
    "baseline_decode_tokens_per_s": ("metrics.baseline_decode_tokens_per_s", NUMBER),
    "end_to_end_speedup": ("metrics.end_to_end_speedup", NUMBER),
    "ttft_s": ("metrics.ttft_s", NUMBER),
    "clock_spread": ("metrics.clock_spread", NUMBER),
    "repeat_spread": ("metrics.repeat_spread", NUMBER),
    "round_seconds": ("metrics.round_seconds", NUMBER),
    "baseline_round_seconds": ("metrics.baseline_round_seconds", NUMBER),
    "rounds": ("metrics.rounds", WHOLE),
    "committed_tokens": ("metrics.committed_tokens", WHOLE),
    "units": ("metrics.units", WHOLE),
    "peak_memory_bytes": ("metrics.peak_memory_bytes", WHOLE),
    "baseline_peak_memory_bytes": ("metrics.baseline_peak_memory_bytes", WHOLE),
    "joules_per_token": ("metrics.joules_per_token", NUMBER),
    "baseline_joules_per_token": ("metrics.baseline_joules_per_token", NUMBER),
    "lossless": ("metrics.lossless.verdict", TEXT),
    "lossless_prompts": ("metrics.lossless.prompts", WHOLE),
    "lossless_equal": ("metrics.lossless.equal", WHOLE),
    "lossless_near_ties": ("metrics.lossless.near_ties", WHOLE),
    "lossless_mismatches": ("metrics.lossless.mismatches", WHOLE),
    "lossless_p_value": ("metrics.lossless.p_value", NUMBER),
    # what should have come out, by the profile
    "predicted_speedup": ("model.predicted_speedup", NUMBER),
    "predicted_speedup_low": ("model.predicted_speedup_ci95.0", NUMBER),
    "predicted_speedup_high": ("model.predicted_speedup_ci95.1", NUMBER),
    "residual": ("model.residual", NUMBER),
    "bound": ("model.bound", NUMBER),
    "break_even": ("model.break_even", NUMBER),
    "best_k": ("model.best_k", WHOLE),
    "share_draft": ("model.shares.draft", NUMBER),
    "share_verify": ("model.shares.verify", NUMBER),
    "share_accept": ("model.shares.accept", NUMBER),
    "share_bookkeeping": ("model.shares.bookkeeping", NUMBER),
    # what to doubt, and where it is from
    "flags": ("flags", TEXT),  # names
    "stateful_drafter": ("stateful_drafter", TRUTH),
    "needs_reference": ("needs_reference", TRUTH),
    "started": ("provenance.started", TIME),
    "ended": ("provenance.ended", TIME),
    "wall_seconds": ("wall_seconds", NUMBER),
    "busy_others": ("machine_load.others", NUMBER),
    "busy_stolen": ("machine_load.stolen", NUMBER),
    "specbench": ("provenance.specbench", TEXT),
    "code_sha256": ("provenance.code_sha256", TEXT),
    "commit": ("provenance.git.commit", TEXT),
    "uncommitted_sha256": ("provenance.git.uncommitted_sha256", TEXT),
    "torch": ("provenance.packages.torch", TEXT),
    "cpu": ("provenance.machine.cpu", TEXT),
    "gpu": ("provenance.machine.gpu", TEXT),
    "threads": ("provenance.machine.threads", WHOLE),
}
JSON = ("drafter_options", "stop")


def flatten(runs: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """A row per run, in their order, under ``COLUMNS``, each of its type even where no run has a value."""
    found = pd.DataFrame([_row(run) for run in runs], columns=list(COLUMNS), dtype=object)
    times = {name: pd.to_datetime(found[name], utc=True) for name, (_, kind) in COLUMNS.items() if kind == TIME}
    return found.assign(**times).astype({name: kind for name, (_, kind) in COLUMNS.items()})


def _row(run: Mapping[str, Any]) -> dict[str, Any]:
    row = {name: at(run, path) for name, (path, _) in COLUMNS.items()}
    row |= {name: json.dumps(row[name], sort_keys=True, ensure_ascii=False) for name in JSON}
    return row | {"flags": ", ".join(dict.fromkeys(flag["flag"] for flag in run["flags"]))}


def at(run: Any, path: str) -> Any:
    """What is at a dotted path of a record; None where there is nothing.

    >>> at({"metrics": {"speedup_ci95": [1.2, 1.7]}}, "metrics.speedup_ci95.1")
    1.7
    """
    for key in path.split("."):
        if isinstance(run, list):
            run = run[int(key)]
        elif isinstance(run, Mapping):
            run = run.get(key)
        else:
            return None
    return run
