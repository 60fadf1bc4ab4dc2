"""How long drafts should be: speedup and tokens per verify pass against k."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from specbench.families import colour
from specbench.plots import groups, style, words
from specbench.plots.speedup import PANELS
from specbench.tables import Run

DASHED = "dashed: predicted for every k from the profile of the longest drafts"


def by_draft_length(runs: Sequence[Run], path: Path) -> list[Path]:
    """Measured speedup and tokens per verify pass against the draft length, a line per drafter, with 95 % intervals;
    dashed what the profiled run of the longest drafts predicts for shorter ones. For one group of runs.

    Written as ``path`` in each format; returns the files.
    """
    lines = groups.best_first(groups.by_drafter(groups.finished(runs)))
    looks = style.looks(lines)
    notes = [f"{words.INTERVAL}; {DASHED}", *words.failures(runs), *words.flags(runs)]
    with style.page(style.DOUBLE, words.heading(runs), notes) as figure:
        axes = figure.subplots(1, 2)
        for axis, (metric, title) in zip(axes, PANELS, strict=True):
            axis.axhline(1, **style.REFERENCE)
            for number, (label, members) in enumerate(lines.items()):
                aside = style.spread_out(number, len(lines), 0.04)
                points = [
                    (run["drafter"]["k"] + aside, run["metrics"][metric], run["metrics"][f"{metric}_ci95"])
                    for run in members
                ]
                style.line(axis, points, label, looks[label])
                profiled = [run["model"] for run in members if run["model"] is not None]
                predicted = [(found["k"], found[metric]) for model in profiled[-1:] for found in model["by_k"]]
                axis.plot(
                    [k for k, _ in predicted],
                    [value for _, value in predicted],
                    color=colour(members[0]),
                    linestyle="--",
                    linewidth=0.8,
                )
            axis.set(xlabel="draft length k (tokens)", ylabel=title)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        dashed = Line2D([], [], label="predicted", color=style.GREY, linestyle="--", linewidth=0.8)
        style.legend_beside(axes[1], axes, [dashed])
        return style.save(figure, path, 2.3, runs)
