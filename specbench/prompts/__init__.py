"""Prompts: conversations of one or more user turns, from the built-in set, a file, or a hub data set.

``limit`` samples evenly across categories, by seed, and keeps the set's own order.
"""

import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from specbench.errors import ConfigError

# local files of a hub data set, by preference: a clone may hold descriptions in JSON beside its parquet
TABLE_KINDS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}


@dataclass(frozen=True)
class Conversation:
    """User turns, in order. A later turn is asked after the model's reply to the one before."""

    id: str
    category: str
    turns: tuple[str, ...]
    reference: str | None = None


@dataclass(frozen=True)
class PromptSet:
    """Conversations with the name they go by and a SHA-256 of what they say."""

    name: str
    conversations: tuple[Conversation, ...]

    def __post_init__(self) -> None:
        if not self.conversations:
            raise ConfigError(f"data set {self.name} is empty")
        ids = [c.id for c in self.conversations]
        if len(set(ids)) < len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise ConfigError(
                f"data set {self.name} has two prompts with id {twice}; ids key the noise and must differ"
            )

    @property
    def sha256(self) -> str:
        """Digest of ids, categories and turns, in order."""
        text = json.dumps([[c.id, c.category, *c.turns] for c in self.conversations], ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def sample(self, limit: int | None, seed: int) -> "PromptSet":
        """``limit`` conversations, spread evenly over the categories, in the set's own order; None keeps all."""
        if limit is None or limit >= len(self.conversations):
            return self
        if limit < 1:
            raise ConfigError(f"dataset.limit={limit}: use 1 or more, or null for all")
        by_category: dict[str, list[int]] = {}
        for index, conversation in enumerate(self.conversations):
            by_category.setdefault(conversation.category, []).append(index)
        for category, members in by_category.items():
            random.Random(f"{seed}/{category}").shuffle(members)
        queues = list(by_category.values())
        random.Random(seed).shuffle(queues)  # which categories get one more than others
        chosen: list[int] = []
        while len(chosen) < limit:
            for queue in queues:
                if queue and len(chosen) < limit:
                    chosen.append(queue.pop())
        return PromptSet(self.name, tuple(self.conversations[i] for i in sorted(chosen)))


def load_builtin(limit: int | None = None, seed: int = 0) -> PromptSet:
    """The set written for this project: eight categories of at least twelve prompts; chat has two turns."""
    folder = files("specbench.prompts").joinpath("builtin")
    conversations = []
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".jsonl"):
            conversations += _parse_lines(file.read_text(encoding="utf-8"), file.name, file.name)
    return PromptSet("builtin", tuple(conversations)).sample(limit, seed)


def load_jsonl(path: str | None, limit: int | None = None, seed: int = 0) -> PromptSet:
    """A file with one JSON object a line: "turns" (list of texts, or one text), and where known "id", "category"
    and "reference"."""
    file = _existing(path, "dataset=jsonl dataset.path=FILE", folder=False)
    conversations = _parse_lines(_text(file), str(file), file.stem)
    return PromptSet(file.stem, tuple(conversations)).sample(limit, seed)


def load_spec_bench(path: str | None, limit: int | None = None, seed: int = 0) -> PromptSet:
    """Spec-Bench's question file (Xia et al. 2024): question_id, category, turns, reference."""
    file = _existing(path, "dataset=spec_bench dataset.path=.../question.jsonl", folder=False)
    conversations = _parse_lines(_text(file), str(file), "spec_bench", "question_id")
    return PromptSet("spec_bench", tuple(conversations)).sample(limit, seed)


