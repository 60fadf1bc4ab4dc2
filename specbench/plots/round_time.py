"""Where a round's time goes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from specbench.families import colour
from specbench.plots import rows, style, words
from specbench.tables import Run

GREYS = {"verify": "#D0D0D0", "accept": "#8C8C8C", "bookkeeping": "#4D4D4D"}  # drafting has its family's colour
DIAMOND: Any = {"marker": "D", "color": "black", "markerfacecolor": "white", "markersize": 3.4, "markeredgewidth": 0.7}


def round_time(runs: Sequence[Run], path: Path) -> list[Path]:
    """Bars of the length of a round, as a multiple of a plain one, and of its parts, both in the profiling pass; and
    tokens per verify pass beside, which is what the round is worth. For one group of runs.

    Written as ``path`` in each format; returns the files. What was not profiled, or failed, has the word in place of a
    bar.
    """
    notes = [
        "bar and number: a round and its parts in the profiling pass; diamond: measured tokens per verify pass, "
        f"with its {words.PERCENT} interval; at batch size 1 drafting pays where it lies past the bar",
        *words.flags(runs),
    ]
    with style.page(style.SINGLE, words.heading(runs), notes) as figure:
        axis = figure.subplots()
        for y, run in enumerate(runs):
            if run["status"] != "ok":
                rows.say(axis, y, "failed")
                continue
            found = run["metrics"]
            if run["model"] is None or found["tokens_per_pass"] is None:
                rows.say(axis, y, "not profiled")
                continue
            length, left = run["model"]["by_k"][-1]["seconds"] / run["model"]["plain_seconds"], 0.0
            for part, share in run["model"]["shares"].items():
                axis.barh(y, share * length, left=left, height=rows.BAR, color=GREYS.get(part, colour(run)))
                left += share * length
            rows.beside(axis, y, f"{length:.2f}")
            spread = [[each] for each in style.whiskers(found["tokens_per_pass"], found["tokens_per_pass_ci95"])]
            axis.errorbar(found["tokens_per_pass"], y, xerr=spread, **DIAMOND, **style.WHISKER)
        axis.axvline(1, **style.REFERENCE)
        axis.set(xlabel="rounds of plain decoding", xlim=(0, None))
        height = rows.label(axis, runs, 20)
        parts = [
            Patch(facecolor="white", edgecolor=style.EDGE, linewidth=0.6, label="draft (coloured)"),
            *(Patch(color=grey, label=part) for part, grey in GREYS.items()),
            Line2D([], [], linestyle="none", label="tokens per pass", **DIAMOND),
        ]
        style.legend_above(axis, style.SINGLE, parts)
        return style.save(figure, path, height, runs)
