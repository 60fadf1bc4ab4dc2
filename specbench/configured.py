"""From a configuration to records: checked first, then made, then run. Hydra ends here; below there are objects."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drafters.none import NoDrafter
from specbench import cli, progress
from specbench.cli import make
from specbench.comparison import Arm, Settings
from specbench.errors import ConfigError, nearest
from specbench.model import CausalLM
from specbench.prompts import PromptSet
from specbench.runner import Cell, Plan, run
from specbench.stopping import StopRule
from specbench.tracking import Guarded

GROUPS = ("target", "drafter", "dataset", "sampling", "tracker")
WHOLE_NUMBERS = ("k", "batch_size", "max_new_tokens", "seed", "repeats", "profile")
# how a run is carried out, not what it measures; precision and device enter the record as what they resolved to
NOT_ASKED = ("results_dir", "force", "compare", "k_of", "drafter", "dtype", "device", "engine_benchmark", "tracker")

SETTINGS = (
    *GROUPS,
    *WHOLE_NUMBERS,
    *("dtype", "device", "stop", "compare", "k_of", "results_dir", "force", "engine_benchmark"),
)


class Latest:
    """What was made last, so that the cells of a sweep share it: models take long to load. It is let go of before
    another is made, since two may not fit into memory."""

    def __init__(self, make: Callable[[DictConfig], Any] = make) -> None:
        self._make = make
        self._made: Any = None
        self._asked = ""

    def __call__(self, config: DictConfig) -> Any:
        """What ``config`` describes."""
        asked = OmegaConf.to_yaml(config, resolve=True)
        if asked != self._asked:
            self.forget()
            self._made, self._asked = self._make(config), asked
        return self._made

    def forget(self) -> None:
        """Let go of it."""
        self._made, self._asked = None, ""


target_of, prompts_of = Latest(), Latest()
tracker_of = Latest(lambda config: Guarded(make(config)))  # one that failed is not tried again by the next cell


@dataclass(frozen=True)
class Asked:
    """The cells that a configuration asks for, and those it cannot have, a line for each."""

    cells: list[Cell]
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Done:
    """What came of a configuration: the record of each cell, in order, and what was left out."""

    records: list[dict[str, Any]]
    left_out: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether any cell failed."""
        return any(found["status"] != "ok" for found in self.records)


def check(cfg: DictConfig) -> Settings:
    """Refuse what can be refused before anything slow is loaded. Raises ConfigError."""
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
    if cfg.profile < 0:
        raise ConfigError(f"profile={cfg.profile} is negative; give the number of prompts to profile, 0 for none")
    return Settings(cfg.batch_size, make(cfg.sampling), cfg.seed, StopRule(cfg.max_new_tokens), cfg.repeats)


def cells_of(cfg: DictConfig, drafter: str, lenient: bool = False) -> Asked:
    """The cell asked for, of the drafter of that name, then those of ``compare``, each with the configuration that is
    its own question.

    A draft length that a drafter cannot draft is refused with a ConfigError; if ``lenient``, as the points of a grid
    are not chosen one by one, its cell is left out.
    """
    shared = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(shared, dict)
    asked = {str(key): value for key, value in shared.items() if key not in NOT_ASKED}
    asked["target"] = {key: value for key, value in asked["target"].items() if key not in NOT_ASKED}
    found = Asked([])
    for name, drafter_config in [(drafter, cfg.drafter), *cfg.compare.items()]:
        made = make(drafter_config)
        # a drafter that drafts nothing is the same cell at every k
        asked_k = cfg.k_of.get(name, cfg.k)
        k = min(asked_k, 0) if made.max_k == 0 else asked_k
        config = {**asked, "k": k, "drafter": OmegaConf.to_container(drafter_config, resolve=True)}
        if lenient and made.max_k is not None and k > made.max_k:
            found.left_out.append(_beyond(name, k, made.max_k))
        else:
            found.cells.append(Cell(Arm(name, made, k), config))
    return found


def run_cells(cfg: DictConfig, choices: Mapping[str, Any], lenient: bool = False, study: str | None = None) -> Done:
    """Run what ``cfg`` asks for (see ``cells_of``). Raises ConfigError for what cannot be run. ``choices``: of each
    group of the configuration, by name; ``study``: the experiment or sweep that it is part of."""
    settings = check(cfg)
    tracker: Guarded = tracker_of(cfg.tracker)
    asked, engines = cells_of(cfg, str(choices["drafter"]), lenient), _engines(cfg.engine_benchmark)
    prompts: PromptSet = prompts_of(cfg.dataset)
    target: CausalLM = target_of(cfg.target)
    cells = []
    for cell in asked.cells:
        _bind(cell.arm, target, lenient)
        if lenient and cell.arm.beyond:  # which some know only now
            asked.left_out.append(_beyond(cell.arm.name, cell.arm.k, cell.arm.drafter.max_k))
        else:
            cells.append(cell)
    if not cells:
        return Done([], asked.left_out)
    stop = StopRule(
        cfg.max_new_tokens,
        token_ids=target.eos_ids | frozenset(cfg.stop.token_ids),
        strings=tuple(cfg.stop.strings),
        context=target.context,
        decode=target.tokenizer.decode,
    )
    plan = Plan(
        target,
        prompts,
        replace(settings, stop=stop),
        cells,
        Path(cfg.results_dir),
        cfg.force,
        profiled=cfg.profile,
        engines=engines,
        study=study,
        choices={group: str(choice) for group, choice in choices.items() if choice is not None and "/" not in group},
    )
    records = run(plan, Arm("baseline", NoDrafter(), 0), partial(progress.show, cli.err), tracker)
    return Done(records, asked.left_out)


def _bind(arm: Arm, target: CausalLM, lenient: bool) -> None:
    """Bind a drafter. One that does not fit is a wrong question, or in a grid, where it may fit elsewhere, a failed run
    among others, as is one that breaks, or whose facts a record cannot hold."""
    try:
        arm.bind(target)
        json.dumps(arm.drafter.describe())
    except ConfigError as error:
        if not lenient:
            raise
        arm.fail(error)
    except Exception as error:
        arm.fail(error)


def _beyond(name: str, k: int, most: int | None) -> str:
    return f"{name} k={k}: it drafts {most} at most"


def _engines(paths: str | Sequence[str] | None) -> Mapping[str, Any] | None:
    """What scripts/bench_engine.py has written, by the first of the paths that there is."""
    asked = [paths] if isinstance(paths, str) else paths or ()
    path = next((path for path in asked if Path(path).exists()), None)
    if path is None:
        return None
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        known = isinstance(found["compared"], dict) and found["provenance"]["machine"]["cpu"]
    except (OSError, ValueError, KeyError, TypeError):
        known = None
    if not known:
        raise ConfigError(
            f"engine_benchmark={path} is not what scripts/bench_engine.py writes; make bench-engine makes it anew, and "
            "engine_benchmark=null does without"
        )
    return found
