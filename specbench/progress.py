"""A progress bar with the time left and the speed of the moment; nothing where the output is no terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specbench import comparison
from specbench.comparison import Arm
from specbench.decoding import Step


@contextmanager
def show(console: Console, arms: int, turns: int) -> Iterator[comparison.Progress]:
    """A callback for ``compare`` that shows how many of ``arms * turns`` replies are done."""
    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("replies"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=arms * turns, speed="")

        def advance(arm: Arm, step: Step) -> None:
            ended = sum(reason is not None for reason in step.finish)
            tokens = sum(map(len, step.committed))
            speed = f"{tokens / step.seconds:.0f} tokens/s" if step.round else ""
            bar.update(task, description=arm.name, advance=ended, speed=speed)

        yield advance
