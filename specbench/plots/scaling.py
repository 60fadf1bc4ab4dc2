"""What more training brings."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.ticker import NullFormatter

from specbench.families import COLOURS, OTHER
from specbench.plots import style


def scaling(family: str, points: Mapping[str, Sequence[tuple[float, float]]], path: Path) -> list[Path]:
    """Tokens per verify pass against the positions that a drafter has learned from, a line for each kind of text.

    Written as ``path`` in each format; returns the files.
    """
    with style.page(style.SINGLE, f"{family}, held-out replies", []) as figure:
        axis = figure.subplots()
        marker = style.MARKERS.get(family, style.OTHER_MARKER)
        for (name, found), line in zip(points.items(), ("-", "--", ":"), strict=False):
            axis.plot(
                *zip(*sorted(found), strict=True),
                marker=marker,
                markeredgecolor=style.EDGE,
                color=COLOURS.get(family, OTHER),
                linestyle=line,
                label=name,
            )
        axis.set_xscale("log")
        axis.set_xticks([tokens for tokens, _ in next(iter(points.values()))])
        axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1e6:.2g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set(xlabel="positions learned from (millions)", ylabel="tokens per verify pass")
        style.legend_above(axis, style.SINGLE)
        return style.save(figure, path, 1.9)
