"""Figures of runs, computed from their records."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specbench.tables import Run, labels, title

# Okabe-Ito, readable with colour-blindness; a family keeps its colour in every figure
COLOURS = {
    "none": "#999999",
    "ngram": "#E69F00",
    "suffix": "#D55E00",
    "small_lm": "#56B4E9",
    "eagle": "#0072B2",
    "mtp": "#009E73",
    "medusa": "#F0E442",
    "dflash": "#CC79A7",
    "dspark": "#882255",
    "oracle": "#333333",
}
OTHER = "#777777"
STYLE: Any = {
    "figure.dpi": 150,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "pdf.fonttype": 42,  # text stays text
}
FORMATS = ("png", "pdf")


def speedup_by_drafter(runs: Sequence[Run], path: Path) -> list[Path]:
    """Bars of speedup and of tokens per verify pass by drafter, with 95 % intervals, for one group of runs.

    Written as ``path`` with each of ``FORMATS``; returns the files. A failed run has the word in place of a bar.
    """
    panels = [
        ("speedup", "speedup_ci95", "speedup over plain decoding (×)"),
        ("tokens_per_pass", "tokens_per_pass_ci95", "tokens per verify pass"),
    ]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(6.8, 1.1 + 0.42 * len(runs)), sharey=True, layout="constrained")
        names = [f"{label}, k={run['drafter']['k']}" for label, run in zip(labels(runs), runs, strict=True)]
        for axis, (metric, interval, label) in zip(axes, panels, strict=True):
            for y, run in enumerate(runs):
                if run["status"] == "ok":
                    _bar(axis, y, run["metrics"][metric], run["metrics"][interval], _colour(run))
                else:
                    axis.annotate("failed", (0, y), xytext=(4, 0), textcoords="offset points", va="center", color="red")
            axis.axvline(1, color="#444444", linewidth=0.8, linestyle="--")
            axis.set_xlabel(label)
            axis.set_xlim(left=0)
            axis.margins(x=0.16)
        axes[0].set_yticks(range(len(runs)), names)
        axes[0].invert_yaxis()
        figure.suptitle(" · ".join(title(runs)), fontsize=8)
        figure.supxlabel("whiskers: 95 % bootstrap interval over prompts", fontsize=7, color="#555555")
        return _save(figure, path)


def _bar(axis: Axes, y: int, value: float | None, interval: list[float] | None, colour: str) -> None:
    if value is None:
        return  # nothing was proposed, or no pass was made
    spread = None if interval is None else [[max(0, value - interval[0])], [max(0, interval[1] - value)]]
    axis.barh(y, value, height=0.62, color=colour, xerr=spread, error_kw={"elinewidth": 1, "capsize": 2.5})
    end = value if interval is None else max(value, interval[1])
    axis.annotate(f"{value:.2f}", (end, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)


def _colour(run: Run) -> str:
    return COLOURS.get(run["drafter"]["name"], OTHER)


def _save(figure: Figure, path: Path) -> list[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_suffix(f".{form}") for form in FORMATS]
    for file in files:
        figure.savefig(file)
    plt.close(figure)
    return files
