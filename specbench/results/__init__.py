"""Many records at once: as they are, as one frame, and all their raw steps.

    from specbench import results
    runs = results.frame(["results"])        # a row per run; failed ones too
    steps = results.steps(["results"])       # a row per (run, arm, round, prompt)

``python -m specbench.results`` lists them, shows one, and exports them.
"""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from specbench import record
from specbench.errors import ConfigError, nearest
from specbench.results.columns import flatten

log = logging.getLogger(__name__)

TOLD = 3  # reasons that one line names before it only counts them
WORDS = ["uid", "finish", "arm"]  # columns of steps that hold few different words, kept once each


def runs(paths: Sequence[Path | str]) -> list[dict[str, Any]]:
    """The ``run.json`` of every record among ``paths`` (record folders, or folders with some at any depth), each with
    its ``folder``.

    What cannot be read (nothing there, half of a record, another schema) is left out, with a line that names it.
    Raises ConfigError if nothing is left.
    """
    return list(_each(paths))


def frame(paths: Sequence[Path | str]) -> pd.DataFrame:
    """A row per record among ``paths``, failed runs included, with the columns of ``specbench.results.columns``.
    Leaves out and raises as ``runs`` does."""
    return flatten(_each(paths))


def steps(paths: Sequence[Path | str], columns: Sequence[str] | None = None) -> pd.DataFrame:
    """The raw steps of every finished run among ``paths``: those columns of ``steps.parquet`` (None: all that hold no
    lists), after the ``id`` and ``folder`` of the run. Words are categories.

    Leaves out and raises as ``runs`` does, and ConfigError for a column that there is not.
    """
    sources = [(run["id"], run["folder"]) for run in _each(paths) if run["status"] == "ok"]
    if not sources:
        raise ConfigError(f"no run in {_listed(paths)} is finished, so that there are no steps")
    with ThreadPoolExecutor() as pool:
        read = list(pool.map(partial(_steps, columns=columns), [folder for _, folder in sources]))
    whole = [(*source, table) for source, table in zip(sources, read, strict=True) if isinstance(table, pa.Table)]
    _left_out([reason for reason in read if isinstance(reason, str)], bool(whole))
    ids, folders, tables = zip(*whole, strict=True)
    lengths = [len(table) for table in tables]
    joined = pa.concat_tables(tables, promote_options="permissive")
    del read, whole, tables  # or they would stay in memory beside what is made of them
    found = joined.to_pandas(split_blocks=True, self_destruct=True)
    found.insert(0, "id", _repeated(ids, lengths))
    found.insert(1, "folder", _repeated(folders, lengths))
    return found


def _each(paths: Sequence[Path | str]) -> Iterator[dict[str, Any]]:
    """What ``runs`` returns, one at a time: a thousand are too large to be kept for a few numbers of each."""
    folders: dict[Path, Path] = {}  # a record that is named twice is still one
    refused, some = [], False
    for path in map(Path, paths):
        try:
            for folder in record.find([path]):
                folders.setdefault(folder.resolve(), folder)
        except ConfigError as error:
            refused.append(str(error))
    for folder in folders.values():
        try:
            run = record.read(folder)
        except ConfigError as error:
            refused.append(str(error))
            continue
        some = True
        yield {**run, "folder": str(folder)}
    _left_out(refused, some)


def _left_out(reasons: Sequence[str], some: bool) -> None:
    """Say what cannot be read, a line each; if there is not even ``some`` that can, raise ConfigError."""
    if some:
        for reason in reasons:
            log.warning("left out: %s", reason)
    elif len(reasons) == 1:
        raise ConfigError(reasons[0])
    else:
        more = f"; and {len(reasons) - TOLD} more" if len(reasons) > TOLD else ""
        raise ConfigError(f"no record can be read: {'; '.join(reasons[:TOLD])}{more}")


def _steps(folder: str, columns: Sequence[str] | None) -> pa.Table | str:
    """The steps of one record, or why they cannot be read."""
    path = Path(folder) / record.STEPS
    try:
        with pq.ParquetFile(path, read_dictionary=WORDS) as file:
            schema = file.schema_arrow
            if columns is None:
                columns = [field.name for field in schema if not pa.types.is_list(field.type)]
            wrong = [name for name in columns if name not in schema.names]
            if wrong:
                raise ConfigError(f"steps have no column {wrong[0]}. {nearest(wrong[0], schema.names)}")
            return file.read(columns=list(columns), use_threads=False)
    except (OSError, pa.ArrowException) as error:
        return f"{path} cannot be read: {' '.join(str(error).split())}"


def _repeated(names: Sequence[str], times: Sequence[int]) -> pd.Categorical:
    """Each name so many times."""
    codes, different = pd.factorize(np.array(names, dtype=object))
    return pd.Categorical.from_codes(np.repeat(codes, times), pd.Index(different))


def _listed(paths: Sequence[Path | str]) -> str:
    return ", ".join(map(str, paths))
