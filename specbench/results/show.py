"""All that a record says of one run, for the terminal."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from specbench import settings, tables

LISTS = ("acceptance_by_position", "accepted_length_histogram")  # of the metrics; they have a table of their own


def show(run: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Parts to print one after the other; ``run``: of ``results.runs``."""
    yield f"{run['drafter']['name']} k={run['drafter']['k']} · run {run['id']} · {run['status']} · {run['folder']}"
    yield " · ".join(settings.title([run]))
    if run["status"] == "ok":
        yield from _measured(run)
    else:
        yield f"\nFailed: {run['error']}"
    yield "\nFlags:" if run["flags"] else "\nFlags: none"
    yield from (f"- {line}." for line in tables.flags([run]))
    for head, part in (
        ("Configuration", run["config"]),
        ("Drafter", run["drafter"]),
        ("Target", run["target"]),
        ("Prompts", {**run["dataset"], **run.get("prompts", {})}),
        ("Provenance", {**run["provenance"], "wall_seconds": run["wall_seconds"], "load": run["machine_load"]}),
    ):
        yield f"\n{head}"
        yield _pairs(part)


def _measured(run: Mapping[str, Any]) -> Iterator[RenderableType]:
    metrics = run["metrics"]
    yield "\nMetrics (docs/measuring.md defines them)"
    table = tables.numbers(("", "value", "95 % CI"))
    for name, value in metrics.items():
        if name not in LISTS and name != "lossless" and not name.endswith("_ci95"):
            table.add_row(name, _word(value), tables.interval(metrics.get(f"{name}_ci95")))
    yield table
    if run["drafter"]["k"]:
        yield "Acceptance by position in the draft"
        yield _positions(metrics)
    yield "Losslessness"
    yield _pairs(metrics["lossless"])
    yield "\nBy category"
    yield tables.terminal_by_category(run)
    yield "What should have come out, by a profile of its rounds"
    if run["model"] is None:
        yield "Not profiled."
        return
    yield _pairs({name: value for name, value in run["model"].items() if name != "by_k"})
    table = tables.numbers(("k", "tokens/pass", "ms a round", "speedup", "bound", "pays from"))
    for found in run["model"]["by_k"]:
        table.add_row(
            str(found["k"]),
            f"{found['tokens_per_pass']:.2f}",
            f"{1e3 * found['seconds']:.2f}",
            f"{found['speedup']:.2f}x",
            f"{found['bound']:.2f}x",
            tables.show(found["break_even"], "{:.0%}"),
        )
    yield table


def _positions(metrics: Mapping[str, Any]) -> Table:
    """A row per number of accepted drafts; of none there are only rounds."""
    by_position, rounds = metrics["acceptance_by_position"], metrics["accepted_length_histogram"]
    table = tables.numbers(("position", "joint", "conditional", "rounds that accepted so many"))
    for i, count in enumerate(rounds):
        shares = ["", ""]
        if i:
            shares = [tables.show(by_position[kind][i - 1], "{:.1%}") for kind in ("joint", "conditional")]
        table.add_row(str(i), *shares, f"{count:,}")
    return table


def _pairs(facts: Mapping[str, Any]) -> Table:
    """Names and values, those within others by dotted names."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _flat(facts):
        table.add_row(f"  {name}", value)
    return table


def _flat(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", text) for inner, text in _flat(value))
        elif isinstance(value, list):
            yield name, ", ".join(map(_word, value)) or "none"
        else:
            yield name, _word(value)


def _word(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
