"""From a question to its record: skip what is finished, run what is not, judge, compute, store."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from specbench import guards, losslessness, metrics, provenance, record, tracking
from specbench.analysis import analyse
from specbench.comparison import Arm, Outcome, Progress, Settings, compare
from specbench.drafting import Request
from specbench.errors import ConfigError, RunError
from specbench.guards import Flag
from specbench.load import MachineLoad
from specbench.model import CausalLM
from specbench.prompts import PromptSet
from specbench.second_look import SecondLook, look_again
from specbench.tracking import Guarded, Pulse, Tracker

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cell:
    """One method to measure, with the configuration that asks for it (JSON-able; its hash names the record)."""

    arm: Arm
    config: Mapping[str, Any]

    def describe_drafter(self) -> dict[str, Any]:
        """Facts of the drafter; none if it could not even be bound to the target."""
        return {} if self.arm.error is not None else self.arm.drafter.describe()


@dataclass(frozen=True)
class Plan:
    """Cells to run together, interleaved, against one baseline. study: the experiment or sweep they are part of.
    choices: of the groups of the configuration, by name, for the record."""

    target: CausalLM
    prompts: PromptSet
    settings: Settings
    cells: Sequence[Cell]
    results_dir: Path
    force: bool = False
    profiled: int = 0  # batches on which the parts of a round are timed, after all is measured
    engines: Mapping[str, Any] | None = None  # what scripts/bench_engine.py found on this machine, if it was run
    study: str | None = None
    choices: Mapping[str, str] = field(default_factory=dict)

    def question(self, cell: Cell) -> dict[str, Any]:
        """Everything that can change this cell's result; its hash names the record."""
        return {
            "config": cell.config,
            "outside_code": provenance.outside_code(cell.config),
            "target_files": self.target.files,
            "eos_ids": sorted(self.target.eos_ids),
            "dtype": str(self.target.dtype),
            "device": self.target.device.type,
            "dataset_sha256": self.prompts.sha256,
            "drafter": cell.describe_drafter(),
        }


ShowProgress = Callable[[int, int], AbstractContextManager[Progress]]
Judge = Callable[[str, tuple[int, ...], tuple[int, ...]], losslessness.Divergence | None]


def run(plan: Plan, baseline: Arm, show_progress: ShowProgress, tracker: Guarded | None = None) -> list[dict[str, Any]]:
    """Run the plan's unfinished cells and return the ``run.json`` of every cell, in order, each with its ``folder`` and
    whether it was ``skipped``, being finished already.

    A cell that failed, or whose record cannot be stored, has status "failed" and its error; nothing is raised for it.
    ``tracker`` hears of the cells that are run, not of those that were finished before.
    """
    ids = [record.run_id(plan.question(cell)) for cell in plan.cells]
    records: dict[str, dict[str, Any]] = {}
    for id_ in ids:
        twin = None if plan.force else record.finished(plan.results_dir, id_)
        if twin is not None:
            log.info("%s", _skip_line(twin, plan.results_dir / id_))
            records[id_] = twin
    todo = {id_: cell for id_, cell in zip(ids, plan.cells, strict=True) if id_ not in records}
    if todo:
        records |= _tracked(plan, baseline, todo, show_progress, tracker or Guarded(Tracker()))
    return [{**records[id_], "folder": str(plan.results_dir / id_), "skipped": id_ not in todo} for id_ in ids]


def _tracked(
    plan: Plan, baseline: Arm, todo: Mapping[str, Cell], show_progress: ShowProgress, tracker: Guarded
) -> dict[str, dict[str, Any]]:
    """Run cells, and show each once its record is stored. How they come on is shown on the first one's page."""
    id_, cell = next(iter(todo.items()))
    with tracking.closing(tracker):
        if tracker.every is not None:
            with tracker.harmless():
                known = {**_about(plan, id_, cell, todo), "provenance": provenance.collect()}
                tracker.begin(tracking.page(known, plan.study, plan.results_dir))
        records = _run_cells(plan, baseline, todo, show_progress, Pulse(tracker, cell.arm, baseline))
        with tracker.harmless():
            for id_, found in records.items():
                tracker.begin(tracking.page(found, plan.study, plan.results_dir))
                checkpoint = todo[id_].arm.drafter.checkpoint_folder()
                tracker.end(tracking.ending(found, plan.results_dir / id_, checkpoint))
    return records


