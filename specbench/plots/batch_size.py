"""What is left of it in a batch: speedup against batch size, and a user's speed against that of all."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from specbench.families import COLOURS
from specbench.plots import groups, style, words
from specbench.tables import Run
from specbench.throughput import of_method, of_plain

Lines = Mapping[str, Sequence[Run]]
Draw = Callable[[Axes, Lines, Mapping[str, Mapping[str, Any]]], None]  # on axes: lines, and how each looks
ACROSS = 3  # panels


def by_batch_size(runs: Sequence[Run], path: Path) -> list[Path]:
    """Speedup against batch size, with 95 % intervals, a line per drafter and draft length; for runs that differ in
    their batch size. Where a drafter comes with several draft lengths each of these has a panel.

    Written as ``path`` in each format; returns the files.
    """
    return _panels(runs, path, _speedup, "batch size (rows)", "speedup over plain\ndecoding (×)", [words.INTERVAL])


def throughput(runs: Sequence[Run], path: Path) -> list[Path]:
    """Speed that each row sees against the total of all rows, over batch sizes, a line per drafter and draft length and
    one of plain decoding; up and to the right is better. For runs that differ in their batch size.

    A row's speed is tokens per verify pass over the seconds of a round; whiskers are the interval of the speedup, at
    the plain decoding of the same run. Written as ``path`` in each format; returns the files.
    """
    notes = [
        "numbers: batch sizes of plain decoding",
        "speed per user: tokens per verify pass / seconds of a round; whiskers: "
        f"{words.PERCENT} interval of the speedup over the plain decoding of the same run",
    ]
    return _panels(runs, path, _throughput, "speed per user (tokens/s)", "all users (tokens/s)", notes)


def _panels(runs: Sequence[Run], path: Path, draw: Draw, x: str, y: str, notes: Sequence[str]) -> list[Path]:
    """A panel for all, or for each draft length where a drafter has several."""
    finished = groups.finished(runs)
    panels: dict[str, Lines] = {"": groups.best_first(groups.by_drafter_and_k(finished))}
    looks, width = style.looks(panels[""]), style.SINGLE
    several = groups.have_several_draft_lengths(finished)
    if several:
        drafters = groups.best_first(groups.by_drafter(finished))
        looks, width = style.looks(drafters), style.DOUBLE
        for k in sorted({run["drafter"]["k"] for run in finished} - {0}):
            of_k = {name: [run for run in line if run["drafter"]["k"] in (0, k)] for name, line in drafters.items()}
            panels[f"k={k}"] = {name: groups.by_batch_size(line) for name, line in of_k.items() if line}
        del panels[""]
    notes = [*notes, *words.failures(runs), *words.flags(runs)]
    with style.page(width, words.heading(runs), notes) as figure:
        across = min(ACROSS, len(panels))
        grid = figure.subplots(-(-len(panels) // across), across, sharex=True, sharey=True, squeeze=False)
        for axis, (title, lines) in zip(grid.flat, panels.items(), strict=False):
            draw(axis, lines, looks)
            axis.set_title(title)
            axis.set_xlabel(x)
            axis.tick_params(labelbottom=True)
        for axis in grid[:, 0]:
            axis.set_ylabel(y)
        for axis in grid.flat[len(panels) :]:
            axis.remove()
        if several:
            style.legend_beside(grid[0, -1], figure.axes)
        else:
            style.legend_above(grid[0, 0], width)
        return style.save(figure, path, 1.9, runs)


def _speedup(axis: Axes, lines: Lines, looks: Mapping[str, Mapping[str, Any]]) -> None:
    axis.axhline(1, **style.REFERENCE)
    for number, (label, runs) in enumerate(lines.items()):
        aside = 2 ** style.spread_out(number, len(lines), 0.03)
        points = [
            (aside * run["config"]["batch_size"], run["metrics"]["speedup"], run["metrics"]["speedup_ci95"])
            for run in runs
        ]
        style.line(axis, points, label, looks[label])
    sizes = sorted({run["config"]["batch_size"] for runs in lines.values() for run in runs})
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.xaxis.set_minor_formatter(NullFormatter())


def _throughput(axis: Axes, lines: Lines, looks: Mapping[str, Mapping[str, Any]]) -> None:
    at = of_plain([run for runs in lines.values() for run in runs])
    look: Any = {"color": COLOURS["none"], "linestyle": "--", "marker": "."}
    axis.plot([s.per_user for s in at.values()], [s.total for s in at.values()], label="plain decoding", **look)
    below: Any = {"xytext": (-3, -3), "textcoords": "offset points", "ha": "right", "va": "top"}
    for size, plain in at.items():
        axis.annotate(str(size), (plain.per_user, plain.total), fontsize=style.SMALL, **below)
    for label, runs in lines.items():
        speeds = [of_method(run) for run in runs if run["metrics"]["speedup"] is not None]
        style.line(axis, [(s.per_user, s.total, s.limits) for s in speeds], label, looks[label])
    style.log_scale(axis, (1, 2, 5))
    axis.margins(0.1)
