"""The tables that documents get, before any format has its say: what stands in each cell, and the raw numbers.

Runs of one setting stand in one sheet; only what a document is about, k or the batch size, may differ within it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pandas as pd

from specbench import losslessness, settings, tables
from specbench.results.columns import flatten
from specbench.tables import Run

NAMES = ("comparison", "categories", "by_k", "by_batch")  # of the documents

LOSSY, BOUND = "†", "‡"  # marks of runs that do not compete for the best

ALL = "all prompts"  # heads the column of all prompts, in a table by category
METRICS = {"speedup": "Speedup over plain decoding (×)", "tokens_per_pass": "Tokens per verify pass"}
COMPARED = (
    "drafter",
    "k",
    "tokens/pass",
    "acceptance",
    "tokens/s",
    "plain",
    "speedup (×)",
    "predicted (×)",
    "bound (×)",
    "lossless",
)
COMPARED_ARE = (
    f"{tables.PLAIN_IS} predicted: speedup by acceptance and the costs of a profiling pass. bound: speedup were every "
    "draft right, at the same cost."
)
BOLD_IS = (
    "Small: 95 % intervals. Bold: the highest of its column, if it has an interval, and those whose interval overlaps "
    "that; only lossless methods compete. Intervals that overlap can belong to methods that differ prompt by prompt: "
    "specbench.compare tells."
)
NO_BOLD = "Nothing is bold, as the highest of a column has no 95 % interval, or no lossless method is in it."

# columns of the raw numbers, as specbench.results.columns has them
ASKED = (
    *("id", "status", "error", "drafter", "drafter_options", "k", "batch_size"),
    *("target", "dtype", "quant", "device", "dataset"),
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "seed"),
)
MEASURED = (
    *("speedup", "speedup_low", "speedup_high", "tokens_per_pass", "tokens_per_pass_low", "tokens_per_pass_high"),
    *("acceptance_rate", "decode_tokens_per_s", "baseline_decode_tokens_per_s", "end_to_end_speedup", "units"),
)
PREDICTED = ("predicted_speedup", "residual", "bound", "break_even", "best_k")  # of whole runs, not of categories
DOUBTED = ("lossless", "flags", "started", "commit", "cpu", "gpu")


@dataclass(frozen=True)
class Cell:
    """A word or a number as it is read, the limits of its 95 % interval, and whether it is among the best."""

    text: str
    limits: str = ""
    bold: bool = False


@dataclass(frozen=True)
class Sheet:
    """One table: what it is of, what its runs share, a heading and cells for each column, sentences to stand below it,
    and the ids of the runs that it was made from."""

    caption: str
    setting: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...]
    ids: tuple[str, ...]


@dataclass(frozen=True)
class Document:
    """Sheets of one kind; and their numbers, a row for each run (and category), whose column ``group`` tells apart
    what may not be compared."""

    name: str
    sheets: tuple[Sheet, ...]
    numbers: pd.DataFrame


@dataclass(frozen=True)
class _Entry:
    """What was measured of a run, or on its prompts of one ``category``; ``measured`` is None if it failed. ``name``:
    of the run, among those of its sheet."""

    name: str
    run: Run
    measured: Mapping[str, Any] | None
    category: str | None = None


class _Grid(NamedTuple):
    """Headings, and rows: a name, and what stands under which heading."""

    heads: list[str]
    rows: list[tuple[str, dict[str, _Entry]]]

    def entries(self) -> list[_Entry]:
        return [entry for _, row in self.rows for entry in row.values()]


def documents(runs: Sequence[Run]) -> list[Document]:
    """Those of ``NAMES`` that there are runs for: by k and by batch size only of what was run at several."""
    groups = tables.by_setting(runs)
    across = tables.by_setting(runs, varying=("batch_size",))
    found = [
        _comparison(groups),
        _grids("categories", "by category of prompts", map(_by_category, groups)),
        _grids("by_k", "by draft length", map(_by_k, groups)),
        _grids("by_batch", "by batch size", map(_by_batch, across)),
    ]
    return [document for document in found if document.sheets]


def best(found: Sequence[tuple[float | None, Sequence[float] | None]]) -> list[bool]:
    """Which of these values, with their intervals, is the highest, and which cannot be told from it: those whose
    interval overlaps its interval. A value without an interval is neither; and if it is the highest, none is.

    >>> best([(1.1, [1.0, 1.2]), (1.4, [1.3, 1.6]), (1.5, [1.4, 1.6]), (None, None)])
    [False, True, True, False]
    """
    there = [(value, limits) for value, limits in found if value is not None]
    _, top = max(there, key=lambda pair: pair[0], default=(None, None))
    if top is None:
        return [False] * len(found)
    return [value is not None and own is not None and own[1] >= top[0] and own[0] <= top[1] for value, own in found]


def _comparison(groups: Sequence[Sequence[Run]]) -> Document:
    """All runs, a row each."""
    sheets, entries = [], []
    for runs in groups:
        labels = tables.labels(runs)
        found = [_whole(f"{label} k={run['drafter']['k']}", run) for label, run in zip(labels, runs, strict=True)]
        bold = {metric: _bold(found, metric) for metric in METRICS}
        rows = [
            (Cell(label + _mark(entry)), *_compared(entry, {metric: bold[metric][i] for metric in METRICS}))
            for i, (label, entry) in enumerate(zip(labels, found, strict=True))
        ]
        sheets.append(_sheet("Comparison of drafters", COMPARED, rows, found, COMPARED_ARE))
        entries.append(found)
    return Document("comparison", tuple(sheets), _numbers(entries, (*ASKED, *MEASURED, *PREDICTED, *DOUBTED)))


def _compared(entry: _Entry, bold: Mapping[str, bool]) -> list[Cell]:
    """The cells of a run under ``COMPARED``, but the first."""
    k = Cell(str(entry.run["drafter"]["k"]))
    if entry.measured is None:
        return [k, *[Cell("–")] * (len(COMPARED) - 3), Cell("failed")]
    measured, model = entry.measured, entry.run["model"] or {}
    return [
        k,
        _cell(measured, "tokens_per_pass", bold["tokens_per_pass"]),
        Cell(tables.show(measured["acceptance_rate"], "{:.0%}")),
        Cell(tables.speed(measured["decode_tokens_per_s"])),
        Cell(tables.speed(measured["baseline_decode_tokens_per_s"])),
        _cell(measured, "speedup", bold["speedup"]),
        Cell(tables.show(model.get("predicted_speedup"), "{:.2f}")),
        Cell(tables.show(model.get("bound"), "{:.2f}")),
        Cell(tables.verdict(measured["lossless"])),
    ]


def _grids(name: str, caption: str, grids: Iterable[_Grid]) -> Document:
    """For each grid that has rows a sheet of each of ``METRICS``."""
    sheets, entries = [], []
    for grid in grids:
        if not grid.rows:
            continue
        entries.append(grid.entries())
        for metric, words in METRICS.items():
            bold = {head: _bold([row.get(head) for _, row in grid.rows], metric) for head in grid.heads}
            rows = [
                (Cell(label), *(_placed(row.get(head), metric, bold[head][i]) for head in grid.heads))
                for i, (label, row) in enumerate(grid.rows)
            ]
            sheets.append(_sheet(f"{words} {caption}", ("drafter", *grid.heads), rows, entries[-1]))
    return Document(name, tuple(sheets), _numbers(entries, (*ASKED, *MEASURED, *DOUBTED)))


def _placed(entry: _Entry | None, metric: str, bold: bool) -> Cell:
    """The cell of a grid."""
    if entry is None:
        return Cell("–")
    if entry.measured is None:
        return Cell("failed")
    return _cell(entry.measured, metric, bold, _mark(entry))


def _by_category(runs: Sequence[Run]) -> _Grid:
    """A row per run, a column per category of prompts, and one of all prompts."""
    rows = []
    for label, run in zip(tables.labels(runs), runs, strict=True):
        name = f"{label} k={run['drafter']['k']}"
        parts = run.get("by_category", {}).items()
        row = {category: _Entry(name, run, measured, category) for category, measured in parts}
        rows.append((name, {**row, ALL: replace(_whole(name, run), category=ALL)}))
    heads = sorted({head for _, row in rows for head in row if head != ALL})
    return _Grid([*heads, ALL], rows if heads else [])


def _by_k(runs: Sequence[Run]) -> _Grid:
    """A row per drafter (and its options) that was run at several k, a column per k."""
    return _across(runs, lambda run: run["drafter"]["k"], "k={}")


def _by_batch(runs: Sequence[Run]) -> _Grid:
    """A row per drafter (and its options) and k that was run at several batch sizes, a column per batch size."""
    return _across(runs, lambda run: run["config"]["batch_size"], "batch {}", k_apart=True)


def _across(runs: Sequence[Run], at: Callable[[Run], int], head: str, k_apart: bool = False) -> _Grid:
    """A row for what was run at more than one place, a column for each place that runs are ``at``. Where there are
    several runs of one place (of different folders, or repeats), the row is there several times."""
    found: dict[tuple[str, ...], dict[int, list[Run]]] = {}
    for run in runs:
        options = json.dumps(run["config"]["drafter"], sort_keys=True)
        same = (run["drafter"]["name"], options, str(run["drafter"]["k"]) if k_apart else "")
        found.setdefault(same, {}).setdefault(at(run), []).append(run)
    several = [places for places in found.values() if len(places) > 1]
    firsts = [next(iter(places.values()))[0] for places in several]
    rows = []
    for label, first, places in zip(tables.labels(firsts), firsts, several, strict=True):
        name = f"{label} k={first['drafter']['k']}" if k_apart else label
        for i in range(max(map(len, places.values()))):
            here = {head.format(place): runs[i] for place, runs in places.items() if len(runs) > i}
            rows.append((name, {column: _whole(f"{name} {column}", run) for column, run in here.items()}))
    return _Grid([head.format(place) for place in sorted({place for places in several for place in places})], rows)


def _whole(name: str, run: Run) -> _Entry:
    """Of all its prompts."""
    return _Entry(name, run, run["metrics"] if run["status"] == "ok" else None)


def _lossy(run: Run) -> bool:
    return run["status"] == "ok" and not losslessness.holds(run["metrics"]["lossless"])


def _bound(run: Run) -> bool:
    """Whether its drafter is given what no method can know."""
    return bool(run.get("needs_reference"))


def _mark(entry: _Entry) -> str:
    return LOSSY * _lossy(entry.run) + BOUND * _bound(entry.run)


def _bold(column: Sequence[_Entry | None], metric: str) -> list[bool]:
    """Which of a column are among the best of the methods in it that are lossless."""
    nothing = (None, None)
    return best(
        [
            nothing if entry is None or entry.measured is None or _mark(entry) else _value(entry.measured, metric)
            for entry in column
        ]
    )


def _value(measured: Mapping[str, Any], metric: str) -> tuple[float | None, Sequence[float] | None]:
    return measured[metric], measured[f"{metric}_ci95"]


def _cell(measured: Mapping[str, Any], metric: str, bold: bool, mark: str = "") -> Cell:
    value, limits = _value(measured, metric)
    if value is None:
        return Cell("–")
    return Cell(f"{value:.2f}{mark}", "" if limits is None else tables.interval(limits), bold)


def _sheet(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], entries: Sequence[_Entry], *about: str
) -> Sheet:
    named = list({id(entry.run): entry for entry in entries}.values())  # a run has an entry for each category
    runs = [entry.run for entry in named]
    bold = any(cell.bold for row in rows for cell in row)
    notes = (*about, BOLD_IS if bold else NO_BOLD, *_marks(named), *_failures(named), *_flags(named))
    return Sheet(
        caption,
        _setting(runs),
        tuple(columns),
        tuple(map(tuple, rows)),
        (*notes, f"{tables.origin(runs)}."),
        tuple(run["id"] for run in runs),
    )


def _setting(runs: Sequence[Run]) -> str:
    """What all of them share, in words; a failed run does not know how many prompts there were."""
    told = [settings.of(run) for run in runs if run["status"] == "ok"] or list(map(settings.of, runs))
    return " · ".join(words[0] for words in zip(*told, strict=True) if len(set(words)) == 1)


def _marks(named: Sequence[_Entry]) -> Iterator[str]:
    for entry in named:
        if _lossy(entry.run):
            verdict = tables.verdict(entry.run["metrics"]["lossless"])
            yield f"{LOSSY} {entry.name} is not shown to be lossless: {verdict}."
    bounds = dict.fromkeys(entry.run["drafter"]["name"] for entry in named if _bound(entry.run))
    if bounds:
        yield f"{BOUND} {', '.join(bounds)}: a bound and no method, as it is told what plain decoding says."


def _failures(named: Sequence[_Entry]) -> Iterator[str]:
    for entry in named:
        if entry.run["status"] != "ok":
            yield f"{entry.name} failed: {' '.join(entry.run['error'].split())}"


def _flags(named: Sequence[_Entry]) -> Iterator[str]:
    """The names of what is to be doubted, and of whom, if that is not all."""
    told = tables.flag_names([entry.run for entry in named], [entry.name for entry in named])
    if told:
        yield f"Flags: {'; '.join(told)}."


def _numbers(groups: Sequence[Sequence[_Entry]], columns: Sequence[str]) -> pd.DataFrame:
    """A row for each entry, under these columns of the results, after the number of its group (and its category)."""
    entries = [entry for group in groups for entry in group]
    found = flatten({**e.run, "metrics": {**e.run.get("metrics", {}), **(e.measured or {})}} for e in entries)
    found = found[list(columns)]
    found.insert(0, "group", [number for number, group in enumerate(groups, start=1) for _ in group])
    if any(entry.category is not None for entry in entries):
        found.insert(1 + list(found.columns).index("k"), "category", [entry.category for entry in entries])
    return found
