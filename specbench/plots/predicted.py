"""Whether a speedup is what acceptance and costs say it should be."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specbench.plots import groups, style, words
from specbench.prediction import BELIEVABLE
from specbench.tables import Run

MARGIN = 1.1


def predicted_against_measured(runs: Sequence[Run], path: Path) -> list[Path]:
    """Measured speedups, with 95 % intervals, against predicted ones, a point per profiled run; where both are equal
    there is a line, and a band around it in which they are taken to agree. For one group of runs.

    Written as ``path`` in each format; returns the files.
    """
    lines = groups.by_drafter([run for run in groups.finished(runs) if comparable(run)])
    looks = style.looks(lines)
    notes = [
        f"dashed: measured as predicted; shaded: within {BELIEVABLE:.0%} of it; {words.INTERVAL}",
        *words.failures(runs),
        *words.flags(runs),
    ]
    with style.page(style.SINGLE, words.heading(runs), notes) as figure:
        axis = figure.subplots()
        reached = [1.0]
        for label, members in lines.items():
            points = [
                (run["model"]["predicted_speedup"], run["metrics"]["speedup"], run["metrics"]["speedup_ci95"])
                for run in members
            ]
            style.line(axis, points, label, {**looks[label], "linestyle": "none"})
            reached += [each for x, value, interval in points for each in (x, value, *(interval or ()))]
        style.log_scale(axis, (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7))
        ends = np.array([min(reached) / MARGIN, max(reached) * MARGIN])
        axis.plot(ends, ends, **style.REFERENCE)
        axis.fill_between(
            ends, (1 - BELIEVABLE) * ends, (1 + BELIEVABLE) * ends, color="#E4E4E4", linewidth=0, zorder=0
        )
        axis.set(xlim=ends, ylim=ends, xlabel="predicted speedup (×)", ylabel="measured speedup (×)")
        style.legend_above(axis, style.SINGLE)
        return style.save(figure, path, 2.6, runs)


def comparable(run: Run) -> bool:
    """Whether a finished run has both speedups."""
    return run["model"] is not None and run["metrics"]["speedup"] is not None