def _run_cells(
    plan: Plan, baseline: Arm, todo: Mapping[str, Cell], show_progress: ShowProgress, pulse: Pulse
) -> dict[str, dict[str, Any]]:
    started, origin, clocks = provenance.now(), provenance.collect(), provenance.clocks()
    clock = time.perf_counter()
    arms = [cell.arm for cell in todo.values()]
    turns = sum(len(c.turns) for c in plan.prompts.conversations)
    shares = (len(arms) + 1) * plan.settings.repeats
    failure: Exception | None = None
    outcome, again = Outcome([], []), SecondLook()
    load, clocks_after = MachineLoad(), clocks
    try:
        if any(arm.error is None for arm in arms):
            with load, show_progress(shares, turns) as progress:
                watch = pulse.beside(progress, replies=shares * turns)
                outcome = compare(plan.target, plan.prompts.conversations, baseline, arms, plan.settings, watch)
                clocks_after = provenance.clocks()  # while what may hold them back still does
            again = look_again(plan.target, plan.settings, baseline, arms, outcome, plan.profiled)
    except ConfigError:
        raise
    except Exception as error:  # whatever breaks is a failed run with its reason, never a lost one
        log.debug("the comparison failed", exc_info=True)
        failure = error
    judge = _judge(plan, baseline)
    records = {}
    for id_, cell in todo.items():
        common = {
            **_about(plan, id_, cell, todo),
            "provenance": {
                **origin,
                "choices": dict(plan.choices),
                "started": started,
                "ended": provenance.now(),
                "clocks": {"before": clocks, "after": clocks_after},
            },
            "wall_seconds": time.perf_counter() - clock,
            "machine_load": asdict(load),
        }
        flags = [*guards.of_clocks(clocks, clocks_after)]
        reason = failure or cell.arm.error
        steps = prompts = None
        rounds = again.rounds_of(cell.arm, baseline)
        try:
            flags += _flags(plan, cell, load, again)
        except Exception as error:
            log.debug("what is to be doubted of %s cannot be told", cell.arm.name, exc_info=True)
            reason = reason or error
        if reason is None:
            try:
                steps, prompts, results = _results(plan, baseline, cell.arm, outcome, again, judge)
                flags += guards.of_results(results, prompts)
                records[id_] = {"status": "ok", "error": None, **common, **results}
            except Exception as error:
                log.debug("judging %s failed", cell.arm.name, exc_info=True)
                reason = error
        if reason is not None:
            records[id_] = {"status": "failed", "error": f"{type(reason).__name__}: {reason}", **common}
        records[id_]["flags"] = [asdict(flag) for flag in flags]
        try:
            record.write(plan.results_dir, records[id_], steps, prompts, rounds)
            record.discard_failed(plan.results_dir, records[id_])
        except RunError as error:  # the other records may yet find room
            records[id_] = {"status": "failed", "error": str(error), **common, "flags": records[id_]["flags"]}
    return records


def _about(plan: Plan, id_: str, cell: Cell, together: Mapping[str, Cell]) -> dict[str, Any]:
    """What a record says of its cell, whatever is measured. ``together``: the cells that are interleaved."""
    return {
        "id": id_,
        "config": cell.config,
        "conventions": metrics.DEFINITIONS,
        "target": _describe_target(plan.target),
        "drafter": {"name": cell.arm.name, "k": cell.arm.k, **cell.describe_drafter()},
        "stateful_drafter": cell.arm.drafter.stateful,
        "needs_reference": cell.arm.drafter.needs_reference,
        "dataset": {"name": plan.prompts.name, "sha256": plan.prompts.sha256},
        "interleaved_with": [other.arm.name for other in together.values() if other is not cell],
    }


def _flags(plan: Plan, cell: Cell, load: MachineLoad, again: SecondLook) -> list[Flag]:
    """What is to be doubted of a cell, whatever its numbers are."""
    found = [Flag("busy-machine", message) for message in (load.warning(),) if message]
    found += [Flag("untrained", message) for message in cell.arm.drafter.warnings()]
    found += [Flag("not-seen", message) for message in again.failures.get(cell.arm, ())]
    device = plan.target.device.type
    found += guards.of_engine((cell.config.get("target") or {}).get("engine"), device)
    if plan.engines is not None and device == "cpu":
        weights = plan.target.quant or str(plan.target.dtype).removeprefix("torch.")
        found += guards.of_peers(plan.engines, weights, provenance.machine())
    return found + list(guards.of_prompts(again.surprise, plan.target.vocab_size, again.seen.get(cell.arm, ())))


