"""What is written around a figure: the setting above, names beside, and below what must be known to read it."""

import textwrap
from collections.abc import Sequence

from specbench import settings
from specbench.metrics import MIN_UNITS
from specbench.tables import Run, flag_names, labels

PERCENT = "95\N{NO-BREAK SPACE}%"
INTERVAL = f"whiskers: {PERCENT} bootstrap interval over prompts ({MIN_UNITS} or more)"


def fold(text: str, width: int) -> str:
    """Lines of ``width`` characters at most.

    >>> fold("a drafter with options", 10)
    'a drafter\\nwith\\noptions'
    """
    return "\n".join(textwrap.wrap(text, width, break_on_hyphens=False))


def heading(runs: Sequence[Run]) -> str:
    """The setting, as far as all finished runs share it."""
    return " · ".join(settings.shared(runs))


def names(runs: Sequence[Run]) -> list[str]:
    """What to call each run."""
    return [f"{name}, k={run['drafter']['k']}" for run, name in zip(runs, labels(runs), strict=True)]


def flags(runs: Sequence[Run]) -> list[str]:
    """A note that names the flags of the runs, and whom they are about if that is not all."""
    named = flag_names(runs, _exact_names(runs))
    return [f"flags: {'; '.join(named)}"] if named else []


def failures(runs: Sequence[Run]) -> list[str]:
    """A note that names the runs that failed, for figures that have no other place for them."""
    failed = [name for run, name in zip(runs, _exact_names(runs), strict=True) if run["status"] != "ok"]
    return [f"failed: {', '.join(failed)}"] if failed else []


def _exact_names(runs: Sequence[Run]) -> list[str]:
    """Names with the batch size, where that differs."""
    sizes = [run["config"]["batch_size"] for run in runs]
    ends = [f" batch {size}" if len(set(sizes)) > 1 else "" for size in sizes]
    each = zip(runs, labels(runs), ends, strict=True)
    return [f"{name} k={run['drafter']['k']}{end}" for run, name, end in each]
