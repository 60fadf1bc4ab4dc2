"""Conversations of a target's own, to train its drafters on: a table of token ids, and a manifest of where they are
from.

    <folder>/conversations.parquet    id, kind, temperature, held_out, prompt, reply; a row per conversation
    <folder>/manifest.json            target, settings, counts, speeds, SHA-256 of the table

Ids are stored in 16 bits where the vocabulary allows it. A reply ends with the token that ended it, if one did.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specbench import record
from specbench.errors import ConfigError
from specbench.model import CausalLM
from specbench.packaged import file_sha256

SCHEMA_VERSION = 1
TABLE, MANIFEST = "conversations.parquet", "manifest.json"


@dataclass(frozen=True)
class Conversation:
    """A prompt as the target sees it, template and all, and its reply; token ids. temperature: 0 is greedy."""

    id: str
    kind: str
    temperature: float
    prompt: Sequence[int]
    reply: Sequence[int]
    held_out: bool = False

    @property
    def tokens(self) -> list[int]:
        """Prompt and reply."""
        return [*self.prompt, *self.reply]


@dataclass(frozen=True)
class Corpus:
    """Conversations with their manifest."""

    folder: Path
    manifest: Mapping[str, Any]
    conversations: Sequence[Conversation]

    @property
    def sha256(self) -> str:
        """Digest of the table."""
        return self.manifest["table_sha256"]

    @property
    def training(self) -> list[Conversation]:
        """Those to learn from."""
        return [c for c in self.conversations if not c.held_out]

    def held_out(self, temperature: float | None = None) -> list[Conversation]:
        """Those to validate on; of one temperature alone, if given."""
        return [c for c in self.conversations if c.held_out and temperature in (None, c.temperature)]


def identity(target: CausalLM) -> dict[str, Any]:
    """What makes ``target`` the model it is: its name, its files' SHA-256, and a quantisation."""
    return {"name": target.name, "files": dict(target.files), "quant": target.quant}


def default_folder(target: CausalLM) -> Path:
    """Where the data of a target are kept unless a user says otherwise."""
    return Path("results/training") / target.name / "data"


def check_target(found: Mapping[str, Any], target: CausalLM, what: str, remedy: str) -> None:
    """Raise ConfigError unless ``what`` belongs to ``target``, by its files: names may differ."""
    own = identity(target)
    if (found["files"], found["quant"]) != (own["files"], own["quant"]):
        raise ConfigError(
            f"{what} was made by {found['name']} with other weights than those of {target.name}; {remedy}"
        )


def write_table(
    path: Path, conversations: Sequence[Conversation], vocab_size: int, facts: Mapping[str, Any] | None = None
) -> None:
    """Write conversations as parquet, with ``facts`` about them; ``path`` appears as a whole or not at all."""
    ids = pa.list_(pa.uint16() if vocab_size <= 1 << 16 else pa.uint32())
    columns = {
        "id": pa.array([c.id for c in conversations], pa.string()),
        "kind": pa.array([c.kind for c in conversations], pa.string()).dictionary_encode(),
        "temperature": pa.array([c.temperature for c in conversations], pa.float32()),
        "held_out": pa.array([c.held_out for c in conversations], pa.bool_()),
        "prompt": pa.array([c.prompt for c in conversations], ids),
        "reply": pa.array([c.reply for c in conversations], ids),
    }
    scratch = path.with_name(f".{path.name}")
    table = pa.table(columns).replace_schema_metadata({"facts": json.dumps(facts or {})})
    pq.write_table(table, scratch, compression="zstd", compression_level=19)
    scratch.rename(path)


def read_table(path: Path) -> list[Conversation]:
    """The conversations of a file that ``write_table`` wrote. Raises ConfigError for one that is not whole."""
    try:
        rows = pq.read_table(path).to_pydict()
        columns = (rows[name] for name in ("id", "kind", "temperature", "prompt", "reply", "held_out"))
        return [Conversation(*row) for row in zip(*columns, strict=True)]
    except (OSError, pa.ArrowInvalid, KeyError) as error:
        raise ConfigError(f"{path} is damaged ({error}); remove it and make the data again") from error


def read_facts(path: Path) -> dict[str, Any]:
    """The facts that ``write_table`` was given."""
    return json.loads(pq.read_schema(path).metadata[b"facts"])


def write(folder: Path, conversations: Sequence[Conversation], target: CausalLM, facts: Mapping[str, Any]) -> Corpus:
    """Write a corpus to ``folder``; ``facts`` go into its manifest."""
    write_table(folder / TABLE, conversations, target.vocab_size)
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "target": identity(target),
        **facts,
        "counts": counts(conversations),
        "table_sha256": file_sha256(folder / TABLE),
    }
    record.write_file(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return Corpus(folder, manifest, conversations)


def read(folder: Path, target: CausalLM) -> Corpus:
    """The corpus in ``folder``. Raises ConfigError if there is none, if it is damaged, or another target's."""
    remedy = f"make some with python -m drafters.training.data target=… out={folder}"
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        raise ConfigError(f"data={folder} holds no finished training data; {remedy}") from None
    except ValueError as error:
        raise ConfigError(f"{folder / MANIFEST} is not JSON: {error}") from error
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(f"data={folder} has another schema version than {SCHEMA_VERSION}; {remedy}")
    check_target(manifest["target"], target, f"data={folder}", "make this target's own: another folder as data=")
    if not (folder / TABLE).exists() or file_sha256(folder / TABLE) != manifest["table_sha256"]:
        raise ConfigError(f"{folder / TABLE} is not the table that its manifest describes; make the data again")
    return Corpus(folder, manifest, read_table(folder / TABLE))


def counts(conversations: Sequence[Conversation]) -> dict[str, Any]:
    """How much there is: conversations and tokens, and conversations by kind."""
    kinds = sorted({c.kind for c in conversations})
    return {
        "conversations": len(conversations),
        "held_out": sum(c.held_out for c in conversations),
        "prompt_tokens": sum(len(c.prompt) for c in conversations),
        "reply_tokens": sum(len(c.reply) for c in conversations),
        "greedy_reply_tokens": sum(len(c.reply) for c in conversations if c.temperature == 0),
        "by_kind": {kind: sum(c.kind == kind for c in conversations) for kind in kinds},
    }


def frequencies(conversations: Sequence[Conversation], vocab_size: int) -> np.ndarray:
    """How often each token occurs in the replies, [V]."""
    replies = [np.asarray(c.reply, dtype=np.int64) for c in conversations]
    return np.bincount(np.concatenate(replies), minlength=vocab_size)
