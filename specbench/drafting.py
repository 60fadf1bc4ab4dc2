"""What a drafter is, and what it may read.

Legend: B rows, K drafted tokens, V vocabulary, D hidden width, m taps, P tokens of a prompt.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specbench.sampling import Noise, Sampling
from specbench.verification import Draft, Verdict

if TYPE_CHECKING:
    from specbench.model import CausalLM


@dataclass(frozen=True)
class Request:
    """One text to continue.

    uid: names the prompt in the record and keys its noise. tokens: the encoded prompt. reference: what plain decoding
    made of it, known only to drafters that ask for it (``needs_reference``).
    """

    uid: str
    tokens: Sequence[int]
    reference: Sequence[int] | None = None


@dataclass
class Batch:
    """The texts of a batch as far as they are committed. Everybody reads it; only the decode loop writes.

    tokens  [B, T] int64, on the host: prompt, then what was committed. lengths [B]: how much of each row counts.
    The last committed token of a row is not yet in the target's cache: the next verify pass starts with it.
    active  [B] bool: rows that are not finished. prompt_lengths [B].
    seen    [B, V] bool on the device, kept only for a law that needs history (repetition penalty).
    """

    requests: Sequence[Request]
    tokens: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    active: np.ndarray
    sampling: Sampling
    noise: Noise | None
    device: torch.device
    seen: Tensor | None = None

    def __len__(self) -> int:
        return len(self.requests)

    def text(self, row: int) -> np.ndarray:
        """All committed tokens of a row, prompt included."""
        return self.tokens[row, : self.lengths[row]]

    def generated(self, row: int) -> np.ndarray:
        """The committed tokens after the prompt."""
        return self.tokens[row, self.prompt_lengths[row] : self.lengths[row]]

    def last(self) -> Tensor:
        """Last committed token of each row, [B] int64 on the device."""
        return torch.from_numpy(self.tokens[np.arange(len(self)), self.lengths - 1]).to(self.device, non_blocking=True)

    def noise_at(self, offset: int, steps: int, purpose: str) -> Tensor | None:
        """Uniforms [B, steps] for the positions from ``length + offset`` on; None when greedy."""
        if self.noise is None:
            return None
        positions = torch.from_numpy(self.lengths + offset)[:, None] + torch.arange(steps)  # [B, steps]
        return self.noise.at(positions.to(self.device, non_blocking=True), purpose)

    def seen_after(self, drafted: Tensor) -> Tensor | None:
        """Which tokens occurred before each of K+1 positions, given drafts [B, K]: [B, K+1, V] bool, or None."""
        if self.seen is None:
            return None
        steps = [self.seen]
        for column in drafted.unbind(dim=1):
            steps.append(steps[-1].scatter(1, column[:, None], True))
        return torch.stack(steps, dim=1)


class Drafter(ABC):
    """Guesses what the target will say next. Subclass it in one file, name it in one YAML; see docs in README.

    A drafter keeps what it needs between rounds of a batch and forgets it in ``start``; nothing may survive from one
    prompt to the next unless ``stateful`` says so.

    taps: residual streams of the target it wants to see (see ``CausalLM.forward``).
    max_k: largest draft length, None for any. needs_reference: wants ``Request.reference``.
    stateful: what it drafts may depend on earlier prompts of the run.
    """

    taps: Sequence[int] = ()
    max_k: int | None = None
    needs_reference: bool = False
    stateful: bool = False

    def bind(self, target: "CausalLM") -> None:  # noqa: B027  (most drafters need nothing)
        """Called once, before anything else: check that the drafter fits the target and load what depends on it.

        Raises ConfigError when it does not fit.
        """

    def reset(self) -> None:  # noqa: B027
        """Forget every earlier prompt. Called when a measured run begins, after warm-up."""

    def prepare(self, rows: int, slots: int, k: int) -> None:  # noqa: B027
        """Called before any clock runs for ``rows`` texts of up to ``slots`` tokens, drafts included, of which ``k`` a
        round: whatever is slow the first time can be done here."""

    def start(self, batch: Batch, taps: list[Tensor] | None) -> None:  # noqa: B027
        """A new batch: prompts are prefilled and each row has its first token.

        ``taps``: per row [P, m, D], the residual streams at the prompt's positions; None if no taps were asked for.
        """

    @abstractmethod
    def propose(self, batch: Batch, k: int) -> Draft:
        """Up to ``k`` tokens to follow each row's text. Rows that are not active may hold anything."""

    def observe(self, batch: Batch, verdict: Verdict, taps: Tensor | None) -> None:  # noqa: B027
        """The round is over and ``batch`` holds what was committed.

        ``taps`` [B, K+1, m, D]: residual streams at the last committed token of the round before and its K drafts;
        row b's are those of committed text up to index ``verdict.accepted[b]``.
        """

    def warnings(self) -> list[str]:
        """What a reader of its results must know, each as a clause without a full stop."""
        return []

    def describe(self) -> dict[str, Any]:
        """Facts for the record: parameters, files, hashes."""
        return {}

    def checkpoint_folder(self) -> Path | None:
        """Where its weights were read from, if that is a folder."""
        return None

    def learned_from(self) -> Sequence[str]:
        """Texts of the prompts it was trained on, as far as they are at hand."""
        return ()
