"""The command line: ``python -m specbench drafter=ngram k=4``. Hydra ends in this file; below it there are objects.

Exit codes: 0 done, 1 a run failed (its record says why), 2 the configuration cannot be run.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from drafters.none import NoDrafter
from specbench import cli, progress, tables
from specbench.cli import FAILED, fail, make
from specbench.comparison import Arm, Settings
from specbench.errors import ConfigError, nearest
from specbench.model import CausalLM
from specbench.prompts import PromptSet
from specbench.runner import Cell, Plan, run
from specbench.stopping import StopRule
from specbench.tracking import Tracker

GROUPS = ("target", "drafter", "dataset", "sampling", "tracker")
WHOLE_NUMBERS = ("k", "batch_size", "max_new_tokens", "seed", "repeats", "profile")
# how a run is carried out, not what it measures; precision and device enter the record as what they resolved to
NOT_ASKED = ("results_dir", "force", "compare", "k_of", "drafter", "dtype", "device", "tracker")

SETTINGS = (*GROUPS, *WHOLE_NUMBERS, "dtype", "device", "stop", "compare", "k_of", "results_dir", "force")


def run_cells(cfg: DictConfig) -> list[dict[str, Any]]:
    """Run what the configuration asks for and print its table; returns the records."""
    for name in cfg:
        if name not in SETTINGS:
            raise ConfigError(f"{name} is no setting. {nearest(str(name), SETTINGS)}")
    for name in WHOLE_NUMBERS:
        if type(cfg[name]) is not int:
            raise ConfigError(f"{name}={cfg[name]} is not a whole number")
    for name, k in cfg.k_of.items():
        if type(k) is not int:
            raise ConfigError(f"k_of.{name}={k} is not a whole number")
    for name, kind in (("token_ids", int), ("strings", str)):
        if not OmegaConf.is_list(cfg.stop[name]) or any(type(entry) is not kind for entry in cfg.stop[name]):
            example = "[2,32000]" if kind is int else "['###','Q:']"
            raise ConfigError(f"stop.{name}={cfg.stop[name]} is no list of the right kind; write stop.{name}={example}")
    # what is cheap to refuse comes before what is slow to load
    if cfg.profile < 0:
        raise ConfigError(f"profile={cfg.profile} is negative; give the number of prompts to profile, 0 for none")
    settings = Settings(cfg.batch_size, make(cfg.sampling), cfg.seed, StopRule(cfg.max_new_tokens), cfg.repeats)
    tracker: Tracker = make(cfg.tracker)
    cells = _cells(cfg)
    prompts: PromptSet = make(cfg.dataset)
    target: CausalLM = make(cfg.target)
    for cell in cells:
        _bind(cell.arm, target)
    stop = StopRule(
        cfg.max_new_tokens,
        token_ids=target.eos_ids | frozenset(cfg.stop.token_ids),
        strings=tuple(cfg.stop.strings),
        context=target.context,
        decode=target.tokenizer.decode,
    )
    settings = replace(settings, stop=stop)
    plan = Plan(target, prompts, settings, cells, Path(cfg.results_dir), cfg.force, cfg.profile, _study())
    records = run(plan, Arm("baseline", NoDrafter(), 0), partial(progress.show, cli.err), tracker)
    _report(records, plan.results_dir)
    return records


def _study() -> str | None:
    """What the run is part of: the experiment, else the axes of the sweep, as they were typed."""
    hydra = HydraConfig.get()
    if hydra.runtime.choices.get("experiment"):
        return str(hydra.runtime.choices["experiment"])
    if hydra.mode == RunMode.MULTIRUN:
        return " ".join(word for word in sys.argv[1:] if "=" in word and "," in word)
    return None


def _cells(cfg: DictConfig) -> list[Cell]:
    """The cell asked for, then those of ``compare``, each with the configuration that is its own question."""
    choices = HydraConfig.get().runtime.choices
    shared = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(shared, dict)
    asked = {str(key): value for key, value in shared.items() if key not in NOT_ASKED}
    asked["target"] = {key: value for key, value in asked["target"].items() if key not in NOT_ASKED}
    cells = []
    for name, drafter_config in [(str(choices["drafter"]), cfg.drafter), *cfg.compare.items()]:
        drafter = make(drafter_config)
        # a drafter that drafts nothing is the same cell at every k
        asked_k = cfg.k_of.get(name, cfg.k)
        k = min(asked_k, 0) if drafter.max_k == 0 else asked_k
        config = {**asked, "k": k, "drafter": OmegaConf.to_container(drafter_config, resolve=True)}
        cells.append(Cell(Arm(name, drafter, k), config))
    return cells


def _bind(arm: Arm, target: CausalLM) -> None:
    """Bind a drafter. One that does not fit is a wrong question; one that breaks is a failed run among others."""
    try:
        arm.bind(target)
    except ConfigError:
        raise
    except Exception as error:
        arm.fail(error)


def _report(records: list[dict[str, Any]], results_dir: Path) -> None:
    cli.out.print(" · ".join(tables.title(records)), style="bold", highlight=False, soft_wrap=True)
    cli.out.print(tables.terminal(records))
    for record in records:
        if record["status"] != "ok":
            fail(f"{record['drafter']['name']} failed: {record['error']}", FAILED)
    if len(records) == 1 and records[0]["status"] == "ok":
        cli.out.print(tables.terminal_by_category(records[0]))
    for note in dict.fromkeys([*tables.flags(records), *(note for record in records for note in _notes(record))]):
        cli.out.print(f"Note: {note}.", soft_wrap=True, highlight=False)
    cli.out.print(records[0]["folder"] if len(records) == 1 else str(results_dir), soft_wrap=True, highlight=False)


def _notes(run_json: dict[str, Any]) -> list[str]:
    notes: list[str] = []
    prompts = run_json.get("prompts")
    if prompts is None:  # it failed
        return notes
    if prompts["too_long"]:
        few = ", ".join([*prompts["too_long"][:3], *["…"][: len(prompts["too_long"]) > 3]])
        notes.append(f"prompts left out as they do not fit the context: {len(prompts['too_long'])} ({few})")
    if prompts["smaller_batches"]:
        notes.append(f"batches with fewer prompts than batch_size (see dataset.limit): {prompts['smaller_batches']}")
    if run_json["stateful_drafter"]:
        notes.append(f"{run_json['drafter']['name']} learns from earlier prompts: its numbers depend on their order")
    return notes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return cli.run_command(
        "config", lambda cfg: any(record["status"] != "ok" for record in run_cells(cfg)), SETTINGS, arguments
    )


if __name__ == "__main__":
    sys.exit(main())
