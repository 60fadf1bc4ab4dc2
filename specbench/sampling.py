"""From logits to the law of the next token, and from the law to the token.

Legend: N leading dimensions of any kind, V vocabulary.

One ``Sampling`` serves the baseline, the target's verification and the drafter's proposals, so that no arm can draw
under another law than the one it is judged by. Transformations follow the order of Hugging Face's ``generate``:
repetition penalty, temperature, top-k, top-p, min-p.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specbench.errors import ConfigError

MIN_TEMPERATURE = 1e-3  # below, logits overflow; use greedy


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. ``temperature=0`` is greedy decoding.

    top_k=0, top_p=1, min_p=0 and repetition_penalty=1 leave the law as it is.
    Sources: top-p, Holtzman et al. 2020; min-p, Nguyen et al. 2024; repetition penalty, Keskar et al. 2019.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < math.inf:
            raise ConfigError(
                f"sampling.temperature={self.temperature} is neither 0 (greedy) nor {MIN_TEMPERATURE} or more; "
                "1 is the model's own law"
            )
        if self.top_k < 0:
            raise ConfigError(f"sampling.top_k={self.top_k} is negative; 0 keeps all tokens")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"sampling.top_p={self.top_p} is not in (0, 1]; 1 keeps all tokens")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"sampling.min_p={self.min_p} is not in [0, 1]; 0 keeps all tokens")
        if self.repetition_penalty <= 0:
            raise ConfigError(f"sampling.repetition_penalty={self.repetition_penalty} must be positive; 1 is none")

    @property
    def greedy(self) -> bool:
        """Whether the law puts everything on the most likely token."""
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """Whether the law depends on which tokens occurred before."""
        return self.repetition_penalty != 1

    def scores(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Logits [N, V] after penalty, temperature and truncation, float32; -inf marks excluded tokens.

        ``seen`` [N, V] bool marks the tokens that occurred before; needed when ``needs_history``.
        """
        scores = logits.float()
        if self.needs_history:
            if seen is None:
                raise ValueError("repetition_penalty needs the tokens seen so far")
            penalised = torch.where(scores > 0, scores / self.repetition_penalty, scores * self.repetition_penalty)
            scores = torch.where(seen, penalised, scores)
        if self.greedy:
            return scores
        scores = scores / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            kth = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < kth, -torch.inf)
        if self.top_p < 1:
            probs = scores.softmax(dim=-1)
            scores = scores.masked_fill(probs < _nucleus_edge(probs, self.top_p), -torch.inf)
        if self.min_p > 0:
            probs = scores.softmax(dim=-1)
            scores = scores.masked_fill(probs < self.min_p * probs.amax(dim=-1, keepdim=True), -torch.inf)
        return scores

    def law(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Probabilities [N, V] float32 of the next token; one-hot where decoding is greedy."""
        scores = self.scores(logits, seen)
        if self.greedy:
            return torch.zeros_like(scores).scatter_(-1, _place_of_max(scores)[..., None], 1.0)
        return scores.softmax(dim=-1)

    def likeliest(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Most likely tokens [N] of the law; of equals the first."""
        return _place_of_max(self.scores(logits, seen) if self.needs_history else logits)

    def choose(self, logits: Tensor, noise: Tensor | None, seen: Tensor | None = None) -> Tensor:
        """Next tokens [N]: the argmax, or a draw from the law with uniform ``noise`` [N]."""
        if self.greedy:
            return self.likeliest(logits, seen)
        if noise is None:
            raise ValueError("sampling needs noise")
        return draw(self.law(logits, seen), noise)


def _place_of_max(scores: Tensor) -> Tensor:
    # the first of equals, as argmax; which on a CPU takes four times as long
    return scores.max(dim=-1).indices


def draw(law: Tensor, noise: Tensor) -> Tensor:
    """Draw tokens [N] from ``law`` [N, V] (need not sum to 1) by inverting its CDF at uniform ``noise`` [N] in [0, 1).

    Tokens of probability 0 are never drawn.
    """
    cdf = law.cumsum(dim=-1, dtype=torch.float64)
    total = cdf[..., -1:]
    # rounding may carry the level up to the total, which only impossible tokens exceed
    level = torch.minimum(noise.unsqueeze(-1).double() * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cdf, level, right=True).squeeze(-1)


def _nucleus_edge(probs: Tensor, top_p: float) -> Tensor:
    """Probability [N, 1] of the least likely token of the nucleus: the fewest most likely tokens whose mass reaches
    ``top_p``. Tokens tied with it are all kept, so that the nucleus does not depend on the order of a sort."""
    # on a GPU all are sorted: to see whether the guess was enough, the host would have to wait for it
    size = probs.shape[-1] if probs.is_cuda else min(NUCLEUS_GUESS, probs.shape[-1])
    while True:
        head = probs.topk(size, dim=-1).values  # descending
        mass = head.cumsum(dim=-1)
        if size == probs.shape[-1] or bool((mass[..., -1] >= top_p).all()):
            # a token is needed while the mass before it falls short
            needed = (mass - head < top_p).sum(dim=-1, keepdim=True)
            return head.gather(-1, needed - 1)
        size = min(8 * size, probs.shape[-1])


NUCLEUS_GUESS = 256  # tokens; most nuclei are smaller, and finding so many is far cheaper than a full sort

PURPOSES = ("target", "accept", "draft")


class Noise:
    """Uniform noise keyed by (seed, prompt, position, purpose), so that a prompt's output depends neither on the batch
    it sits in nor on the order of prompts. Position is the index, in the whole sequence, of the token being decided.

    Each prompt has its own Philox stream (Salmon et al. 2011); a longer table starts with the shorter one.
    """

    def __init__(self, seed: int, uids: Sequence[str], positions: int, device: torch.device | str = "cpu"):
        tables = [self._table(seed, uid, positions) for uid in uids]
        self._table_all = torch.from_numpy(np.stack(tables)).to(device)  # [B, T, purposes] float64

    def at(self, positions: Tensor, purpose: str) -> Tensor:
        """Uniforms [B, S] in [0, 1) for ``positions`` [B, S]."""
        rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
        return self._table_all[rows, positions, PURPOSES.index(purpose)]

    @staticmethod
    def _table(seed: int, uid: str, positions: int) -> np.ndarray:
        key = int.from_bytes(hashlib.blake2b(f"{seed}\0{uid}".encode(), digest_size=16).digest(), "little")
        return np.random.Generator(np.random.Philox(key=key)).random((positions, len(PURPOSES)))
