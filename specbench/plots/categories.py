"""On which prompts it pays: speedup by category."""

from collections.abc import Mapping, Sequence
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from specbench.metrics import MIN_UNITS
from specbench.plots import style, words
from specbench.tables import Run

ALL = "all prompts"
ACROSS = 10  # columns that have space for an interval each
LIMIT = 1.0  # powers of two of the speedup at which colours end


def speedup_by_category(runs: Sequence[Run], path: Path) -> list[Path]:
    """Speedup of each drafter on the prompts of each category, as numbers with their 95 % intervals on a ground of blue
    (faster) or red (slower), for one group of runs. A dash where it is not known.

    Written as ``path`` in each format; returns the files.
    """
    categories = [ALL, *sorted({name for run in runs for name in run.get("by_category") or {}})]
    blocks = -(-len(runs) // ACROSS)
    across = -(-len(runs) // blocks)
    few = "" if any(_cell(run, name)[1] for run in runs for name in categories[1:]) else ", in no category here"
    notes = [
        "speedup over plain decoding, on a ground from half (red) to twice (blue) the speed; below it the "
        f"{words.PERCENT} bootstrap interval over prompts ({MIN_UNITS} or more{few})",
        *words.flags(runs),
    ]
    names = [
        f"{words.fold(label, 95 // across)}\n{k}" for label, k in (name.rsplit(", ", 1) for name in words.names(runs))
    ]
    with style.page(style.DOUBLE, words.heading(runs), notes) as figure:
        grid = figure.subplots(blocks, 1, squeeze=False)
        for block, axis in enumerate(grid.flat):
            chosen = slice(block * across, (block + 1) * across)
            _table(axis, runs[chosen], names[chosen], categories, across)
        return style.save(figure, path, 0.29 * len(categories), runs)


def _table(axis: Axes, runs: Sequence[Run], names: Sequence[str], categories: Sequence[str], across: int) -> None:
    """A block of the table. across: columns of the widest block."""
    speedups = np.full((len(categories), across), np.nan)
    for column, run in enumerate(runs):
        for row, category in enumerate(categories):
            value, interval = _cell(run, category)
            dark = False
            if value:
                speedups[row, column] = log2(value)
                dark = abs(log2(value)) > 0.6 * LIMIT
            text = "failed" if run["status"] != "ok" else "–" if value is None else _number(value)
            if interval is not None:
                text += f"\n{_number(interval[0])}–{_number(interval[1])}"
            axis.text(
                column, row, text, ha="center", va="center", fontsize=style.SMALL, color="white" if dark else "black"
            )
    axis.imshow(speedups, cmap="RdBu", vmin=-LIMIT, vmax=LIMIT, aspect="auto")
    axis.axhline(0.5, color="white", linewidth=2)
    axis.set_xticks(range(len(names)), names)
    axis.set_yticks(range(len(categories)), [words.fold(name.replace("_", " "), 14) for name in categories])
    axis.tick_params(length=0, labeltop=True, labelbottom=False)
    axis.spines[:].set_visible(False)


def _cell(run: Run, category: str) -> tuple[float | None, Sequence[float] | None]:
    if run["status"] != "ok":
        return None, None
    found: Mapping[str, Any] = run["metrics"] if category == ALL else run["by_category"].get(category, {})
    return found.get("speedup"), found.get("speedup_ci95")


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
