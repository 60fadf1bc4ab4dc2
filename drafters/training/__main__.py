"""Train a drafter for a target.

    python -m drafters.training drafter=eagle target=smollm2

A stopped training (Ctrl-C, a signal, a crash) goes on where it was when the same command is given again. The finished
checkpoint lies in <out>/checkpoint, with a card; use it as drafter.checkpoint=FOLDER (small_lm: drafter.model=FOLDER).
Settings: conf/training.yaml.
"""

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from drafters import initial, shipped
from drafters.checkpoints import common
from drafters.checkpoints.files import Written
from drafters.training import card, corpus, start, streams, watch
from drafters.training.batches import Batches
from drafters.training.corpus import Corpus, frequencies
from drafters.training.objective import Objective
from drafters.training.trainer import STATE, Budget, Learner, Trainer
from drafters.training.validation import Validation
from specbench import cli, provenance, record, tracking
from specbench.errors import ConfigError, RunError
from specbench.model import CausalLM
from specbench.targets import resolve_device, resolve_dtype
from specbench.tracking import Artifact, Ending, Guarded, Page, Scalar, Table, Tracker

log = logging.getLogger("specbench.training")

FIT_TOKENS = 2048  # of a batch of the start by least squares


def run(cfg: DictConfig) -> None:
    """What the command line asks for."""
    tracker = Guarded(cli.make(cfg.tracker))
    with tracking.closing(tracker):
        _train(cfg, tracker)


