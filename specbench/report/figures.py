"""The data of each figure of a group of runs, as a table that the page draws and offers as CSV.

``kind`` says how it is drawn. The first column is the run's id, by which the page knows its colour; ``low`` and
``high`` are the ends of a 95 % interval, missing where there is none. Of lines, ``by`` names the columns that rows of
one line share, ``across`` and ``up`` those of its two axes, whose scales are logarithmic where ``log`` says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specbench import tables, throughput
from specbench.metrics import MIN_UNITS
from specbench.raw import Run

INTERVALS = "whiskers: 95 % bootstrap intervals over prompts"

Row = list[Any]


def of_group(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The figures for which these runs have data."""
    done = [(run, label) for run, label in zip(runs, tables.labels(runs), strict=True) if run["status"] == "ok"]
    made = (
        _speedups(done),
        _passes(done),
        _against_k(done, "speedup", "Speedup against draft length", "speedup over plain decoding", 1.0),
        _against_k(done, "tokens_per_pass", "Tokens per verify pass against draft length", "tokens per pass", None),
        _positions(done),
        _accepted(done),
        _shares(done),
        _predictions(done),
        _categories(done),
    )
    return [figure for figure in made if figure is not None]


def of_batch_sizes(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The same of runs that differ in their batch size: none, unless a drafter was measured at several."""
    measured = [run for run in runs if run["status"] == "ok" and run["metrics"]["speedup"] is not None]
    lines: dict[Any, list[tuple[Run, str]]] = {}
    for run, label in zip(measured, tables.labels(measured), strict=True):
        lines.setdefault((label, run["drafter"]["k"]), []).append((run, label))
    if all(len({_batch(run) for run, _ in line}) < 2 for line in lines.values()):
        return []
    best_first = sorted(lines.values(), key=lambda line: -max(run["metrics"]["speedup"] for run, _ in line))
    done = [named for line in best_first for named in sorted(line, key=lambda named: _batch(named[0]))]
    return [_against_batch(done), _throughput(done)]


Named = Sequence[tuple[Run, str]]


def _figure(name: str, kind: str, title: str, note: str, columns: Sequence[str], rows: list[Row], **more: Any) -> Any:
    if not rows:
        return None
    return {"name": name, "kind": kind, "title": title, "note": note, "columns": list(columns), "rows": rows, **more}


def _named(run: Run, label: str) -> Row:
    return [run["id"], label, run["drafter"]["k"]]


def _measured(metrics: Mapping[str, Any], name: str) -> Row:
    """A metric and its interval."""
    return [metrics[name], *(metrics[f"{name}_ci95"] or (None, None))]


def _fastest_first(done: Named) -> list[tuple[Run, str]]:
    return sorted(done, key=lambda named: -(named[0]["metrics"]["speedup"] or 0))


def _speedups(done: Named) -> Any:
    noise = next((run["metrics"]["speedup_ci95"] for run, _ in done if run["drafter"]["k"] == 0), None)
    note = f"{INTERVALS}; dashed: plain decoding" + ("; shaded: plain decoding against itself" if noise else "")
    look = {"at": 1, "band": noise, "unit": "×", "ratio": True}
    return _by_run(done, "speedup", "Speedup over plain decoding", f"logarithmic; {note}", look)


def _passes(done: Named) -> Any:
    note = f"the target’s own token included; {INTERVALS}; dashed: plain decoding"
    look = {"at": 1, "band": None, "unit": "", "ratio": False}
    return _by_run(done, "tokens_per_pass", "Tokens per verify pass", note, look)


def _by_run(done: Named, metric: str, title: str, note: str, look: Mapping[str, Any]) -> Any:
    """A metric with its interval, a line for each run."""
    rows = [
        [*_named(run, label), *_measured(run["metrics"], metric)]
        for run, label in _fastest_first(done)
        if run["metrics"][metric] is not None
    ]
    columns = ("run", "drafter", "k", metric, "low", "high")
    return _figure(metric.replace("_", "-"), "intervals", title, note, columns, rows, **look)


def _against_k(done: Named, metric: str, title: str, axis: str, at: float | None) -> Any:
    """Of drafters that were measured at several draft lengths."""
    lengths: dict[str, set[int]] = {}
    for run, label in done:
        lengths.setdefault(label, set()).add(run["drafter"]["k"])
    rows = [
        [run["id"], label, run["drafter"]["k"], *_measured(run["metrics"], metric)]
        for run, label in sorted(done, key=lambda named: (named[1], named[0]["drafter"]["k"]))
        if len(lengths[label]) > 1 and run["metrics"][metric] is not None
    ]
    columns = ("run", "drafter", "k", metric, "low", "high")
    look = {"across": "k", "up": metric, "x": "draft length k", "y": axis, "at": at}
    return _lines(f"{metric.replace('_', '-')}-by-k", title, INTERVALS, columns, rows, by=["drafter"], **look)


def _lines(name: str, title: str, note: str, columns: Sequence[str], rows: list[Row], **look: Any) -> Any:
    """Lines on scales that are even, and need not begin at 0, unless ``look`` says otherwise."""
    even = {"at": None, "zero": False, "log": [False, False]}
    return _figure(name, "lines", title, note, columns, rows, **{**even, **look})


def _positions(done: Named) -> Any:
    """Of each drafter the run of the longest drafts: shorter ones say the same of their positions."""
    rows = [
        [*_named(run, label), position, joint, conditional]
        for run, label in _longest(done)
        for position, (joint, conditional) in enumerate(_by_position(run), start=1)
        if joint is not None
    ]
    note = "share of the rounds that drafted so far whose drafts were all accepted; each drafter at its longest k"
    columns = ("run", "drafter", "k", "position", "joint", "conditional")
    look = {"across": "position", "up": "joint", "x": "position in the draft", "y": "accepted up to it", "zero": True}
    return _lines("acceptance", "Acceptance by position", note, columns, rows, by=["run"], **look)


def _longest(done: Named) -> list[tuple[Run, str]]:
    """Of each drafter the run of the longest drafts."""
    longest = {label: max(r["drafter"]["k"] for r, other in done if other == label) for _, label in done}
    return [(run, label) for run, label in done if run["drafter"]["k"] == longest[label]]


def _accepted(done: Named) -> Any:
    """Of each drafter the run of the longest drafts."""
    rows = [
        [*_named(run, label), accepted, count / sum(run["metrics"]["accepted_length_histogram"])]
        for run, label in _longest(done)
        if run["drafter"]["k"] and sum(run["metrics"]["accepted_length_histogram"])
        for accepted, count in enumerate(run["metrics"]["accepted_length_histogram"])
    ]
    note = "share of the rounds in which so many drafts were accepted; each drafter at its longest k"
    columns = ("run", "drafter", "k", "accepted", "share")
    look = {"across": "accepted", "up": "share", "x": "accepted drafts", "y": "share of rounds", "zero": True}
    return _lines("accepted-lengths", "Accepted length", note, columns, rows, by=["run"], **look)


def _by_position(run: Run) -> Iterator[tuple[float | None, float | None]]:
    found = run["metrics"]["acceptance_by_position"]
    return zip(found["joint"], found["conditional"], strict=True)


def _profiled(done: Named) -> list[tuple[Run, str]]:
    return [(run, label) for run, label in _fastest_first(done) if run["model"] is not None]


def _shares(done: Named) -> Any:
    rows = [[*_named(run, label), *run["model"]["shares"].values()] for run, label in _profiled(done)]
    parts = list(_profiled(done)[0][0]["model"]["shares"]) if rows else []
    note = "shares of a round, of a profiling pass apart from the headline’s"
    return _figure(
        "time", "shares", "Where a round’s time goes", note, ("run", "drafter", "k", *parts), rows, parts=parts
    )


def _predictions(done: Named) -> Any:
    rows = [
        [*_named(run, label), run["model"]["predicted_speedup"], *_measured(run["metrics"], "speedup")]
        for run, label in _profiled(done)
        if run["metrics"]["speedup"] is not None
    ]
    columns = ("run", "drafter", "k", "predicted", "measured", "low", "high")
    note = f"predicted by acceptance and the profile’s costs; {INTERVALS}; shaded: within a tenth"
    labels = {"x": "predicted speedup", "y": "measured speedup"}
    return _figure("prediction", "scatter", "Predicted against measured", note, columns, rows, within=0.1, **labels)


def _categories(done: Named) -> Any:
    rows = [
        [*_named(run, label), category, *_measured(found, "speedup"), found["tokens_per_pass"], found["units"]]
        for run, label in _fastest_first(done)
        for category, found in run["by_category"].items()
        if found["speedup"] is not None
    ]
    few = rows and max(row[-1] for row in rows) < MIN_UNITS
    note = "speedup of the prompts of each kind"
    note += f"; of at most {max(row[-1] for row in rows)} conversations each, too few for intervals" if few else ""
    columns = ("run", "drafter", "k", "category", "speedup", "low", "high", "tokens_per_pass", "units")
    return _figure("categories", "grid", "Speedup by kind of prompt", note, columns, rows)


def _against_batch(done: Named) -> Any:
    rows = [[*_named(run, label), _batch(run), *_measured(run["metrics"], "speedup")] for run, label in done]
    columns = ("run", "drafter", "k", "batch", "speedup", "low", "high")
    look = {"across": "batch", "up": "speedup", "x": "batch size", "y": "speedup over plain decoding", "at": 1}
    by = ["drafter", "k"]
    title = "Speedup against batch size"
    return _lines("speedup-by-batch", title, INTERVALS, columns, rows, by=by, log=[True, False], **look)


def _batch(run: Run) -> int:
    size: int = run["config"]["batch_size"]
    return size


def plain_at(batch_size: int) -> str:
    """Stands for a run's id where the runs' own baselines are shown."""
    return f"plain decoding, batch {batch_size}"


def _throughput(done: Named) -> Any:
    rows: list[Row] = [
        [plain_at(size), "plain decoding", 0, size, plain.per_user, plain.total, None, None]
        for size, plain in throughput.of_plain([run for run, _ in done]).items()
    ]
    for run, label in done:
        speeds = throughput.of_method(run)
        limits = speeds.limits or (None, None)
        rows.append([*_named(run, label), _batch(run), speeds.per_user, speeds.total, *limits])
    columns = ("run", "drafter", "k", "batch", "per_user", "all", "low", "high")
    look = {"across": "per_user", "up": "all", "x": "speed per user (tokens/s)", "y": "all users (tokens/s)"}
    note = (
        "lines lead from the smallest batch to the largest; up and to the right is better; whiskers: 95 % intervals of "
        "the speedup over plain decoding of the same run"
    )
    title = "Speed per user against that of all"
    return _lines("throughput", title, note, columns, rows, by=["drafter", "k"], log=[True, True], **look)
