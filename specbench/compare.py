"""Two methods against each other, prompt by prompt: ``python -m specbench.compare RUN_A RUN_B``.

Each run has its own plain decoding, measured beside it; what is compared is each method's speed relative to that, so
that runs of different hours can be. Runs that did not answer the same question are refused, by what differs.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.table import Table

from specbench import cli, losslessness, metrics, record, settings, tables
from specbench.errors import ConfigError

MUST_AGREE = ("prompts", "target", "precision", "device", "engine", "sampling", "token rules", "batch size")


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """In which of ``MUST_AGREE`` two runs differ, in words."""
    ours, theirs = _question(a), _question(b)
    return [f"{name} ({ours[name][0]} and {theirs[name][0]})" for name in MUST_AGREE if ours[name] != theirs[name]]


def _question(run: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """For each of ``MUST_AGREE`` words, and what has to be equal."""
    config, target, sampling = run["config"], run["target"], run["config"]["sampling"]
    law = {name: value for name, value in sampling.items() if not name.startswith("_")}
    rules = {name: config[name] for name in ("max_new_tokens", "stop", "seed")}
    precision = settings.precision(target)
    dataset = run["dataset"]
    return {
        "prompts": (f"{dataset['name']} {dataset['sha256'][:10]}", dataset["sha256"]),
        "target": (target["name"], target["files"]),
        "precision": (precision, precision),
        "device": (target["device"], target["device"]),
        "engine": (str(target.get("engine")), target.get("engine")),
        "sampling": (_words(law), law),
        "token rules": (_words(rules), rules),
        "batch size": (str(config["batch_size"]), config["batch_size"]),
    }


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def compare(a: pd.DataFrame, b: pd.DataFrame) -> dict[str, Any]:
    """From the steps of two runs over the same prompts: ``speedup`` of a over b with its interval, and the difference
    in tokens per pass, by paired bootstrap over conversations. Both are None where they cannot be told."""
    units = [_units(steps) for steps in (a, b)]
    if set(units[0].index) != set(units[1].index):
        raise ConfigError("the runs decoded different prompts together, so that they cannot be paired")
    both = units[0].join(units[1], lsuffix="_a", rsuffix="_b")
    names = ("committed", "seconds", "committed_plain", "seconds_plain")
    timed = [both[f"{name}_{which}"] for which in "ab" for name in names]
    passes = [both[f"{name}_{which}"] for which in "ab" for name in ("committed", "passes")]
    return {
        "units": len(both),
        "speedup": _finite(_relative(*(column.to_numpy(float) for column in timed))),
        "speedup_ci95": metrics.interval(_relative, *timed),
        "tokens_per_pass": _finite(_more_per_pass(*(column.to_numpy(float) for column in passes))),
        "tokens_per_pass_ci95": metrics.interval(_more_per_pass, *passes),
    }


def _units(steps: pd.DataFrame) -> pd.DataFrame:
    """Sums of each unit, named by its prompts: a run's own numbers of units may differ."""
    ours, plain = (metrics.per_unit(steps[steps["arm"] == arm]) for arm in ("method", "baseline"))
    names = steps.groupby("unit")["uid"].agg(lambda uids: " ".join(sorted(set(uids))))
    found = ours.join(plain[["committed", "seconds"]], rsuffix="_plain")
    return found.set_index(names.reindex(found.index))


def _relative(*columns: np.ndarray, axis: int = -1) -> np.ndarray:
    """Speedup of a over speedup of b."""
    tokens, seconds, plain_tokens, plain_seconds = zip(columns[:4], columns[4:], strict=True)
    speedups = [
        (tokens[i].sum(axis) / seconds[i].sum(axis)) / (plain_tokens[i].sum(axis) / plain_seconds[i].sum(axis))
        for i in (0, 1)
    ]
    return speedups[0] / speedups[1]


def _more_per_pass(*columns: np.ndarray, axis: int = -1) -> np.ndarray:
    """Tokens per pass of a, less those of b."""
    tokens_a, passes_a, tokens_b, passes_b = (column.sum(axis) for column in columns)
    return tokens_a / passes_a - tokens_b / passes_b


def _finite(value: np.ndarray) -> float | None:
    return float(value) if np.isfinite(value) else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the two records that are named."""
    parser = argparse.ArgumentParser(prog="python -m specbench.compare", description=__doc__.split("\n")[0])
    parser.add_argument("a", type=Path, help="folder of a record")
    parser.add_argument("b", type=Path, help="folder of another")
    asked = parser.parse_args(arguments)
    try:
        runs = [record.read(folder) for folder in (asked.a, asked.b)]
        for folder, run in zip((asked.a, asked.b), runs, strict=True):
            if run["status"] != "ok":
                raise ConfigError(f"{folder} is the record of a failed run: {run['error']}")
        wrong = differing(*runs)
        if wrong:
            raise ConfigError(f"these runs cannot be compared: they differ in {', '.join(wrong)}")
        found = compare(*(pd.read_parquet(folder / record.STEPS) for folder in (asked.a, asked.b)))
    except ConfigError as error:
        return cli.fail(str(error), cli.BAD_CONFIG)
    cli.out.print(" · ".join(settings.title(runs)), style="bold", highlight=False, soft_wrap=True)
    cli.out.print(_table(runs, found))
    for note in _notes(runs, found):
        cli.out.print(f"Note: {note}.", highlight=False, soft_wrap=True)
    return cli.OK


def _table(runs: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> Table:
    names = [f"{run['drafter']['name']} k={run['drafter']['k']}" for run in runs]
    table = tables.numbers(("", *names, "first against second", "95 % CI"))
    for row, label, form, difference in (
        ("tokens_per_pass", "tokens/pass", "{:.2f}", "{:+.2f}"),
        ("speedup", "speedup", "{:.2f}x", "{:.2f}x"),
    ):
        own = [tables.show(run["metrics"][row], form) for run in runs]
        limits = found[f"{row}_ci95"]
        interval = "–" if limits is None else "–".join(difference.format(limit).rstrip("x") for limit in limits)
        table.add_row(label, *own, tables.show(found[row], difference), interval)
    table.add_row("lossless", *(tables.verdict(run["metrics"]["lossless"]) for run in runs), "", "")
    return table


def _notes(runs: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> list[str]:
    notes = []
    limits = found["speedup_ci95"]
    first, second = (f"{run['drafter']['name']} k={run['drafter']['k']}" for run in runs)
    if limits is None:
        notes.append(f"no interval, of {found['units']} conversations; {metrics.MIN_UNITS} are needed")
    elif limits[0] > 1:
        notes.append(f"{first} is faster than {second}")
    elif limits[1] < 1:
        notes.append(f"{first} is slower than {second}")
    else:
        notes.append(f"which of {first} and {second} is faster cannot be told from these prompts")
    for run, name in zip(runs, (first, second), strict=True):
        if not losslessness.holds(run["metrics"]["lossless"]):
            notes.append(f"{name} is not shown to be lossless, so its speedup is not that of a lossless method")
        if run["needs_reference"]:
            notes.append(f"{name} is told the reply beforehand: it is a bound, and no method")
    notes += tables.flags(runs)
    origins = [run["provenance"] for run in runs]
    for key, what in (("machine", "machines"), ("packages", "packages"), ("code_sha256", "code")):
        if origins[0][key] != origins[1][key]:
            notes.append(f"the runs are of different {what}: that may be part of the difference")
    return notes


if __name__ == "__main__":
    sys.exit(main())
