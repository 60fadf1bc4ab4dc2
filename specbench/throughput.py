"""How fast each user of a batch is served, and all of them together (tokens per second)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Run = Mapping[str, Any]


@dataclass(frozen=True)
class Speeds:
    """per_user: what a row sees, tokens per verify pass over the seconds of a round. total: of all rows. limits: of the
    total, the interval of the speedup at the plain decoding of the same run; None where the speedup has none."""

    per_user: float
    total: float
    limits: Sequence[float] | None = None


def of_method(run: Run) -> Speeds:
    """Of a finished run whose rounds were measured."""
    found = run["metrics"]
    limits = found["speedup_ci95"] and [found["baseline_decode_tokens_per_s"] * end for end in found["speedup_ci95"]]
    return Speeds(found["tokens_per_pass"] / found["round_seconds"], found["decode_tokens_per_s"], limits)


def of_plain(runs: Sequence[Run]) -> dict[int, Speeds]:
    """Of plain decoding by batch size, smallest first: the medians of the runs' own baselines."""
    plain: dict[int, list[tuple[float, float]]] = {}
    for run in runs:
        found = run["metrics"]
        if found["baseline_decode_tokens_per_s"] is not None:
            both = (1 / found["baseline_round_seconds"], found["baseline_decode_tokens_per_s"])
            plain.setdefault(run["config"]["batch_size"], []).append(both)
    return {size: Speeds(*map(median, zip(*plain[size], strict=True))) for size in sorted(plain)}
