"""What every command of the project shares: its configuration by Hydra, its exit codes, and errors in one line.

Exit codes: 0 done, 1 it failed, 2 the configuration cannot be run.
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
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

out, err = Console(), Console(stderr=True)


def conf_dir() -> Path:
    """The configuration files: inside the package when it was installed, beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def run_command(
    config: str,
    work: Callable[[DictConfig], object],
    settings: Sequence[str] = (),
    arguments: Sequence[str] | None = None,
) -> int:
    """Do ``work`` with the configuration of that name in conf/, as often as a sweep asks for; returns the exit code.

    ``work`` returns something true if it failed, having said why. ``settings``: names to suggest for a wrong one.
    ``arguments``: those of the command line, None for the process's own.
    """
    if arguments is not None:
        sys.argv[1:] = arguments
    quiet()
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=config)
    def task(cfg: DictConfig) -> None:
        # caught here as well as below: of a sweep the other cells go on, and Hydra adds no words of its own
        try:
            codes.append(FAILED if work(cfg) else OK)
        except RunError as error:
            codes.append(fail(str(error), FAILED))
        except WRONG_QUESTION as error:
            codes.append(fail(_explain(error, settings), BAD_CONFIG))
        except Exception:  # a bug, ours or a drafter's: say where, and let a sweep go on
            err.print_exception()
            codes.append(FAILED)

    try:
        task()
    except WRONG_QUESTION as error:
        return fail(_explain(error, settings), BAD_CONFIG)
    except KeyboardInterrupt:
        return fail("interrupted; finished cells are kept, this one runs again next time", FAILED)
    return max(codes, default=OK)


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


def _explain(error: Exception, settings: Sequence[str]) -> str:
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
    err.print(f"specbench: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
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
