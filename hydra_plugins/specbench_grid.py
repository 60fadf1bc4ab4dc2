"""A sweeper of Hydra's kind that sees its grid whole: what it will take is said before it starts, points that cannot be
are left out, and what came of it is shown at the end. What it says is in specbench/sweeping.py.

Hydra imports whatever is in this namespace, for any program: so nothing heavy at the top.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import open_dict, read_write

if TYPE_CHECKING:
    from specbench.cli import Job
    from specbench.sweeping import Point


class GridSweeper(BasicSweeper):
    """Runs a grid point after point or, with a launcher that can, several at once."""

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        """Called by Hydra. ``task_function``: the job of the command line."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self._job: Job = task_function

    def sweep(self, arguments: list[str]) -> None:
        """Called by Hydra with the overrides of the command line."""
        from specbench import cli, configured
        from specbench.sweeping import Sweep

        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        (overrides,) = self.split_arguments(parser.parse_overrides([*self._parse_config(), *arguments]), None)
        with cli.err.status(f"reading the {len(overrides)} points of the grid"):
            points = list(self._points(overrides))
        if not points:
            return
        sweep = Sweep(points)
        sweep.announce()
        one_by_one = isinstance(self.launcher, BasicLauncher)
        if not one_by_one:  # other processes load for themselves
            configured.target_of.forget()
        begun = 0
        for some in [[point] for point in sweep.points] if one_by_one else sweep.waves():
            try:
                returned = self.launcher.launch([list(point.overrides) for point in some], initial_job_idx=begun)
                ended = [result.return_value for result in returned]  # raises what Hydra could not do
            except OSError:  # Hydra's own folder cannot be made, so that no point can be run
                raise
            except Exception as error:  # such as a process that was killed: what it had finished is stored
                words = f"the launcher failed, and with it what it had not finished: {type(error).__name__}: {error}"
                self._job.ended.append(cli.Ended(cli.fail(words, cli.FAILED)))
                for point in some:
                    sweep.tell_stored(point)
            else:
                if not one_by_one:
                    self._job.ended += ended
                for point, end in zip(some, ended, strict=True):
                    sweep.tell(point, end.found, ahead=one_by_one)
            begun += len(some)
        sweep.conclude()

    def _points(self, overrides: Sequence[list[str]]) -> "Iterator[Point]":
        """Those that can be run; of the others it is said why they cannot."""
        from specbench import cli, sweeping

        for each in overrides:
            try:
                cfg: Any = self.hydra_context.config_loader.load_sweep_config(self.config, list(each))
                drafter = str(cfg.hydra.runtime.choices["drafter"])
                with read_write(cfg), open_dict(cfg):
                    del cfg["hydra"]
                yield sweeping.point(each, cfg, drafter)
            except cli.WRONG_QUESTION as error:
                self._job.ended.append(self._job.refuse(error))
