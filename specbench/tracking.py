"""Where runs are shown besides their records: one page per record, made from the record.

A tracker may neither change nor fail a run, nor slow it: it hears of progress between rounds, when no clock runs, and
of results when they are stored; its first error is a line, and its last word.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a tracker needs no torch
    from specbench.comparison import Arm, Progress
    from specbench.decoding import Step

log = logging.getLogger(__name__)

Scalar = bool | int | float | str
NAME, TAG = 128, 64  # characters that a name or group, and a tag, may have


@dataclass(frozen=True)
class Page:
    """What is known of a run before it begins.

    id: the record's, so that a page sent again takes the place of the one before. job: what kind of run, for a
    benchmark the drafter's family. group: what it is part of. config: JSON-able. folder: where a tracker may keep
    files.
    """

    id: str
    name: str
    job: str
    group: str | None
    config: Mapping[str, Any]
    tags: Sequence[str]
    folder: Path


@dataclass(frozen=True)
class Table:
    """Rows of numbers and words under named columns; None where something is not known."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Scalar | None]]


@dataclass(frozen=True)
class Artifact:
    """All files of a folder, kept under a name; ``kind``: record or checkpoint."""

    name: str
    kind: str
    folder: Path


@dataclass(frozen=True)
class Ending:
    """How a run ended. error: why it failed. record: the folder that its figures can be drawn from."""

    numbers: Mapping[str, Scalar] = field(default_factory=dict)
    tables: Mapping[str, Table] = field(default_factory=dict)
    artifacts: Sequence[Artifact] = ()
    record: Path | None = None
    error: str | None = None


class Tracker:
    """Shows pages, one after another: ``begin``, rows of ``log``, ``end``. This one shows them nowhere.

    every: seconds, at least, between rows of progress while a run is measured; None if it wants none.
    """

    every: float | None = None

    def begin(self, page: Page) -> None:
        """Open a page."""

    def log(self, row: Mapping[str, float], step: int | None = None) -> None:
        """Add a row to the open page, at ``step`` of the run or after the row before. Must not wait."""

    def end(self, ending: Ending) -> None:
        """Complete the open page, and close it."""


class Guarded(Tracker):
    """A tracker that can do no harm: its first error is a line, after which nothing is tracked."""

    def __init__(self, tracker: Tracker):
        self._tracker, self._open = tracker, ""
        self.every = tracker.every

    @contextmanager
    def harmless(self) -> Iterator[None]:
        """Whatever goes wrong in the block is the tracker's last word."""
        try:
            yield
        except Exception as error:
            self._tracker = Tracker()
            log.debug("the tracker failed", exc_info=True)
            log.warning("no longer tracked: %s; the run goes on", str(error) or type(error).__name__)

    def begin(self, page: Page) -> None:
        """Open a page, if it is not open already."""
        if self._open != page.id:
            self._open = page.id
            with self.harmless():
                self._tracker.begin(page)

    def log(self, row: Mapping[str, float], step: int | None = None) -> None:
        """Add a row to the open page, if there is one."""
        if self._open:
            with self.harmless():
                self._tracker.log(row, step)

    def end(self, ending: Ending) -> None:
        """Complete the open page, if there is one."""
        if self._open:
            self._open = ""
            with self.harmless():
                self._tracker.end(ending)


class Pulse:
    """Tells a tracker, every few seconds while arms are compared, how far they are and how fast the method is."""

    def __init__(self, tracker: Tracker, method: "Arm", baseline: "Arm"):
        self._tracker, self._method = tracker, method
        self._prefix = {id(method): "", id(baseline): "baseline_"}
        self._recent: dict[str, _Sums] = {}
        self._whole, self._replies, self._of = _Sums(), 0, 0

    def beside(self, progress: "Progress", replies: int) -> "Progress":
        """A callback for ``compare`` that does this besides ``progress``; ``replies``: how many are to come in all."""
        if self._tracker.every is None:
            return progress
        self._of = replies
        self._began = self._told = time.monotonic()

        def both(arm: "Arm", step: "Step") -> None:
            progress(arm, step)
            self._add(arm, step, every)

        every = self._tracker.every
        return both

    def _add(self, arm: "Arm", step: "Step", every: float) -> None:
        self._replies += sum(reason is not None for reason in step.finish)
        prefix = self._prefix.get(id(arm))
        if step.round and prefix is not None:
            self._recent.setdefault(prefix, _Sums()).add(step)
            if arm is self._method:
                self._whole.add(step)
        now = time.monotonic()
        if now - self._told >= every:
            self._told = now
            self._tracker.log(self._row(now))

    def _row(self, now: float) -> dict[str, float]:
        row = {"live/seconds": now - self._began, "live/replies": self._replies, "live/replies_of": self._of}
        row |= {f"live/{prefix}tokens_per_s": sums.tokens / sums.seconds for prefix, sums in self._recent.items()}
        if self._whole.passes:
            row["live/tokens_per_pass"] = self._whole.tokens / self._whole.passes
        self._recent = {}
        return row


