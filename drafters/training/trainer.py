"""The training loop: one for all families.

A step draws a batch of conversations, unrolls the drafter over positions of their replies, and moves its weights. What
a step does depends on the settings and its number alone, and what the optimiser remembers is kept with the weights; so
a run that was stopped goes on exactly as if it had not been.
"""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from drafters.draft_model import OutputHead
from drafters.neural import Passages, Sum, Unrolled
from drafters.training import objective
from drafters.training.batches import Batch, Batches, truths
from drafters.training.calibration import calibrated
from drafters.training.objective import Objective
from drafters.training.validation import Tally, Validation, covered, right
from specbench.errors import ConfigError, RunError
from specbench.model import CausalLM

STATE = "state.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")
LENGTH = ("epochs", "minutes")  # of a budget: may be raised when a training has begun
SHARE_OF_WARM_UP = 0.03  # of the training, in which the learning rate rises


class Trainable(Protocol):
    """A drafter that can be trained: see ``drafters.neural.Neural``."""

    taps: Sequence[int]

    def build(self, target: CausalLM) -> Any: ...  # noqa: D102

    def unroll(self, model: Any, target: CausalLM, passages: Passages, k: int) -> Unrolled: ...  # noqa: D102

    def hidden(self, model: Any, target: CausalLM, passages: Passages, k: int) -> Sequence[Tensor]: ...  # noqa: D102

    def last_sum(self, model: Any) -> Sum | None: ...  # noqa: D102


@dataclass(frozen=True)
class Budget:
    """How long a drafter learns: ``epochs`` over the data or ``minutes``, whichever ends first; None for no limit.

    batch_tokens: of a step, prompts and padding included. The learning rate follows whichever is further on."""

    epochs: float
    minutes: float | None
    batch_tokens: int
    save_minutes: float
    validate_minutes: float
    seed: int
    clip: float
    weight_decay: float

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_tokens", "save_minutes", "validate_minutes", "clip"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"minutes={self.minutes} must be above 0, or null for no limit")


class Learner(nn.Module):
    """A drafter's network with what is asked of it: its forward is the loss of a batch."""

    def __init__(self, drafter: Trainable, model: Any, target: CausalLM, goal: Objective):
        super().__init__()
        self.model = model
        self.drafter, self.goal = drafter, goal
        self._target = (target,)  # in a tuple: no submodule

    def forward(self, batch: Batch) -> Tensor:
        """The objective's loss."""
        drafts = self.unroll(batch, self.goal.depth)
        scaled = self.target.scaled if self.goal.reads_law else None
        answers = truths(batch, self.model.head, self.goal.depth, scaled)
        return objective.loss(self.goal, drafts, answers)

    def unroll(self, batch: Batch, depth: int) -> Unrolled:
        """``depth`` drafts at the positions of a batch."""
        return self.drafter.unroll(self.model, self.target, batch.passages, depth)

    @property
    def target(self) -> CausalLM:
        """Whose drafter it is."""
        return self._target[0]

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