def _results(
    plan: Plan, baseline: Arm, arm: Arm, outcome: Outcome, again: SecondLook, judge: Judge
) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, Any]]:
    """The raw tables and what follows from them."""
    divergences = [_divergence(judge, baseline, arm, turn.request) for turn in outcome.turns]
    prompts = pd.DataFrame(
        [
            {
                "uid": turn.request.uid,
                "conversation": turn.conversation.id,
                "category": turn.conversation.category,
                "turn": turn.number,
                "prompt": turn.prompt,
                "prompt_tokens": list(turn.request.tokens),
                "reference": turn.conversation.reference,
                **_reply(plan.target, arm, turn.request.uid, ""),
                **_reply(plan.target, baseline, turn.request.uid, "baseline_"),
                **_judged(divergence, arm.sampled),
            }
            for turn, divergence in zip(outcome.turns, divergences, strict=True)
        ]
    )
    both = {"baseline": pd.DataFrame(baseline.steps), "method": pd.DataFrame(arm.steps)}
    steps = pd.concat([table.assign(arm=name) for name, table in both.items()], ignore_index=True)
    found = analyse(steps, prompts, again.rounds_of(arm, baseline), arm.k)
    measured: dict[str, Any] = {
        **(found["metrics"] or {}),
        "lossless": losslessness.summarise(divergences, again.laws.get(arm), by_law=arm.sampled),
        "peak_memory_bytes": arm.peak_memory_bytes,
        "baseline_peak_memory_bytes": baseline.peak_memory_bytes,
        "joules_per_token": _joules_per_token(arm),
        "baseline_joules_per_token": _joules_per_token(baseline),
    }
    counts = {
        "conversations": len(plan.prompts.conversations),
        "turns": len(outcome.turns),
        "too_long": outcome.too_long,
        "smaller_batches": _smaller_batches(both["baseline"], plan.settings.batch_size),
        "changed_by_repeats": sorted(arm.changed | baseline.changed),
    }
    return steps, prompts, {"prompts": counts, **found, "metrics": measured}


def _joules_per_token(arm: Arm) -> float | None:
    """Prefill included on both sides of the division."""
    tokens = sum(row["committed"] for row in arm.steps)
    return None if arm.joules is None or not tokens else arm.joules / tokens


def _judge(plan: Plan, baseline: Arm) -> Judge:
    """How a prompt's reply is judged; one that several arms gave, as most arms round alike, is judged once."""

    @cache
    def judge(uid: str, prompt: tuple[int, ...], reply: tuple[int, ...]) -> losslessness.Divergence | None:
        plain, settings = baseline.replies[uid], plan.settings
        return losslessness.divergence(plan.target, uid, prompt, plain, reply, settings.sampling, settings.seed)

    return judge


def _divergence(judge: Judge, baseline: Arm, arm: Arm, request: Request) -> losslessness.Divergence | None:
    reply = arm.replies[request.uid]
    if not arm.sampled:
        return judge(request.uid, tuple(request.tokens), tuple(reply))
    # judged by the law of all; where the replies part is no one's fault
    place = losslessness.parting(baseline.replies[request.uid], reply)
    return None if place is None else losslessness.Divergence(place, math.nan, math.nan)


def _reply(target: CausalLM, arm: Arm, uid: str, prefix: str) -> dict[str, Any]:
    tokens = arm.replies[uid]
    return {
        f"{prefix}text": target.tokenizer.decode(tokens, skip_special_tokens=True),
        f"{prefix}tokens": tokens,
        f"{prefix}finish": arm.finish[uid],
    }


def _judged(divergence: losslessness.Divergence | None, by_law: bool) -> dict[str, Any]:
    names = ("position", "margin", "tolerance")
    if divergence is None:
        return {"lossless": "equal", **{f"divergence_{name}": None for name in names}}
    verdict = "law" if by_law else divergence.verdict
    return {"lossless": verdict, **{f"divergence_{name}": getattr(divergence, name) for name in names}}


def _smaller_batches(steps: pd.DataFrame, batch_size: int) -> int:
    return int((steps[steps["repeat"] == 0].groupby("batch")["uid"].nunique() < batch_size).sum())


def _describe_target(target: CausalLM) -> dict[str, Any]:
    return {
        "name": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "quant": target.quant,
        "engine": target.engine,
        "device": target.device.type,
        "parameters": target.parameters,
        "context": target.context,
        "files": target.files,
    }


def _skip_line(twin: Mapping[str, Any], folder: Path) -> str:
    """One line that says the cell is finished, and whether by other code or on another machine."""
    changed = provenance.differences(twin["provenance"])
    note = f"; it was made with {', '.join(changed)}: force=true runs it again" if changed else ""
    return f"{twin['drafter']['name']} k={twin['drafter']['k']} is already finished ({folder}){note}"
