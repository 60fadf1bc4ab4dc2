"""How good the guesses are: acceptance by position, and how many drafts of a round were accepted."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.ticker import MaxNLocator

from specbench.families import colour
from specbench.plots import groups, shares, style, words
from specbench.tables import Run

ACROSS = 5  # panels


def acceptance_by_position(runs: Sequence[Run], expected: Mapping[str, Sequence[float]], path: Path) -> list[Path]:
    """Joint acceptance against the position in the draft, a line per drafter, of its longest drafts, with 95 %
    intervals where the raw steps are at hand; ``expected``, by drafter, is what training's validation found, dashed.

    Written as ``path`` in each format; returns the files.
    """
    drafted = groups.longest_drafts(runs)
    lines = {name: [run] for name, run in zip(words.names(drafted), drafted, strict=True)}
    looks = style.looks(lines)
    dashed = ["dashed: on held-out replies of the training data"] if expected else []
    of = "of the rounds that drafted so far"
    notes = [f"{of}; {words.INTERVAL}", *dashed, *words.failures(runs), *words.flags(drafted)]
    with style.page(style.SINGLE, words.heading(runs), notes) as figure:
        axis = figure.subplots()
        for number, (label, (run,)) in enumerate(lines.items()):
            aside = style.spread_out(number, len(lines), 0.04)
            joint = run["metrics"]["acceptance_by_position"]["joint"]
            places = [i + aside for i in range(1, len(joint) + 1)]
            style.line(axis, list(zip(places, joint, shares.accepted_up_to(run), strict=True)), label, looks[label])
            found = expected.get(run["drafter"]["name"], ())
            axis.plot(range(1, len(found) + 1), found, linestyle="--", linewidth=0.8, color=colour(run))
        axis.set(xlabel="position in the draft (tokens)", ylabel="share of rounds\naccepted up to it", ylim=(0, None))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        style.legend_above(axis, style.SINGLE)
        return style.save(figure, path, 1.9, runs)


def accepted_lengths(runs: Sequence[Run], path: Path) -> list[Path]:
    """Shares of verify passes by how many drafts were accepted, a panel per drafter, of its longest drafts, with 95 %
    intervals where the raw steps are at hand. At least one must have drafted.

    Written as ``path`` in each format; returns the files.
    """
    drafted = groups.longest_drafts(runs)
    down = -(-len(drafted) // ACROSS)
    across = -(-len(drafted) // down)
    width = style.DOUBLE if across > 2 else style.SINGLE
    notes = [words.INTERVAL, *words.failures(runs), *words.flags(drafted)]
    with style.page(width, words.heading(runs), notes) as figure:
        grid = figure.subplots(down, across, sharey=True, squeeze=False)
        for axis, run, name in zip(grid.flat, drafted, words.names(drafted), strict=False):
            counts = run["metrics"]["accepted_length_histogram"]
            values = [count / max(1, sum(counts)) for count in counts]
            spread = [style.whiskers(*each) for each in zip(values, shares.accepted(run), strict=True)]
            axis.bar(
                range(len(values)),
                values,
                color=colour(run),
                yerr=list(zip(*spread, strict=True)),
                error_kw=style.WHISKER,
            )
            axis.set_title(words.fold(name, 18))
            axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
            axis.set(xlabel="accepted drafts", xlim=(-0.6, len(values) - 0.4))
        for axis in grid[:, 0]:
            axis.set_ylabel("share of\nverify passes")
        for axis in grid.flat[len(drafted) :]:
            axis.remove()
        return style.save(figure, path, 0.9, runs)