@dataclass
class _Sums:
    """Over rounds: committed tokens, (row, verify pass) pairs, seconds."""

    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0

    def add(self, step: "Step") -> None:
        self.tokens += sum(map(len, step.committed))
        self.passes += len(step.rows)
        self.seconds += step.seconds


@contextmanager
def closing(tracker: Tracker) -> Iterator[None]:
    """Whatever ends the block before its time is said on the page that is open then."""
    try:
        yield
    except BaseException as error:
        tracker.end(Ending(error=f"{type(error).__name__}: {error}"))
        raise


def page(run: Mapping[str, Any], study: str | None, folder: Path) -> Page:
    """Of a record, or of what is known of one before it is measured: id, config, target, drafter, dataset, provenance.

    ``study``: the experiment or sweep it is part of. ``folder``: that of all records.
    """
    drafter, origin = run["drafter"], run["provenance"]
    commit = (origin["git"] or {}).get("commit")
    facts = {name: run[name] for name in ("drafter", "target", "dataset")}
    facts |= {name: origin[name] for name in ("machine", "packages", "code_sha256")}
    return Page(
        id=run["id"],
        name=_cut(f"{drafter['name']} k={drafter['k']} {run['target']['name']}", f" {run['id'][:4]}"),
        job=drafter["name"][:TAG],
        group=study and _cut(study),
        config={**run["config"], "id": run["id"], "git_commit": commit, "facts": facts},
        tags=tags(drafter["name"], origin),
        folder=folder,
    )


def _cut(name: str, end: str = "") -> str:
    """A name that is not too long, with its ``end``; what is left out of it shows."""
    room = NAME - len(end)
    return (name if len(name) <= room else f"{name[: room - 1]}…") + end


def tags(family: str, origin: Mapping[str, Any]) -> list[str]:
    """The family, the commit, and whether there were changes on top of it."""
    git = origin["git"] or {"commit": "", "uncommitted_sha256": None}
    changed = "uncommitted changes" if git["uncommitted_sha256"] else ""
    return [tag for tag in (family[:TAG], git["commit"][:12], changed) if tag]


def ending(run: Mapping[str, Any], folder: Path, checkpoint: Path | None = None) -> Ending:
    """Of a record that lies in ``folder``. ``checkpoint``: where the drafter's weights were read from."""
    artifacts = [Artifact(f"record-{run['id']}", "record", folder)]
    if checkpoint is not None:
        artifacts.append(Artifact(f"checkpoint-{run['drafter']['name']}", "checkpoint", checkpoint))
    return Ending(numbers(run), tables(run), artifacts, folder, run["error"])


def numbers(run: Mapping[str, Any]) -> dict[str, Scalar]:
    """Every single number and word of a record's results, by its name in run.json: ``metrics`` under their own, the
    others behind that of their part, as in ``model/bound``; of an interval its ends, ``_low`` and ``_high``. What is
    not known is left out."""
    parts = {name: run.get(name) or {} for name in ("model", "prompts", "machine_load")}
    found = {"status": run["status"], "error": run["error"], "wall_seconds": run["wall_seconds"]}
    found["flags"] = ", ".join(dict.fromkeys(flag["flag"] for flag in run["flags"]))
    return dict(_flat({**found, **(run.get("metrics") or {}), **parts}))


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Scalar]]:
    for key, value in values.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}/")
        elif isinstance(value, Scalar):
            yield name, value
        elif name.endswith("_ci95") and value is not None:
            yield from zip((f"{name}_low", f"{name}_high"), value, strict=True)


def tables(run: Mapping[str, Any]) -> dict[str, Table]:
    """What of a record's results has rows: acceptance by position, how many passes accepted how many drafts, metrics by
    category, and the prediction by draft length."""
    measured = run.get("metrics") or {}
    found = {}
    if "acceptance_by_position" in measured:
        joint, conditional = (measured["acceptance_by_position"][name] for name in ("joint", "conditional"))
        rows = [[i, *both] for i, both in enumerate(zip(joint, conditional, strict=True), start=1)]
        found["acceptance_by_position"] = Table(["position", "joint", "conditional"], rows)
    if "accepted_length_histogram" in measured:
        rows = [[accepted, count] for accepted, count in enumerate(measured["accepted_length_histogram"])]
        found["accepted_length_histogram"] = Table(["accepted", "passes"], rows)
    categories = {name: dict(_flat(values)) for name, values in (run.get("by_category") or {}).items()}
    found["by_category"] = _table("category", categories)
    found["prediction_by_k"] = _table("k", {row["k"]: row for row in (run.get("model") or {}).get("by_k", ())})
    return {name: table for name, table in found.items() if table.rows}


def _table(first: str, by: Mapping[Any, Mapping[str, Any]]) -> Table:
    """A row for each key, named in column ``first``, with all that any of the rows holds."""
    others = [name for name in dict.fromkeys(name for values in by.values() for name in values) if name != first]
    return Table([first, *others], [[key, *(values.get(name) for name in others)] for key, values in by.items()])
