"""The target's residual streams over a corpus, which drafters read and are judged by: computed once and kept on disk,
or computed again for each batch where there is no room.

Legend: B conversations, T tokens of the longest, m taps, D width, V vocabulary.

    <folder>/tap-<i>.bin       [tokens, D] in the target's dtype, conversation after conversation
    <folder>/law.bin           [tokens, 2] float32: the logsumexp of the logits, and the most likely token
    <folder>/kept.json         what they belong to, and which taps are whole
    <folder>/done-<taps>       while they are computed: a byte per batch
"""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from drafters.training.corpus import Conversation, Corpus, identity
from specbench import record
from specbench.errors import RunError
from specbench.model import CausalLM

log = logging.getLogger("specbench.training")

BATCH_TOKENS = 4096  # of a forward
SPARE_BYTES = 2 << 30  # of the disk, left to others
LAW_BYTES = 8  # a token, in law.bin
DONE = b"\1"

Say = Callable[[int, int], None]  # batches done, of so many


@dataclass(frozen=True)
class Streams:
    """What the target makes of padded texts: its residual streams ``taps`` [B, T, m, D]; of its law after each token
    the logsumexp of the logits ``total`` [B, T] and the most likely token ``best`` [B, T], where replies are."""

    taps: Tensor
    total: Tensor
    best: Tensor


class Recomputed:
    """Runs the target for each batch."""

    def __init__(self, target: CausalLM, conversations: Sequence[Conversation], taps: Sequence[int]):
        self._target, self._conversations, self._taps = target, conversations, taps

    def of(self, indices: Sequence[int]) -> Streams:
        """Of the conversations with these numbers."""
        return run_target(self._target, [self._conversations[i] for i in indices], self._taps)


class Stored:
    """Reads what was kept."""

    def __init__(self, folder: Path, target: CausalLM, conversations: Sequence[Conversation], taps: Sequence[int]):
        lengths = [len(c.prompt) + len(c.reply) for c in conversations]
        self._starts = np.concatenate(([0], np.cumsum(lengths)))
        self._dtype, self._width, self._device = target.dtype, target.width, target.device
        self._files = [self._open(folder / f"tap-{tap}.bin", target.width, target.dtype) for tap in taps]
        self._law = self._open(folder / "law.bin", 2, torch.float32)

    def of(self, indices: Sequence[int]) -> Streams:
        """Of the conversations with these numbers."""
        spans = [(int(self._starts[i]), int(self._starts[i + 1])) for i in indices]
        size = max(end - start for start, end in spans)
        taps = torch.zeros(len(spans), size, len(self._files), self._width, dtype=self._dtype)
        law = torch.zeros(len(spans), size, 2)
        for row, (start, end) in enumerate(spans):
            for column, file in enumerate(self._files):
                taps[row, : end - start, column] = file[start:end]
            law[row, : end - start] = self._law[start:end]
        law = law.to(self._device)
        return Streams(taps.to(self._device), law[..., 0], law[..., 1].long())

    def write(self, indices: Sequence[int], found: Streams) -> None:
        """Keep what was computed of these conversations."""
        law = torch.stack((found.total, found.best.float()), dim=-1).cpu()  # ids are exact up to 2^24
        for row, i in enumerate(indices):
            start, end = int(self._starts[i]), int(self._starts[i + 1])
            for column, file in enumerate(self._files):
                file[start:end] = found.taps[row, : end - start, column].cpu()
            self._law[start:end] = law[row, : end - start]

    def _open(self, path: Path, width: int, dtype: torch.dtype) -> Tensor:
        count = int(self._starts[-1]) * width
        return torch.from_file(str(path), shared=True, size=count, dtype=dtype).view(-1, width)


