"""The raw tables of a run, where they can be read."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

log = logging.getLogger(__name__)

Run = Mapping[str, Any]


def table(run: Run, name: str, columns: Sequence[str]) -> pd.DataFrame | None:
    """These columns of the parquet file ``name`` of a run; None, and a line that says so, where it cannot be read."""
    path = Path(run["folder"]) / name
    try:
        return pd.read_parquet(path, columns=list(columns))
    except (OSError, ValueError, KeyError) as error:
        log.warning("left out: %s cannot be read (%s)", path, error)
        return None
