"""What happens between the steps of a training: it is shown, validated, kept, and stopped when asked."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from drafters.training.card import Curves
from drafters.training.trainer import Budget, Trainer, stop_on_signal
from drafters.training.validation import Validation

SAID = 30  # seconds between lines


class Watch:
    """Watches over a training. Of several processes the first alone writes and validates."""

    def __init__(
        self, trainer: Trainer, curves: Curves | None, budget: Budget, some: Sequence[int], k: int, console: Console
    ):
        """``curves``: where numbers go, None in all processes but the first. ``some``: held-out conversations that are
        looked at on the way, ``k`` drafts at a time."""
        self._trainer, self._curves, self._budget = trainer, curves, budget
        self._some, self._k, self._console = some, k, console
        self._sums: dict[str, float] = {}
        self._count = 0

    def run(self, name: str) -> bool:
        """Train until the budget is used up; False where it was asked to stop. The state is kept either way."""
        trainer, first = self._trainer, self._curves is not None
        shown = first and self._console.is_terminal
        columns = (
            TextColumn(name),
            BarColumn(),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with (
            stop_on_signal() as asked,
            Progress(*columns, console=self._console, disable=not shown, transient=True) as bar,
        ):
            task = bar.add_task("", total=1.0, completed=trainer.share, words="")  # type: ignore[arg-type]
            saved = validated = said = began = time.monotonic()
            share = trainer.share
            for _ in trainer.run(self._add):
                now = time.monotonic()
                stop = trainer.asked_to_stop(asked())
                due = now - validated > 60 * self._budget.validate_minutes
                if first and (due or stop or trainer.finished or now - said > SAID):
                    left = (now - began) / max(1e-9, trainer.share - share) * (1 - trainer.share)
                    words = self._say(name, due, left)
                    bar.update(task, words=words)
                    said = time.monotonic()
                    validated = said if due else validated
                bar.update(task, completed=trainer.share)
                if stop or trainer.finished or now - saved > 60 * self._budget.save_minutes:
                    trainer.save()
                    saved = time.monotonic()
                if stop and not trainer.finished:
                    return False
        return True

    def _add(self, _: object, found: dict[str, float]) -> None:
        self._count += 1
        for name, value in found.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def _say(self, name: str, validate: bool, left: float) -> str:
        """Keep and show the means since the last time; ``left``: seconds to go. Returns a word for the bar."""
        progress = self._trainer.progress
        means = {key: total / self._count for key, total in self._sums.items()}
        self._sums, self._count = {}, 0
        row = {"step": progress.step, "tokens": progress.tokens, "minutes": progress.seconds / 60, **means}
        if validate:
            found = self._trainer.validate(self._some, self._k)
            row |= {"validation_loss": found.loss, "tokens_per_pass": found.tokens_per_pass}
            row |= {f"acceptance_{i}": a for i, a in enumerate(found.acceptance, start=1)}
            self._console.print(f"{name}, step {progress.step}: {in_words(found)}", highlight=False, soft_wrap=True)
        assert self._curves is not None
        self._curves.add(row)
        if not self._console.is_terminal:
            self._console.print(
                f"{name}, step {progress.step} of {self._trainer.steps}: loss {means['loss']:.3f}, "
                f"{progress.tokens / progress.seconds:.0f} positions/s, {left / 60:.0f} min left",
                highlight=False,
                soft_wrap=True,
            )
        return f"loss {means['loss']:.3f}"


def columns(k: int) -> list[str]:
    """What a row of curves may hold, for ``k`` drafts a round."""
    acceptance = [f"acceptance_{i}" for i in range(1, k + 1)]
    return ["step", "tokens", "minutes", "loss", "rate", "gradient", "validation_loss", "tokens_per_pass", *acceptance]


def in_words(found: Validation) -> str:
    """A validation in one line."""
    acceptance = " ".join(f"{a:.3f}" for a in found.acceptance)
    return f"{found.tokens_per_pass:.2f} tokens per verify pass, joint acceptance {acceptance}, loss {found.loss:.3f}"
