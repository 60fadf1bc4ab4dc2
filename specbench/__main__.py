"""The command line: ``python -m specbench drafter=ngram k=4``. Hydra ends in this file; below it there are objects.

Exit codes: 0 done, 1 a run failed (its record says why), 2 the configuration cannot be run.
"""

import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import transformers
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException, MissingConfigException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from drafters.none import NoDrafter
from specbench import progress, tables
from specbench.comparison import Arm, Settings
from specbench.errors import ConfigError, RunError, nearest
from specbench.model import CausalLM
from specbench.prompts import PromptSet
from specbench.runner import Cell, Plan, run
from specbench.stopping import StopRule

OK, FAILED, BAD_CONFIG = 0, 1, 2
GROUPS = ("target", "drafter", "dataset", "sampling")
WHOLE_NUMBERS = ("k", "batch_size", "max_new_tokens", "seed")
WRONG_QUESTION = (ConfigError, HydraException, OmegaConfBaseException)
# how a run is carried out, not what it measures; precision and device enter the record as what they resolved to
NOT_ASKED = ("results_dir", "force", "compare", "drafter", "dtype", "device")

SETTINGS = (*GROUPS, *WHOLE_NUMBERS, "dtype", "device", "stop", "compare", "results_dir", "force")

out, err = Console(), Console(stderr=True)


def conf_dir() -> Path:
    """The configuration files: inside the package when it was installed, beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def run_cells(cfg: DictConfig) -> list[dict[str, Any]]:
    """Run what the configuration asks for and print its table; returns the records."""
    for name in cfg:
        if name not in SETTINGS:
            raise ConfigError(f"{name} is no setting. {nearest(str(name), SETTINGS)}")
    for name in WHOLE_NUMBERS:
        if type(cfg[name]) is not int:
            raise ConfigError(f"{name}={cfg[name]} is not a whole number")
    for name, kind in (("token_ids", int), ("strings", str)):
        if not OmegaConf.is_list(cfg.stop[name]) or any(type(entry) is not kind for entry in cfg.stop[name]):
            example = "[2,32000]" if kind is int else "['###','Q:']"
            raise ConfigError(f"stop.{name}={cfg.stop[name]} is no list of the right kind; write stop.{name}={example}")
    # what is cheap to refuse comes before what is slow to load
    settings = Settings(cfg.batch_size, _make(cfg.sampling), cfg.seed, StopRule(cfg.max_new_tokens))
    cells = _cells(cfg)
    prompts: PromptSet = _make(cfg.dataset)
    target: CausalLM = _make(cfg.target)
    for cell in cells:
        _bind(cell.arm, target)
    stop = StopRule(
        cfg.max_new_tokens,
        token_ids=target.eos_ids | frozenset(cfg.stop.token_ids),
        strings=tuple(cfg.stop.strings),
        context=target.context,
        decode=target.tokenizer.decode,
    )
    plan = Plan(target, prompts, replace(settings, stop=stop), cells, Path(cfg.results_dir), cfg.force)
    records = run(plan, Arm("baseline", NoDrafter(), 0), partial(progress.show, err))
    _report(records, plan.results_dir)
    return records


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    if arguments is not None:
        sys.argv[1:] = arguments
    _quiet()
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    def task(cfg: DictConfig) -> None:
        # caught here as well as below: of a sweep the other cells go on, and Hydra adds no words of its own
        try:
            failed = any(record["status"] != "ok" for record in run_cells(cfg))
            codes.append(FAILED if failed else OK)
        except RunError as error:
            codes.append(_fail(str(error), FAILED))
        except WRONG_QUESTION as error:
            codes.append(_fail(_explain(error), BAD_CONFIG))
        except Exception:  # a bug, ours or a drafter's: say where, and let a sweep go on
            err.print_exception()
            codes.append(FAILED)

    try:
        task()
    except WRONG_QUESTION as error:
        return _fail(_explain(error), BAD_CONFIG)
    except KeyboardInterrupt:
        return _fail("interrupted; finished cells are kept, this one runs again next time", FAILED)
    return max(codes, default=OK)


def _cells(cfg: DictConfig) -> list[Cell]:
    """The cell asked for, then those of ``compare``, each with the configuration that is its own question."""
    choices = HydraConfig.get().runtime.choices
    shared = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(shared, dict)
    asked = {str(key): value for key, value in shared.items() if key not in NOT_ASKED}
    asked["target"] = {key: value for key, value in asked["target"].items() if key not in NOT_ASKED}
    cells = []
    for name, drafter_config in [(str(choices["drafter"]), cfg.drafter), *cfg.compare.items()]:
        drafter = _make(drafter_config)
        # a drafter that drafts nothing is the same cell at every k
        k = min(cfg.k, 0) if drafter.max_k == 0 else cfg.k
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


def _make(config: DictConfig) -> Any:
    try:
        return instantiate(config)
    except InstantiationException as error:
        cause = error.__cause__
        while cause is not None:
            if isinstance(cause, ConfigError | RunError):
                raise cause from error
            cause = cause.__cause__
        raise


def _report(records: list[dict[str, Any]], results_dir: Path) -> None:
    out.print(" · ".join(tables.title(records)), style="bold", highlight=False, soft_wrap=True)
    out.print(tables.terminal(records))
    for record in records:
        if record["status"] != "ok":
            _fail(f"{record['drafter']['name']} failed: {record['error']}", FAILED)
    if len(records) == 1 and records[0]["status"] == "ok":
        out.print(tables.terminal_by_category(records[0]))
    for note in dict.fromkeys(note for record in records for note in _notes(record)):
        out.print(f"Note: {note}.", soft_wrap=True, highlight=False)
    out.print(records[0]["folder"] if len(records) == 1 else str(results_dir), soft_wrap=True, highlight=False)


def _notes(run_json: dict[str, Any]) -> list[str]:
    notes = list(run_json["warnings"])
    if run_json["status"] == "ok" and run_json["metrics"]["lossless"]["verdict"] == "mismatch":
        notes.append(f"{run_json['drafter']['name']} changed the text: its speedup is not that of a lossless method")
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


def _explain(error: Exception) -> str:
    text = str(error)
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return f"{group}={name} is unknown. {nearest(name, error.options)}"
    unknown = re.match(r"Could not override '(\w+)'", text)
    if unknown:
        return f"{unknown[1]} is no setting. {nearest(unknown[1], SETTINGS)}"
    missing = re.search(r"Missing mandatory value: (\S+)", text)
    if missing:
        return f"{missing[1]} must be given: {missing[1]}=VALUE"
    return text


def _fail(message: str, code: int) -> int:
    err.print(f"specbench: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    return code


def _quiet() -> None:
    """Only our own messages; Hydra's tracebacks become our one-line errors."""
    os.environ["HYDRA_FULL_ERROR"] = "1"
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logger = logging.getLogger("specbench")
    logger.handlers = [logging.StreamHandler()]
    logger.handlers[0].setFormatter(logging.Formatter("specbench: %(message)s"))
    logger.setLevel(logging.INFO)
    logger.propagate = False


if __name__ == "__main__":
    sys.exit(main())
