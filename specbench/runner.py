"""From a question to its record: skip what is finished, run what is not, judge, compute, store."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from specbench import losslessness, metrics, provenance, record
from specbench.comparison import Arm, Outcome, Progress, Settings, compare
from specbench.errors import RunError
from specbench.model import CausalLM
from specbench.prompts import PromptSet

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
    """Cells to run together, interleaved, against one baseline."""

    target: CausalLM
    prompts: PromptSet
    settings: Settings
    cells: Sequence[Cell]
    results_dir: Path
    force: bool = False

    def question(self, cell: Cell) -> dict[str, Any]:
        """Everything that can change this cell's result."""
        return {
            "config": cell.config,
            "target_files": self.target.files,
            "dtype": str(self.target.dtype),
            "device": self.target.device.type,
            "dataset_sha256": self.prompts.sha256,
            "drafter": cell.describe_drafter(),
        }


ShowProgress = Callable[[int, int], AbstractContextManager[Progress]]


def run(plan: Plan, baseline: Arm, show_progress: ShowProgress) -> list[dict[str, Any]]:
    """Run the plan's unfinished cells and return the ``run.json`` of every cell, in order, each with its ``folder``.

    A cell that failed has status "failed" and its error; nothing is raised for it. Raises RunError only if a record
    cannot be stored.
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
        records |= _run_cells(plan, baseline, todo, show_progress)
    return [{**records[id_], "folder": str(plan.results_dir / id_)} for id_ in ids]


def _run_cells(
    plan: Plan, baseline: Arm, todo: Mapping[str, Cell], show_progress: ShowProgress
) -> dict[str, dict[str, Any]]:
    started, origin = provenance.now(), provenance.collect()
    clock = time.perf_counter()
    arms = [cell.arm for cell in todo.values()]
    turns = sum(len(c.turns) for c in plan.prompts.conversations)
    failure: Exception | None = None
    outcome = Outcome([], [])
    try:
        with show_progress(len(arms) + 1, turns) as progress:
            outcome = compare(plan.target, plan.prompts.conversations, baseline, arms, plan.settings, progress)
    except RunError as error:
        failure = error
    records = {}
    for id_, cell in todo.items():
        common = {
            "id": id_,
            "config": cell.config,
            "conventions": metrics.DEFINITIONS,
            "target": _describe_target(plan.target),
            "drafter": {"name": cell.arm.name, "k": cell.arm.k, **cell.describe_drafter()},
            "stateful_drafter": cell.arm.drafter.stateful,
            "dataset": {"name": plan.prompts.name, "sha256": plan.prompts.sha256},
            "interleaved_with": [arm.name for arm in arms if arm is not cell.arm],
            "provenance": {**origin, "started": started, "ended": provenance.now()},
            "wall_seconds": time.perf_counter() - clock,
        }
        reason = failure or cell.arm.error
        if reason is not None:
            run_json = {"status": "failed", "error": f"{type(reason).__name__}: {reason}", **common}
            record.write(plan.results_dir, run_json)
        else:
            steps, prompts, results = _results(plan, baseline, cell.arm, outcome)
            run_json = {"status": "ok", "error": None, **common, **results}
            record.write(plan.results_dir, run_json, steps, prompts)
        records[id_] = run_json
    return records


def _results(
    plan: Plan, baseline: Arm, arm: Arm, outcome: Outcome
) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, Any]]:
    """The raw tables and what follows from them."""
    ours, theirs = pd.DataFrame(arm.steps), pd.DataFrame(baseline.steps)
    category = {turn.request.uid: turn.conversation.category for turn in outcome.turns}
    divergences = [_divergence(plan, baseline, arm, turn.request.uid, turn.request.tokens) for turn in outcome.turns]
    computed = metrics.compute(ours, theirs, arm.k)
    results = {
        "prompts": {
            "conversations": len(plan.prompts.conversations),
            "turns": len(outcome.turns),
            "too_long": outcome.too_long,
            "smaller_batches": _smaller_batches(outcome, plan.settings.batch_size),
        },
        "metrics": {
            **computed,
            "lossless": losslessness.summarise(divergences),
            "peak_memory_bytes": arm.peak_memory_bytes,
        },
        "by_category": metrics.by_category(ours, theirs, category, arm.k),
    }
    prompts = pd.DataFrame(
        [
            {
                "uid": turn.request.uid,
                "conversation": turn.conversation.id,
                "category": turn.conversation.category,
                "turn": turn.number,
                "batch": turn.batch,
                "prompt": turn.prompt,
                "prompt_tokens": list(turn.request.tokens),
                "reference": turn.conversation.reference,
                **_reply(plan.target, arm, turn.request.uid, ""),
                **_reply(plan.target, baseline, turn.request.uid, "baseline_"),
                **_judged(divergence),
            }
            for turn, divergence in zip(outcome.turns, divergences, strict=True)
        ]
    )
    steps = pd.concat([theirs.assign(arm="baseline"), ours.assign(arm="method")], ignore_index=True)
    return steps, prompts, results


def _divergence(plan: Plan, baseline: Arm, arm: Arm, uid: str, prompt: Sequence[int]) -> losslessness.Divergence | None:
    settings = plan.settings
    return losslessness.first_divergence(
        plan.target, uid, prompt, baseline.replies[uid], arm.replies[uid], settings.sampling, settings.seed
    )


def _reply(target: CausalLM, arm: Arm, uid: str, prefix: str) -> dict[str, Any]:
    tokens = arm.replies[uid]
    return {
        f"{prefix}text": target.tokenizer.decode(tokens, skip_special_tokens=True),
        f"{prefix}tokens": tokens,
        f"{prefix}finish": arm.finish[uid],
    }


def _judged(divergence: losslessness.Divergence | None) -> dict[str, Any]:
    if divergence is None:
        return {"lossless": "equal", "divergence_position": None, "divergence_margin": None}
    return {
        "lossless": divergence.verdict,
        "divergence_position": divergence.position,
        "divergence_margin": divergence.margin,
    }


def _smaller_batches(outcome: Outcome, batch_size: int) -> int:
    sizes = pd.Series([turn.batch for turn in outcome.turns]).value_counts()
    return int((sizes < batch_size).sum())


def _describe_target(target: CausalLM) -> dict[str, Any]:
    return {
        "name": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
        "parameters": target.parameters,
        "context": target.context,
        "files": target.files,
    }


def _skip_line(twin: Mapping[str, Any], folder: Path) -> str:
    """One line that says the cell is finished, and whether by other code or on another machine."""
    origin = twin["provenance"]
    differences = []
    if origin["code_sha256"] != provenance.code_sha256():
        commit = (origin["git"] or {}).get("commit")
        differences.append(
            f"by other code ({'commit ' + commit[:10] if commit else 'specbench ' + origin['specbench']})"
        )
    if origin["machine"] != provenance.machine():
        differences.append(f"on another machine ({origin['machine']['cpu']}, {origin['machine']['cores']} cores)")
    note = f", {' and '.join(differences)}; force=true runs it again" if differences else ""
    name, k = twin["drafter"]["name"], twin["drafter"]["k"]
    return f"{name} k={k} is already finished ({folder}, {origin['ended']}{note})"
