"""Figures with a row for each run: names on the left, numbers in a column on the right."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from specbench.plots import words
from specbench.plots.style import SMALL
from specbench.tables import Run

BAR = 0.66  # of a row


def label(axis: Axes, runs: Sequence[Run], width: int) -> float:
    """Name the rows, from the top, in lines of ``width`` characters; returns the inches that all need."""
    names = [words.fold(name, width) for name in words.names(runs)]
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    return len(names) * (0.1 + 0.12 * max(1 + name.count("\n") for name in names))


def say(axis: Axes, y: int, word: str) -> None:
    """A word in place of a bar."""
    axis.annotate(word, (0, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=SMALL, color="#B00000")


def beside(axis: Axes, y: int, text: str) -> None:
    """A number, in the column right of the axes."""
    where: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    axis.annotate(text, (1, y), xytext=(3, 0), va="center", fontsize=SMALL, **where)
