"""What to show for a token: its text, where the very tokenizer that a run used is at hand.

A record holds token numbers and the SHA-256 of its target's tokenizer. A tokenizer of another hash is never used, since
its words would be wrong ones; without one, numbers are shown.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

from specbench import packaged

FILE = "tokenizer.json"


def find(run: Mapping[str, Any], given: Sequence[Path]) -> Tokenizer | None:
    """The tokenizer of a run's target: among those ``given`` (files, or folders with one), where its configuration says
    that the target is, or in the caches of this machine. Nothing is downloaded."""
    digest = run["target"]["files"].get(FILE)
    for path in [*given, *_usual(run["config"].get("target") or {})]:
        file = path / FILE if path.is_dir() else path
        if file.is_file() and packaged.file_sha256(file) == digest:
            return Tokenizer.from_file(str(file))
    return None


def _usual(target: Mapping[str, Any]) -> Iterator[Path]:
    """Where the target of this configuration keeps its files, if it is on this machine."""
    path, digest = target.get("path"), target.get("sha256")
    if path:
        yield Path(path).expanduser()
        if re.fullmatch(r"[\w.-]+/[\w.-]+", path):
            cached = try_to_load_from_cache(path, FILE)
            if isinstance(cached, str):
                yield Path(cached)
    if digest:
        yield packaged.folder_of(target["name"], digest)


def pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> dict[int, str]:
    """The text of each token as it stands inside a line. Bytes that are only part of a character are shown by their
    hexadecimal value, tokens without a text by their name."""
    before = tokenizer.encode("a", add_special_tokens=False).ids  # at the start of a text some decoders drop a space
    start = tokenizer.decode(before, skip_special_tokens=False)
    found = {}
    for token in ids:
        name = tokenizer.id_to_token(token)
        text = tokenizer.decode([*before, token], skip_special_tokens=False)
        plain = text.removeprefix(start) if text.startswith(start) and "\ufffd" not in text else None
        found[token] = plain or _bytes(name) or name or number(token)
    return found


def number(token: int) -> str:
    """What to show for a token of which only the number is known."""
    return f"⟨{token}⟩"


def _bytes(name: str | None) -> str | None:
    """The text of a token that is named by its bytes, as byte-level and byte-fallback vocabularies do."""
    if name is None:
        return None
    fallback = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name)
    if fallback:
        raw = bytes.fromhex(fallback[1])
    elif all(letter in BYTE for letter in name):
        raw = bytes(BYTE[letter] for letter in name)
    else:
        return None
    return raw.decode(errors="backslashreplace")


def _byte_level() -> dict[str, int]:
    """The letter that stands for each byte in byte-level vocabularies (GPT-2): itself if it can be seen, else the next
    of those from U+0100."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


BYTE = _byte_level()
