"""Every figure that some runs allow, in one folder."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench import tables
from specbench.plots import groups
from specbench.plots.acceptance import acceptance_by_position, accepted_lengths
from specbench.plots.batch_size import by_batch_size, throughput
from specbench.plots.categories import speedup_by_category
from specbench.plots.draft_length import by_draft_length
from specbench.plots.free_lunch import verify_cost
from specbench.plots.predicted import comparable, predicted_against_measured
from specbench.plots.round_time import round_time
from specbench.plots.speedup import speedup_by_drafter
from specbench.plots.style import FORMATS
from specbench.tables import Run

Plot = Callable[[Sequence[Run], Path], list[Path]]
Allows = Callable[[Sequence[Run]], bool]


def draw(runs: Sequence[Run], folder: Path, curve: Mapping[str, Any] | None = None) -> list[Path]:
    """Draw every figure that ``runs`` allow into ``folder``, and that of a verify-cost ``curve``; returns the files.

    Where the runs have several settings, figures are numbered by setting: by the words of their headings, smaller
    numbers first. Files of an earlier call that this one does not make are removed.
    """
    alike = _numbered(tables.by_setting(runs))
    sweeps = _numbered(tables.by_setting(runs, varying=("batch_size",)))
    wanted = [
        (plot, group, f"{name}{number}")
        for figures, numbered in ((OF_A_SETTING, alike), (OF_BATCH_SIZES, sweeps))
        for name, (plot, allows) in figures.items()
        for number, group in numbered.items()
        if allows(group)
    ]
    files = [file for plot, group, name in wanted for file in plot(group, folder / name)]
    files += verify_cost(curve, folder / OF_A_CURVE) if curve is not None else []
    _remove_earlier(folder, files)
    return files


def _numbered(found: Sequence[Sequence[Run]]) -> dict[str, Sequence[Run]]:
    """Groups by the end of their figures' names: none where there is one group."""
    if len(found) == 1:
        return {"": found[0]}
    return {f"-{number}": group for number, group in enumerate(found, start=1)}


def _remove_earlier(folder: Path, files: Sequence[Path]) -> None:
    """Those of an earlier call that this one did not make."""
    ours = "|".join([*OF_A_SETTING, *OF_BATCH_SIZES, OF_A_CURVE])
    for file in folder.glob("*"):
        if file not in files and re.fullmatch(rf"({ours})(-\d+)?\.({'|'.join(FORMATS)})", file.name):
            file.unlink()


def _drafted(runs: Sequence[Run]) -> bool:
    return any(sum(run["metrics"]["accepted_length_histogram"]) for run in groups.longest_drafts(runs))


def _measured(runs: Sequence[Run]) -> list[Run]:
    return [run for run in groups.finished(runs) if run["metrics"]["speedup"] is not None]


def _has_several_batch_sizes(runs: Sequence[Run]) -> bool:
    lines = groups.by_drafter_and_k(_measured(runs)).values()
    return any(len({run["config"]["batch_size"] for run in line}) > 1 for line in lines)


def _has_categories(runs: Sequence[Run]) -> bool:
    each = [run["by_category"] for run in groups.finished(runs)]
    return any(len(found) > 1 and any(one["speedup"] is not None for one in found.values()) for found in each)


OF_A_SETTING: dict[str, tuple[Plot, Allows]] = {
    "speedup": (speedup_by_drafter, bool),
    "draft_length": (by_draft_length, lambda runs: groups.have_several_draft_lengths(_measured(runs))),
    "acceptance_by_position": (lambda runs, path: acceptance_by_position(runs, {}, path), _drafted),
    "accepted_lengths": (accepted_lengths, _drafted),
    "round_time": (round_time, lambda runs: any(comparable(run) for run in groups.finished(runs))),
    "speedup_by_category": (speedup_by_category, _has_categories),
    "predicted": (predicted_against_measured, lambda runs: any(comparable(run) for run in groups.finished(runs))),
}
OF_BATCH_SIZES: dict[str, tuple[Plot, Allows]] = {
    "batch_size": (by_batch_size, _has_several_batch_sizes),
    "throughput": (throughput, _has_several_batch_sizes),
}
OF_A_CURVE = "free_lunch"
