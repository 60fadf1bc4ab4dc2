"""The command line: ``python -m specbench drafter=ngram k=4``.

Exit codes: 0 done, 1 a run failed (its record says why), 2 the configuration cannot be run.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from specbench import cli, configured, summary
from specbench.configured import SETTINGS, Done


def work(cfg: DictConfig) -> Done:
    """Run what the configuration asks for; of a sweep, the sweeper says what came of it."""
    hydra = HydraConfig.get()
    swept = hydra.mode == RunMode.MULTIRUN
    study = hydra.runtime.choices.get("experiment") or (_axes() if swept else None)
    done = configured.run_cells(cfg, hydra.runtime.choices, lenient=swept, study=study)
    if not swept:
        summary.show(done.records, Path(cfg.results_dir))
    return done


def _axes() -> str | None:
    """Those of a sweep, as they were typed."""
    return " ".join(word for word in sys.argv[1:] if "=" in word and "," in word) or None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        return cli.run_command("config", work, SETTINGS, arguments, failed=lambda done: done.failed)
    finally:
        for latest in (configured.target_of, configured.prompts_of, configured.tracker_of):
            latest.forget()


if __name__ == "__main__":
    sys.exit(main())
