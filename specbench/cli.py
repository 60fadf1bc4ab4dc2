"""What every command of the project shares: its configuration by Hydra, its exit codes, and errors in one line.

Exit codes: 0 done, 1 it failed, 2 the configuration cannot be run.
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import transformers
from hydra.errors import HydraException, InstantiationException, MissingConfigException
from hydra.utils import instantiate
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from specbench.errors import ConfigError, RunError, nearest

OK, FAILED, BAD_CONFIG = 0, 1, 2
WRONG_QUESTION = (ConfigError, HydraException, OmegaConfBaseException)

out, err = Console(markup=False), Console(stderr=True, markup=False)  # what is said may hold brackets


def conf_dir() -> Path:
    """The configuration files: inside the package when it was installed, beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


@dataclass(frozen=True)
class Ended:
    """How the work of one configuration ended: its exit code, and what came of it, None where it raised."""

    code: int
    found: Any = None


class Job:
    """The work, done for one configuration after another; of a sweep, maybe in other processes. ``ended``: how it went
    here, and wherever a sweeper says so."""

    def __init__(self, work: Callable[[DictConfig], Any], settings: Sequence[str], failed: Callable[[Any], bool]):
        self._work, self._settings, self._failed = work, settings, failed
        self.ended: list[Ended] = []

    def __call__(self, cfg: DictConfig) -> Ended:
        """Called by Hydra, for each configuration."""
        quiet()  # this may be another process
        self.ended.append(self._do(cfg))
        return self.ended[-1]

    def refuse(self, error: Exception) -> Ended:
        """A wrong question, in a line."""
        return Ended(fail(explain(error, self._settings), BAD_CONFIG))

    def _do(self, cfg: DictConfig) -> Ended:
        # caught here as well as below: of a sweep the other cells go on, and Hydra adds no words of its own
        try:
            found = self._work(cfg)
            return Ended(FAILED if self._failed(found) else OK, found)
        except RunError as error:
            return Ended(fail(str(error), FAILED))
        except WRONG_QUESTION as error:
            return self.refuse(error)
        except Exception:  # a bug, ours or a drafter's: say where, and let a sweep go on
            err.print_exception()
            return Ended(FAILED)


def run_command(
    config: str,
    work: Callable[[DictConfig], Any],
    settings: Sequence[str] = (),
    arguments: Sequence[str] | None = None,
    failed: Callable[[Any], bool] = bool,
) -> int:
    """Do ``work`` with the configuration of that name in conf/, as often as a sweep asks for; returns the exit code.

    ``failed`` of what ``work`` returns: whether it failed, having said why. ``settings``: names to suggest for a wrong
    one. ``arguments``: those of the command line, None for the process's own.
    """
    if arguments is not None:
        sys.argv[1:] = arguments
    quiet()
    job = Job(work, settings, failed)
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=config)(job)()
    except WRONG_QUESTION as error:
        return fail(explain(error, settings), BAD_CONFIG)
    except OSError as error:  # Hydra's folder for a sweep cannot be made, for instance
        return fail(f"{error.filename or 'a file'}: {error.strerror or error}", FAILED)
    except KeyboardInterrupt:
        return fail("interrupted; finished cells are kept, this one runs again next time", FAILED)
    return max((ended.code for ended in job.ended), default=OK)


def make(config: DictConfig) -> Any:
    """What a part of the configuration describes. Raises the ConfigError or RunError of whoever makes it."""
    try:
        return instantiate(config)
    except InstantiationException as error:
        cause = error.__cause__
        while cause is not None:
            if isinstance(cause, ConfigError | RunError):
                raise cause from error
            cause = cause.__cause__
        raise


def explain(error: Exception, settings: Sequence[str] = ()) -> str:
    """A wrong question in a line, with what to type instead; ``settings``: names to suggest for a wrong one."""
    text = str(error)
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return f"{group}={name} is unknown. {nearest(name, error.options)}"
    unknown = re.match(r"Could not override '([\w.]+)'", text)
    if unknown and ("." in unknown[1] or not settings):
        return f"{unknown[1]} is no setting; conf/ and the printed configuration (--cfg job) show which there are"
    if unknown:
        return f"{unknown[1]} is no setting. {nearest(unknown[1], settings)}"
    missing = re.search(r"Missing mandatory value: (\S+)", text)
    if missing:
        return f"{missing[1]} must be given: {missing[1]}=VALUE"
    return text


def fail(message: str, code: int) -> int:
    """Say what went wrong, in a line of its own; returns ``code``."""
    err.print(f"specbench: {message}", style="red", highlight=False, soft_wrap=True)
    return code


def quiet() -> None:
    """Only our own messages; Hydra's tracebacks become our one-line errors."""
    os.environ["HYDRA_FULL_ERROR"] = "1"
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logger = logging.getLogger("specbench")
    logger.handlers = [logging.StreamHandler()]
    logger.handlers[0].setFormatter(logging.Formatter("specbench: %(message)s"))
    logger.setLevel(logging.INFO)
    logger.propagate = False
