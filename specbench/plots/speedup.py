"""What drafting brings: speedup by drafter."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from specbench.families import colour
from specbench.plots import rows, style, words
from specbench.tables import Run

PANELS = (("speedup", "speedup over plain decoding (×)"), ("tokens_per_pass", "tokens per verify pass"))
MARKS = "diamond: predicted from acceptance and costs; upright stroke: bound, were every draft right at the same cost"
HALO = [withStroke(linewidth=2.5, foreground="white")]  # so that strokes are seen on bars


def speedup_by_drafter(runs: Sequence[Run], path: Path) -> list[Path]:
    """Bars of speedup and of tokens per verify pass by drafter, with 95 % intervals, for one group of runs. Where a run
    was profiled its speedup has two marks: the predicted one, and the bound, were every draft right at the same cost.

    Written as ``path`` in each format; returns the files. A failed run has the word in place of a bar.
    """
    profiled = any(run.get("model") is not None for run in runs)
    notes = [f"{words.INTERVAL}; {MARKS}" if profiled else words.INTERVAL, *words.flags(runs)]
    with style.page(style.DOUBLE, words.heading(runs), notes) as figure:
        axes = figure.subplots(1, 2, sharey=True, gridspec_kw={"wspace": 0.06})
        for axis, (metric, label) in zip(axes, PANELS, strict=True):
            for y, run in enumerate(runs):
                if run["status"] == "ok":
                    _bar(axis, y, run["metrics"][metric], run["metrics"][f"{metric}_ci95"], colour(run))
                else:
                    rows.say(axis, y, "failed")
            axis.axvline(1, **style.REFERENCE)
            axis.set_xlabel(label)
        for y, run in enumerate(runs):
            if run["status"] == "ok" and run["drafter"]["k"] and run["model"] is not None:
                _marks(axes[0], y, run["model"])
        for axis in axes:
            axis.set_xlim(left=0)
        axes[1].tick_params(left=False)
        height = rows.label(axes[0], runs, 24)
        return style.save(figure, path, height, runs)


def _bar(axis: Axes, y: int, value: float | None, interval: Sequence[float] | None, colour: str) -> None:
    if value is None:
        return  # nothing was proposed, or no pass was made
    spread = [[length] for length in style.whiskers(value, interval)]
    axis.barh(y, value, height=rows.BAR, color=colour, xerr=spread, error_kw=style.WHISKER)
    rows.beside(axis, y, f"{value:.2f}")


def _marks(axis: Axes, y: int, model: Mapping[str, Any]) -> None:
    stroke: Any = {"marker": "|", "markersize": 9, "markeredgewidth": 1.2, "path_effects": HALO}
    diamond: Any = {"marker": "D", "markersize": 3.2, "markeredgewidth": 0.7, "markerfacecolor": "white"}
    for value, mark in ((model["bound"], stroke), (model["predicted_speedup"], diamond)):
        axis.plot([value], [y], markeredgecolor=style.EDGE, zorder=4, **mark)