def load_table(
    name: str,
    hub_id: str,
    split: str,
    turns: str | Sequence[str],
    subset: str | None = None,
    reference: str | None = None,
    category: str | None = None,
    path: str | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> PromptSet:
    """A data set of the Hugging Face hub, or a local file or folder in its format (parquet, json, jsonl, csv).

    turns: a format string over the columns ("{question}"); or the name of a column that holds a list of turns, or one;
    or a list of columns whose texts, where not empty, are joined by blank lines.
    reference, category: names of columns; a category that is no column is taken as it stands.
    """
    rows = _local_rows(path, split) if path else _hub_rows(hub_id, subset, split)
    conversations = []
    for index, row in enumerate(rows):
        asked = _fill(turns, row, name)
        label = str(row[category]) if category in row else (category or name)
        answer = row.get(reference) if reference else None
        conversations.append(
            Conversation(
                f"{name}-{index:05d}", label, asked, _as_text(answer) if answer not in (None, "", []) else None
            )
        )
    return PromptSet(name, tuple(conversations)).sample(limit, seed)


def _parse_lines(text: str, file: str, name: str, id_field: str = "id") -> list[Conversation]:
    conversations = []
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: JSON may hold other line separators
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{file}, line {number}: not JSON ({error.msg} at column {error.colno})") from error
        turns = record.get("turns") if isinstance(record, dict) else None
        turns = [turns] if isinstance(turns, str) else turns
        if not turns or not isinstance(turns, list) or not all(isinstance(t, str) and t for t in turns):
            raise ConfigError(f'{file}, line {number}: needs "turns", a list of texts')
        reference = record.get("reference")
        conversations.append(
            Conversation(
                str(record.get(id_field, f"{name}-{number:05d}")),
                str(record.get("category", name)),
                tuple(turns),
                None if reference is None else _as_text(reference),
            )
        )
    return conversations


def _fill(turns: str | Sequence[str], row: dict[str, Any], name: str) -> tuple[str, ...]:
    """The turns of a row; see ``load_table``."""
    try:
        if not isinstance(turns, str):
            return ("\n\n".join(row[column] for column in turns if row[column]),)
        if "{" in turns:
            return (turns.format_map(row),)
        asked = row[turns]
        return (asked,) if isinstance(asked, str) else tuple(asked)
    except KeyError as error:
        missing = error.args[0]
    raise ConfigError(f"data set {name} has no column {missing!r}; it has {', '.join(sorted(row))}. Set dataset.turns")


def _as_text(reference: Any) -> str:
    return reference if isinstance(reference, str) else json.dumps(reference, ensure_ascii=False)


def _existing(path: str | None, usage: str, folder: bool = True) -> Path:
    if not path:
        raise ConfigError(f"this data set needs a file: {usage}")
    place = Path(path).expanduser()
    if not place.exists():
        raise ConfigError(f"dataset.path={path} does not exist; usage: {usage}")
    if place.is_dir() and not folder:
        raise ConfigError(f"dataset.path={path} is a folder; usage: {usage}")
    return place


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: byte {error.start} does not decode") from error


def _local_rows(path: str, split: str) -> Sequence[dict[str, Any]]:
    """Rows of a local file, or of a folder's files of the first kind it has; of these, where some name the split
    (train-00000-of-00001.parquet), only those."""
    from datasets import disable_progress_bars, load_dataset

    place = _existing(path, "dataset.path=FILE_OR_FOLDER")
    files = sorted(p for p in place.rglob("*") if p.is_file()) if place.is_dir() else [place]
    suffix = next((s for s in TABLE_KINDS if any(p.suffix == s for p in files)), None)
    if suffix is None:
        raise ConfigError(f"dataset.path={path} holds no {', '.join(TABLE_KINDS)} file")
    data = [str(p) for p in files if p.suffix == suffix]
    named = [p for p in data if re.search(rf"(?<![a-z]){re.escape(split)}(?![a-z])", Path(p).name)]
    disable_progress_bars()
    try:
        return load_dataset(
            TABLE_KINDS[suffix], data_files=named or data, split="train"
        )  # "train" is what the library calls files
    except Exception as error:  # the library raises many kinds, all meaning that the file does not parse
        raise ConfigError(f"dataset.path={path} cannot be read: {error.__cause__ or error}") from error


def _hub_rows(hub_id: str, subset: str | None, split: str) -> Sequence[dict[str, Any]]:
    from datasets import load_dataset

    try:
        return load_dataset(hub_id, subset, split=split)
    except Exception as error:  # no network, no such set, gated: the library raises many kinds
        raise ConfigError(
            f"cannot fetch data set {hub_id} from the Hugging Face hub: {type(error).__name__}: {error}. "
            "With no network, give a local copy in the same format: dataset.path=FILE_OR_FOLDER"
        ) from error
