"""The process that speaks to Weights & Biases for ``wandb_tracker``: ``python -m specbench.wandb_process``.

Lines of JSON come in: first the page, then rows, last the ending; the first and the last are answered by one, with
``notes`` for the user or an ``error``. If the lines stop without an ending, whoever wrote them is gone, and the run has
failed. Nothing here loads the harness unless figures are to be drawn.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

UNREACHABLE = 10.0  # seconds after which a server that does not answer counts as not there
ROOM = 2**20  # bytes that a disk must still take once all is written


def main() -> None:
    """Serve one run."""
    answers = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    lines = (json.loads(line) for line in sys.stdin)

    def answer(**said: Any) -> None:
        with suppress(BrokenPipeError):  # nobody waits for it any more
            print(json.dumps(said), file=answers, flush=True)

    try:
        page = next(lines)
        run, notes = begin(page)
        answer(notes=notes, offline=run.offline)
        earlier = set(run.summary.keys())  # of a run of this record that wandb goes on from
        ending, logged = follow(run, lines)
        newer = bool(ending) and bool(ending["numbers"] or not ending["error"])  # else what was said before stands
        notes = end(run, page, ending or {"error": "the run was broken off"}, earlier - logged if newer else set())
        check_room(Path(page["folder"]))
        if newer:
            replace_older(run, page)
        answer(notes=notes)
    except Exception as error:
        answer(error=first_line(error))
        sys.exit(1)


def first_line(error: Exception) -> str:
    """What an error says, in a line."""
    return (str(error) or type(error).__name__).splitlines()[0]


def begin(page: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """A run of wandb, and what to tell the user. Where none can be begun online, it is kept offline."""
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        init_timeout=UNREACHABLE,
        finish_timeout=page["wait"],
        finish_timeout_raises=True,
        stop_fn=lambda: None,  # a run is stopped where it runs
        # the record says all this, and better; what samples the machine disturbs what is measured on it
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
        disable_git=True,
        disable_code=True,
        disable_job_creation=True,
        save_code=False,
    )
    how = {
        "id": page["id"],
        "resume": "allow",
        "name": page["name"],
        "job_type": page["job"],
        "group": page["group"],
        "config": page["config"],
        "tags": page["tags"],
        "project": page["project"],
        "entity": page["entity"],
        "dir": page["folder"],
        "settings": settings,
    }
    Path(page["folder"]).mkdir(parents=True, exist_ok=True)
    notes = []
    try:
        run = wandb.init(mode=page["mode"], **how)
    except Exception as error:
        notes = [f"Weights & Biases is offline ({first_line(error)})"]
        wandb.teardown()  # else the run's id is taken
        run = wandb.init(mode="offline", **how)
    run.define_metric("live/*", step_metric="live/seconds", summary="none")
    if run.offline:
        folder = Path(run.settings.sync_dir).parent
        return run, [*notes, f"to send what Weights & Biases keeps: wandb sync {folder}/offline-run-*"]
    return run, [f"shown at {run.project_url}"] if run.project_url else []


def follow(run: Any, lines: Iterator[dict[str, Any]]) -> tuple[dict[str, Any], set[str]]:
    """Log the rows; returns the ending, empty if there is none, and the names that were logged."""
    logged: set[str] = set()
    for message in lines:
        if "row" not in message:
            return message, logged
        run.log(message["row"], step=message["step"])
        logged |= message["row"].keys()
    return {}, logged


def end(run: Any, page: Mapping[str, Any], ending: Mapping[str, Any], stale: Collection[str] = ()) -> list[str]:
    """Say how the run ended, and finish it; returns what to tell the user. ``stale``: names in the run's summary that
    go, unless they are said again.

    All that is said has a fixed name in the run's summary, so that what is said again takes the place of what was.
    """
    import wandb

    tables = {
        name: wandb.Table(columns=table["columns"], data=table["rows"])
        for name, table in ending.get("tables", {}).items()
    }
    with tempfile.TemporaryDirectory() as scratch:
        drawn = figures(Path(ending["record"]), Path(scratch)) if ending.get("record") else {}
        images = {name: wandb.Image(str(path)) for name, path in drawn.items()}
        told = {"error": ending["error"] or "", **ending.get("numbers", {}), **tables, **images}
        for name in stale:
            if name not in told and not name.startswith("_"):  # what begins so is wandb's own
                del run.summary[name]
        run.summary.update(told)
    for artifact in ending.get("artifacts", ()):
        made = wandb.Artifact(artifact["name"], artifact["kind"])
        made.add_dir(artifact["folder"])
        run.log_artifact(made)
    try:
        run.finish(exit_code=1 if ending["error"] else 0)
    except TimeoutError:
        return [f"not all was sent in {page['wait']:g} s; to send the rest: wandb sync {run.settings.sync_dir}"]
    return []


def figures(record: Path, folder: Path) -> dict[str, Path]:
    """Those of a single record, drawn into ``folder``."""
    from specbench import plots, results

    runs = results.runs([record])
    drawn = {"figures/speedup": plots.speedup_by_drafter(runs, folder / "speedup")[0]}
    if runs[0]["drafter"]["k"]:
        drawn["figures/acceptance_by_position"] = plots.acceptance_by_position(runs, {}, folder / "acceptance")[0]
    return drawn


def check_room(folder: Path) -> None:
    """Raise OSError where the disk takes no more: wandb does not say that it could not write."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(ROOM))


def replace_older(run: Any, page: Mapping[str, Any]) -> None:
    """Remove what was kept offline of an earlier run of this record: sent later, it would undo what is newer."""
    here = Path(run.settings.sync_dir)
    for other in here.parent.glob(f"*run-*-{page['id']}*"):
        if other != here and _began(other) <= _began(here):
            shutil.rmtree(other, ignore_errors=True)


def _began(folder: Path) -> str:
    """When, by the name that wandb gives a run's folder, which sorts by it."""
    return folder.name.removeprefix("offline-")


if __name__ == "__main__":
    main()