@dataclass
class Progress:
    """How far a training is. seconds: spent on steps, validation excluded. tokens: reply positions learned from.
    fit_seconds: spent on the start by least squares. extended: lengths that were planned before, and then raised."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    fit_seconds: float = 0.0
    extended: list[dict[str, float | None]] = field(default_factory=list)


Report = Callable[[Progress, dict[str, float]], None]


class Trainer:
    """Trains one drafter."""

    def __init__(
        self,
        learner: Learner,
        batches: Batches,
        training: Sequence[int],
        budget: Budget,
        folder: Path,
        accelerator: Accelerator,
        question: dict[str, Any],
    ):
        """``training``: numbers of the conversations to learn from. ``question``: what the training depends on; a state
        in ``folder`` that belongs to another one is refused. A longer budget is no other question: the training goes
        on, at the learning rate that the longer one has at this place, and its progress says so."""
        self._batches, self._training, self._budget = batches, training, budget
        self._folder, self._accelerator, self._question = folder, accelerator, question
        self._learner = learner
        parameters = learner.trained()
        matrices = [p for p in parameters.values() if p.ndim > 1]
        vectors = [p for p in parameters.values() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": budget.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=learner.goal.rate, betas=(0.9, 0.95), fused=True)
        self._optimizer = optimizer
        self._wrapped, self._stepper = accelerator.prepare(learner, optimizer)
        self.progress = Progress()
        self._epoch_steps: dict[int, list[list[int]]] = {}
        if (folder / STATE).exists():
            self._load()

    @property
    def finished(self) -> bool:
        """Whether the budget is used up."""
        return self.share >= 1

    @property
    def share(self) -> float:
        """How much of the budget is used up, 0 to 1."""
        by_time = 0.0 if self._budget.minutes is None else self.progress.seconds / 60 / self._budget.minutes
        return min(1.0, max(by_time, self.progress.step / self.steps))

    @property
    def steps(self) -> int:
        """Steps of the whole training, were there time for all."""
        return max(1, round(self._budget.epochs * len(self._epoch(0)) / self._accelerator.num_processes))

    def run(self, report: Report) -> Iterator[Progress]:
        """Learn, and yield after each step, until the budget is used up. ``report`` is told loss and learning rate.

        Raises RunError where the loss is not a number; the last state that was saved stays."""
        self._learner.train()
        while not self.finished:
            began = time.perf_counter()
            numbers = self._numbers(self.progress.step)
            batch = self._batches.make(
                numbers,
                self._learner.goal.positions,
                f"{self._budget.seed}/{self.progress.step}/{self._accelerator.process_index}",
            )
            rate = self._learner.goal.rate * schedule(self.share)
            for group in self._stepper.param_groups:
                group["lr"] = rate
            with self._accelerator.autocast():
                found = self._wrapped(batch)
            if not bool(found.isfinite()):
                raise RunError(
                    f"the loss is {found.item()} at step {self.progress.step}, on conversations {list(numbers)[:8]}; "
                    f"the last good state is kept in {self._folder}. Try a lower recipe.rate than "
                    f"{self._learner.goal.rate:g}"
                )
            self._accelerator.backward(found)
            norm = self._accelerator.clip_grad_norm_(self._wrapped.parameters(), self._budget.clip)
            self._stepper.step()
            self._stepper.zero_grad()
            self.progress.step += 1
            self.progress.tokens += int(self._together(batch.positions).sum())
            self.progress.seconds = float(self._together(self.progress.seconds + time.perf_counter() - began).max())
            report(self.progress, {"loss": found.item(), "rate": rate, "gradient": float(norm)})
            yield self.progress

    def asked_to_stop(self, asked: bool) -> bool:
        """Whether any process was ``asked`` to stop: then all do, after the same step."""
        return bool(self._together(float(asked)).any())

    def _together(self, value: float) -> Tensor:
        """A number of each process, known to all of them."""
        own = torch.tensor([float(value)], dtype=torch.float64, device=self._accelerator.device)
        return self._accelerator.gather(own) if self._accelerator.num_processes > 1 else own

    def validate(self, numbers: Sequence[int], depth: int) -> Validation:
        """How well the drafter drafts ``depth`` tokens on these conversations."""
        self._learner.eval()
        tally, losses, batches = Tally(depth), [], []
        head: OutputHead = self._learner.model.head
        for batch in self._held_out(numbers):
            with torch.no_grad(), self._accelerator.autocast():
                losses.append((self._learner(batch).item(), batch.positions))
                hits = right(self._learner.unroll(batch, depth), batch, head)
            for row, count in zip(hits.cpu().numpy(), batch.real.sum(dim=1).tolist(), strict=True):
                tally.add(row[:count])
            batches.append(batch)
        self._learner.train()
        loss = float(np.average([value for value, _ in losses], weights=[n for _, n in losses])) if losses else math.nan
        return Validation(tally.acceptance, tally.tokens_per_pass, covered(batches, head.ids), loss)

    def calibrate(self, numbers: Sequence[int]) -> tuple[list[float], float, float] | None:
        """See ``calibration.calibrated``, on these conversations; None for a drafter that has learned no confidence."""
        if not self._learner.goal.confidence:
            return None
        said, found = [], []
        goal = self._learner.goal
        for batch in self._held_out(numbers):
            with torch.no_grad(), self._accelerator.autocast():
                drafts = self._learner.unroll(batch, goal.depth)
                if drafts.confidence is None:
                    return None
                answers = list(truths(batch, self._learner.model.head, goal.depth, self._learner.target.scaled))
                accepted = [objective.Losses.apply(q, p, goal)[1] for q, p in zip(drafts.logits, answers, strict=True)]
            whole = answers[-1].known  # where all drafts have something to be right about
            said.append(drafts.confidence[whole].float().cpu().numpy())
            found.append(torch.stack(accepted, dim=-1)[whole].cpu().numpy())
        return calibrated(np.concatenate(said), np.concatenate(found))

    def _held_out(self, numbers: Sequence[int]) -> Iterator[Batch]:
        """These conversations at all positions of their replies."""
        for members in self._batches.epoch(numbers, self._budget.batch_tokens, "validation"):
            yield self._batches.make(members, 1.0, "validation")

    def save(self) -> None:
        """Keep all that is needed to go on; the state appears as a whole or not at all."""
        if not self._accelerator.is_main_process:
            return
        tensors = {}
        for name, parameter in self._learner.trained().items():
            tensors[f"model.{name}"] = parameter.detach()
            for moment in MOMENTS if parameter in self._optimizer.state else ():
                tensors[f"{moment}.{name}"] = self._optimizer.state[parameter][moment]
        scratch = self._folder / f".{STATE}"
        facts = {"progress": vars(self.progress), "question": self._question}
        save_file({n: t.cpu().contiguous() for n, t in tensors.items()}, scratch, {"facts": json.dumps(facts)})
        scratch.rename(self._folder / STATE)

    def _load(self) -> None:
        with safe_open(self._folder / STATE, "pt") as file:
            facts = json.loads(file.metadata()["facts"])
            asked, found = _without_length(self._question), _without_length(facts["question"])
            differing = [key for key in asked | found if asked.get(key) != found.get(key)]
            if differing:
                raise ConfigError(
                    f"out={self._folder} holds a training with other {', '.join(differing)}; give another folder, or "
                    "remove it"
                )
            self.progress = Progress(**facts["progress"])
            self._extend(facts["question"].get("budget", {}))
            names = set(file.keys())
            for name, parameter in self._learner.trained().items():
                with torch.no_grad():
                    parameter.copy_(file.get_tensor(f"model.{name}"))
                if f"{MOMENTS[0]}.{name}" in names:
                    moments = {m: file.get_tensor(f"{m}.{name}").to(parameter.device) for m in MOMENTS}
                    step = torch.tensor(float(self.progress.step), device=parameter.device)
                    self._optimizer.state[parameter] = {"step": step, **moments}

    def _extend(self, before: dict[str, Any]) -> None:
        """Take note that more was asked for than ``before``, the budget of the state."""
        changed = [name for name in LENGTH if name in before and getattr(self._budget, name) != before[name]]
        for name in changed:
            now, then = (math.inf if v is None else v for v in (getattr(self._budget, name), before[name]))
            if now < then:
                raise ConfigError(
                    f"{name}={now:g} is less than the {then:g} of the training in out={self._folder}; give at least "
                    "as much, or another folder"
                )
        if changed:
            self.progress.extended.append({name: before[name] for name in LENGTH})

    def _numbers(self, step: int) -> Sequence[int]:
        """The conversations of a step, of this process."""
        place = step * self._accelerator.num_processes + self._accelerator.process_index
        epoch = 0
        while place >= len(self._epoch(epoch)):
            place -= len(self._epoch(epoch))
            epoch += 1
        return self._epoch(epoch)[place]

    def _epoch(self, number: int) -> list[list[int]]:
        if number not in self._epoch_steps:
            seed = f"{self._budget.seed}/{number}"
            self._epoch_steps[number] = self._batches.epoch(self._training, self._budget.batch_tokens, seed)
        return self._epoch_steps[number]


def _without_length(question: dict[str, Any]) -> dict[str, Any]:
    """A question but for how long the training is."""
    budget = {name: value for name, value in question.get("budget", {}).items() if name not in LENGTH}
    return {**question, "budget": budget}


def schedule(share: float) -> float:
    """Learning rate, relative to its highest, when a ``share`` of the training is done: a linear rise, then a cosine.

    >>> round(schedule(0.015), 3), schedule(0.03), round(schedule(1.0), 3)
    (0.5, 1.0, 0.0)
    """
    if share < SHARE_OF_WARM_UP:
        return max(share, 1e-3) / SHARE_OF_WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (share - SHARE_OF_WARM_UP) / (1 - SHARE_OF_WARM_UP)))


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether an interrupt or a termination was asked for; until then both only set it."""
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if asked:  # a second time: at once
            raise KeyboardInterrupt
        asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
