"""A sweep as its user sees it: the grid and its time before it starts, a line for each cell, one table at the end."""

import itertools
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drafters.none import NoDrafter
from specbench import cli, configured, record, summary, tables
from specbench.comparison import WARM_UP_TEXT
from specbench.configured import Done
from specbench.decoding import decode
from specbench.drafting import Request
from specbench.model import CausalLM
from specbench.profiling import BRIEF
from specbench.sampling import Sampling
from specbench.stopping import StopRule

PRECISION = ("dtype", "device")  # of the target; a record's configuration has them as what they resolved to
PROBE = 16  # new tokens by which plain decoding's pace is told


@dataclass(frozen=True)
class Point:
    """A point of the grid: cells that are measured together. overrides: what makes it this point."""

    overrides: tuple[str, ...]
    cfg: DictConfig
    cells: Mapping[str, str]  # what each is called, by what it asks
    left_out: Sequence[str]

    @property
    def target(self) -> str:
        """Points of one target can share it."""
        return OmegaConf.to_yaml(self.cfg.target, resolve=True)


def point(overrides: Sequence[str], cfg: DictConfig, drafter: str) -> Point:
    """A point of the grid. Raises ConfigError for one that cannot be run."""
    configured.check(cfg)
    asked = configured.cells_of(cfg, drafter, lenient=True)
    precision = {name: str(cfg.target.get(name, "")) for name in PRECISION}
    cells = {_key(cell.config, precision): f"{cell.arm.name} k={cell.arm.k}" for cell in asked.cells}
    return Point(tuple(overrides), cfg, cells, asked.left_out)


class Sweep:
    """Points to be run, in an order in which those of a target follow each other, and what came of them."""

    def __init__(self, points: Sequence[Point]):
        self._axes = _axes(points)
        self.points, self._left_out = self._distinct(points)
        self._known = {key for folder in {str(p.cfg.results_dir) for p in points} for key in _finished(Path(folder))}
        self._records: list[Mapping[str, Any]] = []
        self._refused: list[str] = []
        self._turns: dict[str, int] = {}  # of each set of prompts
        self._left = [p for p in self.points if self._todo(p)]
        self._seconds, self._rounds = 0.0, 0
        self._clock = time.perf_counter()

    def _count(self, found: Point) -> int:
        """Rounds of all arms, were each as slow as plain decoding; the profile's are among them. Of prompts that
        cannot be had there are none; the run says why."""
        cfg = found.cfg
        asked = OmegaConf.to_yaml(cfg.dataset, resolve=True)
        if asked not in self._turns:
            try:
                conversations = configured.prompts_of(cfg.dataset).conversations
                self._turns[asked] = sum(len(conversation.turns) for conversation in conversations)
            except Exception:
                self._turns[asked] = 0
        measured = math.ceil(self._turns[asked] / cfg.batch_size) * cfg.max_new_tokens * cfg.repeats
        return (len(found.cells) + 1) * (measured + 2 * cfg.profile * min(BRIEF, cfg.max_new_tokens))

    def _todo(self, found: Point) -> bool:
        return bool(found.cfg.force) or not found.cells.keys() <= self._known

    def announce(self) -> None:
        """Say what the grid is, what is left out, what is finished already, and how long the rest will take."""
        for name, values in self._axes.items():
            _say(f"{name}: {', '.join(values)}")
        for line in self._left_out:
            _say(f"left out: {line}")
        total = sum(len(found.cells) for found in self.points)
        finished = sum(key in self._known for p in self.points if not p.cfg.force for key in p.cells)
        _say(f"{total} cells in {len(self.points)} runs" + f", {finished} of them finished already" * bool(finished))
        try:
            told = self._estimate()
        except Exception:  # whatever it is, the run that meets it says so
            told = "how long they take is told after the first"
        if told:
            _say(told)
        self._clock = time.perf_counter()

    def _estimate(self) -> str:
        """In words, by a look at how fast plain decoding of the first target is."""
        if not self._left:
            return ""
        first = [p for p in self._left if p.target == self._left[0].target]
        target = configured.target_of(first[0].cfg.target)
        pace = {size: _pace(target, size) for size in {p.cfg.batch_size for p in first}}
        seconds = sum(self._count(p) * pace[p.cfg.batch_size] for p in first)
        others = len(self._left) - len(first)
        what = f"about {duration(seconds)}" + f" for {target.name}; {others} runs are of other targets" * bool(others)
        return f"{what}, were every drafter as fast as plain decoding"

    def waves(self) -> Iterator[list[Point]]:
        """The points, in portions to be launched at once: no cell is in two of a portion, to be measured twice, unless
        it is finished by then."""
        left, finished = list(self.points), set(self._known)
        while left:
            wave: list[Point] = []
            later: list[Point] = []
            begun: set[str] = set()
            for found in left:
                unfinished = set(found.cells) if found.cfg.force else found.cells.keys() - finished
                if begun.isdisjoint(unfinished):
                    wave.append(found)
                    begun |= unfinished
                else:
                    later.append(found)
            yield wave
            left, finished = later, finished | begun

    def tell_stored(self, found: Point) -> None:
        """What is stored of a point whose process is gone, which may have come so far."""
        stored = {} if found.cfg.force else _finished(Path(found.cfg.results_dir))
        there = [stored[key] for key in found.cells if key in stored]
        if there:
            self.tell(found, Done(there), ahead=False)
        if len(there) < len(found.cells):
            self.tell(found, None, ahead=False)

    def tell(self, found: Point, done: Done | None, ahead: bool = True) -> None:
        """What came of a point; None if it could not be run, which has been said. ``ahead``: and how long the others
        will take, if points are run one after another."""
        now = time.perf_counter()
        if found in self._left:
            self._left.remove(found)
            self._seconds, self._rounds = self._seconds + now - self._clock, self._rounds + self._count(found)
        self._clock = now
        if done is None:
            self._refused.append(" ".join(f"{axis}={value}" for axis, value in self._place(found).items()))
            return
        for line in done.left_out:
            _say(f"left out: {line}")
        for run in done.records:
            self._records.append(run)
            if not run["skipped"]:  # else a line has said so
                _say(f"{self._called(found, run)}: {_outcome(run)}", style="red" if run["status"] != "ok" else None)
        if ahead and self._left and self._rounds:
            remaining = self._seconds / self._rounds * sum(map(self._count, self._left))
            _say(f"{len(self._left)} runs to go, about {duration(remaining)}", style="dim")

    def _called(self, found: Point, run: Mapping[str, Any]) -> str:
        """What tells a cell from the others."""
        rest = [f"{axis}={value}" for axis, value in self._place(found).items() if axis not in ("drafter", "k")]
        return " ".join([run["drafter"]["name"], f"k={run['drafter']['k']}", *rest])

    def _place(self, found: Point) -> dict[str, str]:
        """Of a point in the grid."""
        values = dict(override.lstrip("+").split("=", 1) for override in found.overrides)
        return {axis: values[axis] for axis in self._axes if axis in values}

    def _distinct(self, points: Sequence[Point]) -> tuple[list[Point], list[str]]:
        """Points that each have a cell of their own, those of a target together; and what is left out, in words."""
        seen: set[str] = set()
        kept, left_out = [], [line for found in points for line in found.left_out]
        order = list(dict.fromkeys(found.target for found in points))
        for found in sorted(points, key=lambda p: order.index(p.target)):
            if found.cells.keys() <= seen:
                place = " ".join(f"{axis}={value}" for axis, value in self._place(found).items())
                left_out += [f"{place}: the same as {name}" for name in found.cells.values()]
            else:
                kept.append(found)
            seen |= found.cells.keys()
        return kept, list(dict.fromkeys(left_out))

    def conclude(self) -> None:
        """The table of each setting, as if all had been one run."""
        distinct = list({run["folder"]: run for run in self._records}.values())
        for group in tables.by_setting(distinct):
            _say("")
            summary.show(group, Path(group[0]["folder"]).parent)
        for place in self._refused:
            _say(f"could not be run, for the reason above: {place}", style="red")


