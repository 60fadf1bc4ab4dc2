"""What the terminal says of records."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench import cli, settings, tables


def show(records: Sequence[Mapping[str, Any]], results_dir: Path) -> None:
    """Records of one setting: their table, what failed and why, what is to be doubted, and where they are."""
    cli.out.print(" · ".join(settings.title(records)), style="bold", highlight=False, soft_wrap=True)
    cli.out.print(tables.terminal(records))
    for record in records:
        if record["status"] != "ok":
            cli.fail(f"{record['drafter']['name']} failed: {record['error']}", cli.FAILED)
    if len(records) == 1 and records[0]["status"] == "ok":
        cli.out.print(tables.terminal_by_category(records[0]))
    for note in dict.fromkeys([*tables.flags(records), *(note for record in records for note in _notes(record))]):
        cli.out.print(f"Note: {note}.", soft_wrap=True, highlight=False)
    cli.out.print(records[0]["folder"] if len(records) == 1 else str(results_dir), soft_wrap=True, highlight=False)


def _notes(run_json: Mapping[str, Any]) -> list[str]:
    notes: list[str] = []
    prompts = run_json.get("prompts")
    if prompts is None:  # it failed
        return notes
    if prompts["too_long"]:
        few = ", ".join([*prompts["too_long"][:3], *["…"][: len(prompts["too_long"]) > 3]])
        notes.append(f"prompts left out as they do not fit the context: {len(prompts['too_long'])} ({few})")
    if prompts["smaller_batches"]:
        notes.append(f"batches with fewer prompts than batch_size (see dataset.limit): {prompts['smaller_batches']}")
    if run_json["stateful_drafter"]:
        notes.append(f"{run_json['drafter']['name']} learns from earlier prompts: its numbers depend on their order")
    return notes
