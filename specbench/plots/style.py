"""How every figure looks, and how it is written: one style sheet, the widths of a paper's columns, PNG and PDF.

Figures are drawn without a window system and without pyplot, so no display is needed and none is left open.
"""

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import LogLocator, NullFormatter

from specbench import record
from specbench.families import COLOURS, colour
from specbench.plots.words import fold
from specbench.tables import Run

SINGLE, DOUBLE = 3.3, 6.8  # inches: one column of a paper, and both
ROOMY = 30  # inches of height, until ``save`` knows what is needed
SMALL = 7  # points: the smallest text
CHARACTERS = 20  # of SMALL text in an inch, at most
FORMATS = ("png", "pdf")

HANDLE = 1.6  # of a legend, in heights of its text
STYLE: Any = {
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # text stays text
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": SMALL,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "legend.title_fontsize": SMALL,
    "legend.frameon": False,
    "legend.handlelength": HANDLE,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 0.9,
    "figure.constrained_layout.hspace": 0,  # a share of the page, and its height is not known yet
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "lines.markeredgewidth": 0.4,
    "errorbar.capsize": 1.5,
}
GREY = "#555555"
EDGE = "#333333"  # of markers, so that pale ones are seen
REFERENCE: Any = {"color": GREY, "linewidth": 0.7, "linestyle": "--", "zorder": 1}
WHISKER: Any = {"elinewidth": 0.8, "capthick": 0.8}
MARKERS = dict(zip(COLOURS, "ohHsDd^v<>X", strict=True))  # with the colours, for who sees none
OTHER_MARKER = "P"
TWINS = list(zip(2 * ["-", ":", "-."], ["full", "none", "left", "right", "top", "bottom"], strict=True))
Point = tuple[float, float | None, Sequence[float] | None]  # where, value, interval


@contextmanager
def page(width: float, heading: str, notes: Sequence[str]) -> Iterator[Figure]:
    """A figure ``width`` inches wide to draw on, in the style of all, whatever the user's own settings are. ``heading``
    and ``notes``, a line or more each, are folded to its width."""
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(width, ROOMY), layout="constrained")
        if heading:
            figure.suptitle(_fold_to(width, heading), fontsize=SMALL)
        if notes:
            text = "\n".join(_fold_to(width, note) for note in notes)
            figure.supxlabel(text, x=0.01, ha="left", fontsize=SMALL, color=GREY)
        yield figure


def save(figure: Figure, path: Path, height: float, runs: Sequence[Run] = ()) -> list[Path]:
    """Write ``path`` with each of ``FORMATS`` and return the files. Each row of axes gets ``height`` inches, more where
    a legend beside them needs it; the page gets what labels, notes and legends above need besides. The ids of ``runs``
    go into the files' description. Raises RunError if the disk does not take them; then earlier ones stay."""
    figure.draw_without_rendering()
    first = figure.axes[0]
    rows = first.get_subplotspec().get_gridspec().nrows  # type: ignore[union-attr]
    legends = [(axis, axis.get_legend()) for axis in figure.axes]
    beside = [
        legend.get_window_extent().height / figure.dpi
        for axis, legend in legends
        if legend is not None and legend.get_window_extent().x0 > axis.get_window_extent().x1
    ]
    height = max([height, *(each / rows for each in beside)])
    figure.set_figheight(
        figure.get_figheight() + rows * (height - first.get_position().height * figure.get_figheight())
    )
    source = f"specbench runs {', '.join(run['id'] for run in runs)}" if runs else "specbench"
    said: dict[str, dict[str, Any]] = {
        "png": {"Description": source},
        "pdf": {"Subject": source, "CreationDate": None},  # the same figure is the same file
    }
    files = [path.with_name(f"{path.name}.{form}") for form in FORMATS]
    for file, form in zip(files, FORMATS, strict=True):
        drawn = io.BytesIO()
        figure.savefig(drawn, format=form, metadata=said[form])
        record.write_file(file, drawn.getvalue())
    return files


