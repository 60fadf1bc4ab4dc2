"""Which runs make a line, and which a figure."""

from collections.abc import Mapping, Sequence

from specbench.tables import Run, labels


def by_drafter(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of one drafter with the same options, whatever they drafted, shortest drafts first; by what to call it."""
    found: dict[str, list[Run]] = {}
    for run, name in zip(runs, labels(runs), strict=True):
        found.setdefault(name, []).append(run)
    return {name: sorted(members, key=lambda run: run["drafter"]["k"]) for name, members in found.items()}


def best_first(lines: Mapping[str, Sequence[Run]]) -> dict[str, Sequence[Run]]:
    """Lines of finished runs in the order in which a reader looks for them: the one of the highest speedup first."""
    return dict(sorted(lines.items(), key=lambda line: -max(run["metrics"]["speedup"] or 0.0 for run in line[1])))


def by_drafter_and_k(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The same for each draft length, smallest batches first."""
    return {
        f"{name}, k={k}": by_batch_size([run for run in members if run["drafter"]["k"] == k])
        for name, members in by_drafter(runs).items()
        for k in dict.fromkeys(run["drafter"]["k"] for run in members)
    }


def by_batch_size(runs: Sequence[Run]) -> list[Run]:
    """Smallest batches first."""
    return sorted(runs, key=lambda run: run["config"]["batch_size"])


def have_several_draft_lengths(runs: Sequence[Run]) -> bool:
    """Whether any drafter has."""
    return any(len({run["drafter"]["k"] for run in members}) > 1 for members in by_drafter(runs).values())


def longest_drafts(runs: Sequence[Run]) -> list[Run]:
    """Of each drafter the finished run of the longest drafts. Left out are those that drafted nothing, and those that
    know the reply beforehand, whose guesses tell nothing."""
    drafted = [run for run in finished(runs) if run["drafter"]["k"] and not run["needs_reference"]]
    return [members[-1] for members in by_drafter(drafted).values()]


def finished(runs: Sequence[Run]) -> list[Run]:
    """Those that did not fail."""
    return [run for run in runs if run["status"] == "ok"]
