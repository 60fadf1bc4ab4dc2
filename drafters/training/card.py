"""What is said of a trained drafter: a card beside its checkpoint, for people and for programs.

<folder>/config.json, model.safetensors    the checkpoint
<folder>/card.json                         where it is from: data, command, settings, size, time, metrics, SHA-256
<folder>/curves.csv                        loss and acceptance on the way
<folder>/README.md                         the same in words
"""

import csv
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafters.checkpoints.files import Written
from specbench.packaged import file_sha256
from specbench.tracking import Tracker

CARD, CURVES = "card.json", "curves.csv"


def write(folder: Path, written: Written, facts: Mapping[str, Any], curves: Path) -> dict[str, Any]:
    """Write a checkpoint with its card to ``folder``, which is replaced as a whole; returns the card."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        files = written.save(made)
        card = {**facts, "files": files, "bytes": sum((made / name).stat().st_size for name in files)}
        (made / CARD).write_text(json.dumps(card, indent=1) + "\n")
        shutil.copy(curves, made / CURVES)
        (made / "README.md").write_text(in_words(card))
        old = Path(scratch) / "old"
        if folder.exists():
            folder.rename(old)
        made.rename(folder)
    return card


def read(folder: Path) -> dict[str, Any]:
    """The card in ``folder``."""
    return json.loads((folder / CARD).read_text())


def intact(folder: Path) -> bool:
    """Whether the checkpoint in ``folder`` is the one its card describes."""
    return all(file_sha256(folder / name) == digest for name, digest in read(folder)["files"].items())


def in_words(card: Mapping[str, Any]) -> str:
    """The card as Markdown."""
    data, found = card["data"], card["validation"]
    rows = "\n".join(
        f"| {name} | {v['tokens_per_pass']:.2f} | {' '.join(f'{a:.3f}' for a in v['acceptance'])} |"
        for name, v in found.items()
    )
    minutes = card["progress"]["seconds"] / 60
    planned = [length["minutes"] for length in card["progress"]["extended"] if length["minutes"] is not None]
    first = f" (at first {' and '.join(f'{m:g}' for m in planned)} were planned)" if planned else ""
    return f"""# {card["family"]} for {card["target"]["name"]}

Drafts {card["k"]} tokens a round. {card["parameters"]:,} parameters of its own; the output head is rows of the target's
for {card["vocabulary"]} tokens, which are {card["coverage"]:.1%} of what the held-out replies say.

Trained on a share of {card["settings"]["share"]:g} of the data, which hold {data["reply_tokens"]:,} reply tokens of the
target's own (table SHA-256 `{data["table_sha256"][:16]}…`),
{card["progress"]["tokens"]:,} positions in {card["progress"]["step"]:,} steps and {minutes:.0f} minutes{first} on
{card["made_by"]["machine"]["cpu"] if "gpu" not in card["made_by"]["machine"] else card["made_by"]["machine"]["gpu"]}:

    {" ".join(card["made_by"]["command"])}

On held-out replies, {card["k"]} drafts a round:

| replies | tokens per verify pass | joint acceptance by position |
|---|---|---|
{rows}
"""


class Curves:
    """Numbers along the way, in a CSV file that an interrupted training goes on with, and to a tracker."""

    def __init__(self, path: Path, from_step: int, names: list[str], tracker: Tracker):
        """Rows of steps after ``from_step`` are dropped: they are made again. The tracker hears of the others once
        more, so that what it keeps is whole whenever the training was begun."""
        self._path, self._names, self._tracker = path, names, tracker
        kept: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="") as file:
                kept = [row for row in csv.DictReader(file) if int(row["step"]) <= from_step]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore")  # an earlier k may have had more columns
            writer.writeheader()
            writer.writerows(kept)
        for row in kept:
            self._track({name: float(value) for name, value in row.items() if value})

    def add(self, row: Mapping[str, float]) -> None:
        """Keep a row; what is not known stays empty."""
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._names).writerow(
                {
                    name: f"{row[name]:.6g}" if isinstance(row.get(name), float) else row.get(name, "")
                    for name in self._names
                }
            )
        self._track(row)

    def _track(self, row: Mapping[str, float]) -> None:
        self._tracker.log({name: value for name, value in row.items() if name != "step"}, step=int(row["step"]))