def looks(lines: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, Any]]:
    """How to draw each line of runs of one drafter: colour and marker are its family's, and lines of one colour differ
    in their dashes and in how their markers are filled."""
    twins: Counter[str] = Counter()
    found = {}
    for label, runs in lines.items():
        own = colour(runs[0])
        line, fill = TWINS[twins[own] % len(TWINS)]
        found[label] = {
            "color": own,
            "marker": MARKERS.get(runs[0]["drafter"]["name"], OTHER_MARKER),
            "markeredgecolor": EDGE,
            "linestyle": line,
            "fillstyle": fill,
        }
        twins[own] += 1
    return found


def whiskers(value: float, interval: Sequence[float] | None) -> tuple[float, float]:
    """Lengths below and above ``value``; not a number, so that nothing is drawn, where there is no interval."""
    if interval is None:
        return float("nan"), float("nan")
    return max(0.0, value - interval[0]), max(0.0, interval[1] - value)


def line(axis: Axes, points: Sequence[Point], label: str, look: Mapping[str, Any]) -> None:
    """A line through ``points``, with whiskers; those without a value are left out."""
    known = [(x, value, whiskers(value, interval)) for x, value, interval in points if value is not None]
    if known:
        x, values, spread = zip(*known, strict=True)
        axis.plot(x, values, label=label, **look)
        axis.errorbar(x, values, list(zip(*spread, strict=True)), fmt="none", ecolor=look["color"], **WHISKER)


def spread_out(number: int, count: int, step: float) -> float:
    """How far to move the line of this number among so many to the side, so that their whiskers are told apart."""
    return (number - (count - 1) / 2) * step


def log_scale(axis: Axes, subs: Sequence[float]) -> None:
    """Both scales logarithmic, with plain numbers at ``subs`` times the powers of ten."""
    axis.set(xscale="log", yscale="log")
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(LogLocator(subs=subs))
        side.set_major_formatter(lambda value, _: f"{value:g}")
        side.set_minor_formatter(NullFormatter())


def legend_above(axis: Axes, width: float, handles: Sequence[Artist] = ()) -> None:
    """Above the axes: what is labelled in them, and ``handles`` besides, in as many columns as fit a page of ``width``
    inches."""
    shown = [*axis.get_legend_handles_labels()[0], *handles]
    if not shown:
        return
    labels = [fold(str(handle.get_label()), 40) for handle in shown]
    for columns in range(min(4, len(labels)), 0, -1):
        rows = -(-len(labels) // columns)
        widest = [max(map(_inches, labels[i : i + rows])) for i in range(0, len(labels), rows)]
        if sum(widest) + columns * (HANDLE + 1.5) * SMALL / 72 < width - 0.3:
            break
    axis.legend(shown, labels, loc="lower right", bbox_to_anchor=(1, 1), ncols=columns)


def legend_beside(axis: Axes, of: Sequence[Axes], handles: Sequence[Artist] = (), title: str | None = None) -> None:
    """Right of ``axis``: what is labelled in any of the axes ``of``, once, and ``handles`` besides."""
    labelled = {handle.get_label(): handle for each in of for handle in each.get_legend_handles_labels()[0]}
    shown = [*labelled.values(), *handles]
    labels = [fold(str(handle.get_label()), 20) for handle in shown]
    axis.legend(shown, labels, loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0, title=title)


def _fold_to(width: float, text: str) -> str:
    """Lines of small text that fit so many inches."""
    characters = int(width * CHARACTERS)
    while _inches(fold(text, characters)) > 0.97 * width:
        characters -= 1
    return fold(text, characters)


def _inches(text: str) -> float:
    """Width of the longest line, in small text."""
    font = FontProperties(size=SMALL)
    widths = (text_to_path.get_text_width_height_descent(line, font, False)[0] for line in text.splitlines())
    return max(widths, default=0.0) / 72
