"""The record of a run: a folder named by the hash of what was asked, that appears whole or not at all.

    <results_dir>/<id>/run.json         what was asked, by what, on what; the metrics; or why it failed
                       steps.parquet    a row per (arm, round, prompt), prefill as round 0
                       prompts.parquet  a row per prompt: text in, both replies, verdict
                       rounds.parquet   a row per (arm, slice, round) of the profiling pass: seconds of each part

Everything shown anywhere is computed from these files.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from specbench.errors import ConfigError, RunError

SCHEMA_VERSION = 2
RUN = "run.json"
STEPS = "steps.parquet"
PROMPTS = "prompts.parquet"
ROUNDS = "rounds.parquet"
FILES = frozenset((RUN, STEPS, PROMPTS, ROUNDS))
REPLACE_ATTEMPTS = 10


def run_id(question: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits that stand for ``question``: everything that can change the result, JSON-able."""
    text = json.dumps({"schema": SCHEMA_VERSION, **question}, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read(folder: Path) -> dict[str, Any]:
    """The ``run.json`` of a record. Raises ConfigError if there is none, or of another schema."""
    try:
        run = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} holds no {RUN}, so it is no record of a run") from error
    except OSError as error:
        raise ConfigError(f"{folder / RUN} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{folder / RUN} is not JSON: {error}") from error
    version = run.get("schema_version") if isinstance(run, dict) else None
    if version != SCHEMA_VERSION:
        raise ConfigError(f"{folder} has schema version {version}; this code reads {SCHEMA_VERSION}")
    return run


def finished(results_dir: Path, id_: str) -> dict[str, Any] | None:
    """The finished record with this id, if there is one; failed and unreadable ones do not count."""
    try:
        run = read(results_dir / id_)
    except ConfigError:
        return None
    return run if run.get("status") == "ok" else None


def discard_failed(results_dir: Path, run: Mapping[str, Any]) -> None:
    """Remove the other failed records that asked what ``run`` did, when the drafter's files or code were others: its
    configuration, target and prompts."""
    names = ("config", "target", "dataset")
    for path in results_dir.glob(f"*/{RUN}"):
        with suppress(ConfigError):
            other = read(path.parent)
            same = other["status"] == "failed" and all(other.get(name) == run[name] for name in names)
            if same and path.parent.name != run["id"]:
                shutil.rmtree(path.parent, ignore_errors=True)


def rewrite(folder: Path, run: Mapping[str, Any]) -> None:
    """Replace the ``run.json`` of a record, whose tables stay as they are. Raises RunError as ``write_file`` does."""
    write_file(folder / RUN, json.dumps(run, indent=1, ensure_ascii=False, allow_nan=False))


def find(paths: list[Path]) -> list[Path]:
    """Record folders among ``paths``: each is one, or holds some at any depth. Halves of records, which lack their
    ``run.json``, are among them, so that whoever reads them can say so. Raises ConfigError if there are none."""
    found = [folder for path in paths for folder in _records(path)]
    if not found:
        raise ConfigError(f"no records of runs in {', '.join(map(str, paths))}; run python -m specbench first")
    return found


def _records(path: Path) -> Iterator[Path]:
    """Folders under ``path``, itself included, that hold a file of a record; hidden ones are not for others' eyes."""
    for folder, inside, files in os.walk(path):
        if not FILES.isdisjoint(files):
            inside.clear()  # no record is in another
            yield Path(folder)
        inside[:] = sorted(name for name in inside if not name.startswith("."))


def write(
    results_dir: Path,
    run: dict[str, Any],
    steps: pd.DataFrame | None = None,
    prompts: pd.DataFrame | None = None,
    rounds: pd.DataFrame | None = None,
) -> Path:
    """Store a record under ``results_dir/run["id"]``, replacing an earlier one of the same id only when the new one is
    complete. Raises RunError if the disk does not take it; then nothing half-written remains."""
    folder = results_dir / run["id"]
    scratch = results_dir / f".{run['id']}.{os.getpid()}"
    try:
        text = json.dumps({"schema_version": SCHEMA_VERSION, **run}, indent=1, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RunError(f"the record {run['id']} holds what JSON cannot ({error}), so it was not stored") from error
    try:
        results_dir.mkdir(parents=True, exist_ok=True)
        _sweep(results_dir, run["id"])
        scratch.mkdir()
        for name, table in ((STEPS, steps), (PROMPTS, prompts), (ROUNDS, rounds)):
            if table is not None:
                table.to_parquet(scratch / name, index=False)
        (scratch / RUN).write_text(text, encoding="utf-8")
        _sync(scratch)
        _replace(scratch, folder)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise RunError(f"could not write the record to {folder}: {error.strerror or error}") from error
    return folder


def write_file(path: Path, content: str | bytes) -> None:
    """Write one file whole or not at all, making its folder. Raises RunError if the disk does not take it."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(scratch, path)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise RunError(f"could not write {path}: {error.strerror or error}") from error


def _sweep(results_dir: Path, id_: str) -> None:
    """Remove what processes that no longer live left half-written for this id."""
    for leftover in results_dir.glob(f".{id_}.*"):
        if leftover.name.split(".")[2] == str(os.getpid()) or not _alive(int(leftover.name.split(".")[2])):
            shutil.rmtree(leftover, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, but alive
    return True


def _sync(folder: Path) -> None:
    """Force the files to disk, so that a name never points to content that a crash then loses."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _replace(scratch: Path, folder: Path) -> None:
    """Put ``scratch`` in the place of ``folder``. A folder that holds files cannot be renamed over, so an old one is
    first moved aside; its run.json goes first, so that a crash in between leaves no record rather than a stale one.
    Another process may do the same at the same moment; then the later one stays."""
    old = scratch.with_name(scratch.name + ".old")
    for attempt in range(REPLACE_ATTEMPTS):
        try:
            scratch.rename(folder)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or attempt == REPLACE_ATTEMPTS - 1:
                raise
        with suppress(FileNotFoundError):  # the other process was quicker
            (folder / RUN).unlink(missing_ok=True)
            folder.rename(old)
        shutil.rmtree(old, ignore_errors=True)