def keep(
    target: CausalLM,
    corpus: Corpus,
    taps: Sequence[int],
    also: Sequence[int],
    folder: Path,
    budget: int,
    say: Say,
) -> "Source":
    """The streams of a corpus at ``taps``, the last one behind them, in ``folder``: those that are missing are computed
    first, together with ``also``, which others will want. Where they would take more than ``budget`` bytes, or more
    than the disk has, nothing is kept, and they are computed whenever they are needed.

    Several processes share the work; an interrupted one goes on where it was. Raises RunError where logits are not
    numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    conversations = corpus.conversations
    tokens = sum(len(c.prompt) + len(c.reply) for c in conversations)
    with _state(folder, target, corpus) as kept:
        entry = tokens * target.width * target.dtype.itemsize
        sizes = {**{f"tap-{tap}": entry for tap in kept}, "law": LAW_BYTES * tokens}
        if any(not _has(folder / f"{name}.bin", size) for name, size in sizes.items()):
            kept.clear()  # something was lost
        last = len(target.blocks)
        also = [tap for tap in also if tap <= last]  # of a deeper target
        wanted = [tap for tap in taps if tap not in kept]
        missing = sorted({t for t in (*wanted, *also, last) if t not in kept or t == last}) if wanted else []
        size = entry * len(kept | set(missing)) + sizes["law"]
        held = sum(path.stat().st_blocks * 512 for path in folder.glob("*.bin"))  # of files that are not whole yet too
        free = shutil.disk_usage(folder).free - SPARE_BYTES
    if missing and (size - held > free or size > budget):
        why = f"{max(free, 0) / 2**30:.1f} GiB is free" if size - held > free else f"streams_gb={budget / 2**30:g}"
        log.info(
            "the target's streams take %.1f GiB and %s: they are computed anew for every batch, which is slower",
            *(size / 2**30, why),
        )
        return Recomputed(target, conversations, taps)
    if missing:
        _compute(target, conversations, missing, folder, say)
        with _state(folder, target, corpus) as kept:
            kept |= set(missing)
    return Stored(folder, target, conversations, taps)


def _compute(
    target: CausalLM, conversations: Sequence[Conversation], taps: Sequence[int], folder: Path, say: Say
) -> None:
    """Compute streams and keep them, together with whatever other processes do the same.

    A byte per batch says whether it is done. To do it a process locks the byte, and its death unlocks it."""
    stored = Stored(folder, target, conversations, taps)
    batches = by_length(conversations, BATCH_TOKENS)
    path = folder / f"done-{'-'.join(map(str, taps))}"
    path.touch()
    with path.open("r+b", buffering=0) as file:
        if path.stat().st_size < len(batches):
            os.truncate(path, len(batches))
        for patience in (fcntl.LOCK_NB, 0):  # first what is free, then what others have begun and may not have ended
            for number, members in enumerate(batches):
                if os.pread(file.fileno(), 1, number) == DONE:
                    continue
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | patience, 1, number)
                except BlockingIOError:
                    continue
                try:
                    if os.pread(file.fileno(), 1, number) != DONE:
                        stored.write(members, run_target(target, [conversations[i] for i in members], taps))
                        os.pwrite(file.fileno(), DONE, number)
                finally:
                    fcntl.lockf(file, fcntl.LOCK_UN, 1, number)
                say(os.pread(file.fileno(), len(batches), 0).count(DONE), len(batches))
    path.unlink(missing_ok=True)


Source = Recomputed | Stored


@torch.inference_mode()
def run_target(target: CausalLM, members: Sequence[Conversation], taps: Sequence[int]) -> Streams:
    """Run whole conversations; ``taps`` ends with the last stream, of which the law of the replies is made.

    Raises RunError where the logits are not numbers."""
    assert taps[-1] == len(target.blocks)
    size = max(len(m.prompt) + len(m.reply) for m in members)
    tokens = torch.zeros(len(members), size, dtype=torch.long)
    for row, member in enumerate(members):
        tokens[row, : len(member.prompt) + len(member.reply)] = torch.tensor(member.tokens)
    with target.unrecorded():
        cache = target.new_cache(len(members), size)
        output = target.forward(tokens.to(target.device), cache, taps=tuple(taps), last_only=True)
    assert output.taps is not None
    total = torch.zeros(len(members), size, device=target.device)
    best = torch.zeros(len(members), size, dtype=torch.long, device=target.device)
    for row, member in enumerate(members):
        reply = slice(len(member.prompt) - 1, len(member.prompt) + len(member.reply))
        scores = target.head(target.norm(output.taps[row, reply, -1])).float()
        total[row, reply] = scores.logsumexp(dim=-1)
        best[row, reply] = scores.max(dim=-1).indices
    if not bool(total.isfinite().all()):
        raise RunError("the target's logits are NaN or infinite on the training data")
    return Streams(output.taps, total, best)


def _has(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size


def by_length(conversations: Sequence[Conversation], tokens: int) -> list[list[int]]:
    """Numbers of the conversations, in batches of up to so many ``tokens``, padding included: like lengths together."""
    order = sorted(range(len(conversations)), key=lambda i: len(conversations[i].prompt) + len(conversations[i].reply))
    return pack(order, conversations, tokens)


def pack(order: Sequence[int], conversations: Sequence[Conversation], tokens: int) -> list[list[int]]:
    """Cut ``order`` into batches of up to so many ``tokens``, padding included; a longer text is alone."""
    batches: list[list[int]] = []
    longest = 0
    for i in order:
        length = len(conversations[i].prompt) + len(conversations[i].reply)
        longest = max(longest, length)
        if not batches or longest * (len(batches[-1]) + 1) > tokens:
            batches.append([])
            longest = length
        batches[-1].append(i)
    return batches


@contextmanager
def _state(folder: Path, target: CausalLM, corpus: Corpus) -> Iterator[set[int]]:
    """The taps that are kept, to be changed; none, if what is there belongs to other data or another target."""
    belongs = {"target": identity(target), "dtype": str(target.dtype), "table_sha256": corpus.sha256}
    path = folder / "kept.json"
    with FileLock(folder / ".lock"):
        state = json.loads(path.read_text()) if path.exists() else {}
        if state.get("belongs") != belongs:
            for old in (*folder.glob("*.bin"), *folder.glob("done-*")):
                old.unlink()
            state = {"taps": []}
        kept = set(state["taps"])
        yield kept
        record.write_file(path, json.dumps({"belongs": belongs, "taps": sorted(kept)}))
