"""What more training brings: acceptance, and tokens per verify pass, against the positions learned from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.ticker import NullFormatter

from specbench.families import COLOURS, OTHER
from specbench.plots import style


@dataclass(frozen=True)
class Learned:
    """What a drafter does with held-out text after so many ``positions``: by kind of text the tokens per verify pass,
    and of the first kind the share of rounds whose first i drafts were all accepted, i = 1..k."""

    positions: int
    tokens_per_pass: Mapping[str, float]
    acceptance: Sequence[float]


def scaling(family: str, learned: Sequence[Learned], path: Path) -> list[Path]:
    """Acceptance up to each position of a draft, and tokens per verify pass, a line for each kind of text, against the
    positions that a drafter has learned from.

    Written as ``path`` in each format; returns the files.
    """
    ordered = sorted(learned, key=lambda each: each.positions)
    x = [each.positions for each in ordered]
    kinds = list(ordered[0].tokens_per_pass)
    look: Any = {
        "color": COLOURS.get(family, OTHER),
        "marker": style.MARKERS.get(family, style.OTHER_MARKER),
        "markeredgecolor": style.EDGE,
    }
    beside: Any = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": style.SMALL}
    notes = [f"left: up to the position in the draft that stands beside a line; {kinds[0]}"]
    with style.page(style.DOUBLE, f"{family}, held-out replies", notes) as figure:
        shares, tokens = figure.subplots(1, 2)
        for i in range(len(ordered[0].acceptance)):
            shares.plot(x, [each.acceptance[i] for each in ordered], **look)
            shares.annotate(str(i + 1), (x[-1], ordered[-1].acceptance[i]), **beside)
        for kind, line in zip(kinds, ("-", "--", ":"), strict=False):
            tokens.plot(x, [each.tokens_per_pass[kind] for each in ordered], linestyle=line, label=kind, **look)
        for axis in (shares, tokens):
            axis.set_xscale("log")
            axis.set_xticks(x)
            axis.xaxis.set_major_formatter(lambda positions, _: f"{positions / 1e6:.2g}")
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.set_xlabel("positions learned from (millions)")
        shares.set(ylabel="share of rounds accepted", ylim=(0, None))
        tokens.set_ylabel("tokens per verify pass")
        style.legend_beside(tokens, [tokens])
        return style.save(figure, path, 1.9)