def _train(cfg: DictConfig, tracker: Tracker) -> None:
    family = str(HydraConfig.get().runtime.choices["drafter"])
    budget = Budget(**{f.name: cfg[f.name] for f in fields(Budget)})
    if not 0 < cfg.share <= 1:
        raise ConfigError(f"share={cfg.share} is not in (0, 1]")
    if type(cfg.fit) is not int or cfg.fit < 0:
        raise ConfigError(f"fit={cfg.fit} is no number of conversations; give 0 for no start by least squares")
    if type(cfg.k) is not int or cfg.k < 1:
        raise ConfigError(f"k={cfg.k} is no whole number from 1 on")
    goal: Objective = cli.make(cfg.recipe)
    target: CausalLM = cli.make(cfg.target)
    device = resolve_device(cfg.device)
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(resolve_dtype(cfg.dtype, device), "no")
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision)
    folder = Path(str(cfg.out or corpus.default_folder(target).parent / family))
    folder.mkdir(parents=True, exist_ok=True)
    data = corpus.read(_data(cfg.data, target), target)
    drafter = _drafter(cfg, target, family)
    model = drafter.build(target)
    most = getattr(drafter.spec, "drafts", None) if hasattr(drafter, "spec") else None
    if most is not None and max(cfg.k, goal.depth) > most:
        raise ConfigError(
            f"k={cfg.k} and recipe.depth={goal.depth}: this network drafts {most} tokens at most; give less, or widen "
            "it by drafter.network"
        )
    _choose_vocabulary(model, data, target)
    learner = Learner(drafter, _trainable(model), target, goal)
    taps = (*drafter.taps, len(target.blocks))
    source = _streams(cfg, target, data, taps, folder)
    batches = Batches(target, data.conversations, source)
    training = [i for i, c in enumerate(data.conversations) if not c.held_out]
    training = training[: max(1, round(cfg.share * len(training)))]
    question = {
        "family": family,
        "data": data.sha256,
        "drafter": OmegaConf.to_container(cfg.drafter, resolve=True),
        "recipe": asdict(goal),
        "budget": {name: value for name, value in asdict(budget).items() if not name.endswith("_minutes")},
        "share": cfg.share,
        "fit": cfg.fit,
        "vocabulary": len(model.head.ids) if model.head.ids is not None else target.vocab_size,
        "precision": precision,
    }
    fit_seconds = _fit(learner, batches, training[: cfg.fit], accelerator) if not (folder / STATE).exists() else 0.0
    trainer = Trainer(learner, batches, training, budget, folder, accelerator, question)
    if trainer.finished and _same(folder / "checkpoint", question):
        cli.out.print(f"{folder / 'checkpoint'} is there already", highlight=False, soft_wrap=True)
        return
    trainer.progress.fit_seconds += fit_seconds
    if trainer.progress.step:
        log.info("going on after step %d of %d", trainer.progress.step, trainer.steps)
    curves = None
    if accelerator.is_main_process:
        tracker.begin(_page(family, question, target, folder))
        curves = card.Curves(folder / card.CURVES, trainer.progress.step, watch.columns(cfg.k), tracker)
    held_out = {
        t: [i for i, c in enumerate(data.conversations) if c.held_out and c.temperature == t]
        for t in sorted({c.temperature for c in data.conversations})
    }
    some = [i for numbers in held_out.values() for i in numbers[: max(1, cfg.validate // len(held_out))]]
    if not watch.Watch(trainer, curves, budget, some, cfg.k, cli.err).run(family):
        raise RunError(f"stopped at step {trainer.progress.step}; the same command goes on from there")
    if not accelerator.is_main_process:
        return
    found = {f"temperature {t:g}": trainer.validate(numbers, cfg.k) for t, numbers in held_out.items() if numbers}
    calibration = trainer.calibrate([i for numbers in held_out.values() for i in numbers])
    if calibration is not None:
        drafter.spec = replace(drafter.spec, confidence_temperatures=tuple(calibration[0]))
    made = _write(folder, drafter, model, target, data, family, cfg, trainer, found, question, calibration)
    tracker.end(_ending(family, found, folder / "checkpoint"))
    for name, v in found.items():
        cli.out.print(f"{name}: {watch.in_words(v)}", highlight=False, soft_wrap=True)
    cli.out.print(f"{folder / 'checkpoint'}: {made['bytes'] / 2**20:.1f} MiB", highlight=False, soft_wrap=True)


def _same(folder: Path, question: dict[str, Any]) -> bool:
    """Whether ``folder`` holds, undamaged, what a training by ``question`` makes."""
    try:
        return card.read(folder)["settings"] == question and card.intact(folder)
    except (OSError, ValueError, KeyError):
        return False


def _data(given: str | None, target: CausalLM) -> Path:
    """Where the data are: as given, else those that come with the target, else those made for it here."""
    if given is not None:
        return Path(str(given))
    home = shipped.home(target)
    if home is not None and (home / "data" / corpus.MANIFEST).exists():
        return home / "data"
    return corpus.default_folder(target)


def _drafter(cfg: DictConfig, target: CausalLM, family: str) -> Any:
    """The drafter, new: nothing is taken from a checkpoint."""
    settings = OmegaConf.to_container(cfg.drafter, resolve=True)
    assert isinstance(settings, dict)
    network = settings.get("network")
    if network is None or "_target_" not in network:  # a recipe may bring some of one
        raise ConfigError(f"drafter={family} has nothing to train; use small_lm, eagle, mtp, medusa, dflash or dspark")
    for name in ("checkpoint", "model"):
        if name in settings:
            settings[name] = None
    size = target.vocab_size if cfg.vocabulary is None else min(cfg.vocabulary, target.vocab_size)
    settings["network"] = {**network, "vocabulary": network["vocabulary"] or size}
    return cli.make(OmegaConf.create(settings))


@torch.no_grad()
def _choose_vocabulary(model: Any, data: Corpus, target: CausalLM) -> None:
    """Give the output head the rows of the tokens that replies say most often."""
    rows = model.head.lm_head.out_features
    if rows == target.vocab_size:
        return
    counts = torch.from_numpy(frequencies(data.training, target.vocab_size))
    common_ids = counts.argsort(descending=True, stable=True)[:rows].sort().values.to(target.device)
    model.head.ids = common_ids
    model.head.lm_head.weight.copy_(initial.output_rows(target)[common_ids])


def _trainable(model: Any) -> Any:
    """The model, of which the network learns, in full precision, and the output head stays the target's."""
    model.network.float()
    for parameter in model.network.parameters():
        parameter.requires_grad_(True)
    return model


def _fit(learner: Learner, batches: Batches, numbers: Sequence[int], accelerator: Accelerator) -> float:
    """Start by least squares on these conversations, where the network can: see ``start``. Returns the seconds."""
    began = time.monotonic()
    last = learner.drafter.last_sum(learner.model)
    if not numbers or last is None or not last.layers or not isinstance(getattr(last.norm, "weight", None), Tensor):
        return 0.0
    share = learner.goal.positions
    made = [
        partial(batches.make, members, share, f"fit/{i}")
        for i, members in enumerate(batches.epoch(numbers, FIT_TOKENS, "fit"))
    ]
    start.fit(learner, last, made, accelerator)
    seconds = time.monotonic() - began
    log.info("started by least squares on %d conversations, %.0f s", len(numbers), seconds)
    return seconds


def _streams(cfg: DictConfig, target: CausalLM, data: Corpus, taps: tuple[int, ...], folder: Path) -> streams.Source:
    shown = Progress(
        TextColumn("the target's streams"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=cli.err,
        disable=not cli.err.is_terminal,
        transient=True,
    )
    with shown as bar:
        task = bar.add_task("", total=None)
        began = last = time.monotonic()

        def say(done: int, of: int) -> None:
            nonlocal last
            bar.update(task, total=of, completed=done)
            if not cli.err.is_terminal and time.monotonic() - last > 60:
                last = time.monotonic()
                cli.err.print(f"the target's streams: {done} of {of} batches, {last - began:.0f} s", highlight=False)

        budget = int(cfg.streams_gb * 2**30)
        place = Path(str(cfg.streams or folder.parent / "streams"))
        return streams.keep(target, data, taps, tuple(cfg.also_taps), place, budget, say)


def _write(
    folder: Path,
    drafter: Any,
    model: Any,
    target: CausalLM,
    data: Corpus,
    family: str,
    cfg: DictConfig,
    trainer: Trainer,
    found: dict[str, Validation],
    question: dict[str, Any],
    calibration: tuple[list[float], float, float] | None,
) -> dict[str, Any]:
    """The finished checkpoint with its card."""
    model.to(torch.bfloat16)
    written: Written = common.without_target_rows(drafter.write(model, target), target)
    facts = {
        "family": family,
        "target": corpus.identity(target),
        "k": cfg.k,
        "parameters": sum(p.numel() for p in model.network.parameters() if p.requires_grad),
        "vocabulary": question["vocabulary"],
        "coverage": next(iter(found.values())).coverage,
        "data": {"table_sha256": data.sha256, **data.manifest["counts"], "source": data.manifest["source"]},
        "settings": question,
        "progress": vars(trainer.progress),
        "validation": {name: asdict(v) for name, v in found.items()},
        "calibration": None
        if calibration is None
        else dict(zip(("temperatures", "error_before", "error_after"), calibration, strict=True)),
        "made_by": {**provenance.collect("drafters.training"), "at": provenance.now()},
    }
    return card.write(folder / "checkpoint", written, facts, folder / card.CURVES)


def _page(family: str, question: dict[str, Any], target: CausalLM, folder: Path) -> Page:
    """Of a training: one for all times it is gone on with."""
    origin = provenance.collect("drafters.training")
    return Page(
        id=record.run_id({"training": question, "target": dict(target.files)}),
        name=f"{family} for {target.name}",
        job="training",
        group=family,
        config=question,
        tags=tracking.tags(family, origin),
        folder=folder,
    )


def _ending(family: str, found: dict[str, Validation], checkpoint: Path) -> Ending:
    """Of a training that is done: what the checkpoint drafts of held-out replies."""
    rows: list[list[Scalar | None]] = [
        [name, v.tokens_per_pass, v.loss, v.coverage, *v.acceptance] for name, v in found.items()
    ]
    positions = [f"acceptance_{i}" for i in range(1, len(rows[0]) - 3)] if rows else []
    columns = ["replies", "tokens_per_pass", "loss", "coverage", *positions]
    artifact = Artifact(f"checkpoint-{family}", "checkpoint", checkpoint)
    return Ending(tables={"validation": Table(columns, rows)}, artifacts=[artifact])


if __name__ == "__main__":
    sys.exit(cli.run_command("training", run))