def _axes(points: Iterable[Point]) -> dict[str, list[str]]:
    """The settings that vary, with their values in order."""
    values: dict[str, dict[str, None]] = {}
    for found in points:
        for override in found.overrides:
            name, _, value = override.partition("=")
            values.setdefault(name.lstrip("+"), {})[value] = None
    return {name: list(each) for name, each in values.items() if len(each) > 1}


def _finished(folder: Path) -> dict[str, dict[str, Any]]:
    """The finished records in ``folder`` by what they answer, be it that they were asked for what they have or for
    ``auto``."""
    found: dict[str, dict[str, Any]] = {}
    for path in folder.glob(f"*/{record.RUN}"):
        run = record.finished(folder, path.parent.name)
        if run is not None:
            for named in itertools.product(*((run["target"][name], "auto", "") for name in PRECISION)):
                key = _key(run["config"], dict(zip(PRECISION, named, strict=True)))
                found[key] = {**run, "folder": str(path.parent), "skipped": False}
    return found


def _key(config: Mapping[str, Any], precision: Mapping[str, str]) -> str:
    """What a cell asks, before it is known what ``auto`` comes to."""
    return json.dumps([config, precision], sort_keys=True)


def _pace(target: CausalLM, batch_size: int) -> float:
    """Seconds of a round of plain decoding."""
    drafter = NoDrafter()
    drafter.bind(target)
    tokens = target.tokenizer(WARM_UP_TEXT).input_ids
    asked = [Request(f"pace-{row}", tokens) for row in range(batch_size)]
    steps = decode(target, drafter, asked, 0, Sampling(), 0, StopRule(PROBE, context=target.context))
    seconds = sorted(step.seconds for step in steps if step.round)
    return seconds[len(seconds) // 2]


def _outcome(run: Mapping[str, Any]) -> str:
    if run["status"] != "ok":
        return f"failed: {run['error']}"
    metrics = run["metrics"]
    interval = metrics["speedup_ci95"]
    limits = f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else ""
    speedup, tokens = tables.show(metrics["speedup"], "{:.2f}x"), tables.show(metrics["tokens_per_pass"], "{:.2f}")
    return f"{speedup}{limits}, {tokens} tokens per pass, {metrics['lossless']['verdict']}"


def duration(seconds: float) -> str:
    """In words.

    >>> duration(40), duration(600), duration(5000)
    ('1 min', '10 min', '1 h 23 min')
    """
    minutes = max(1, round(seconds / 60))
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _say(line: str, style: str | None = None) -> None:
    cli.out.print(line, style=style, highlight=False, soft_wrap=True)
