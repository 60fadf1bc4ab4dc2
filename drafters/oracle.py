"""The oracle: it knows what plain decoding said. An upper bound for every drafter, and a test of the metrics."""

import numpy as np

from drafters.model_free import draft_rows
from specbench.drafting import Batch, Drafter
from specbench.errors import ConfigError
from specbench.model import CausalLM
from specbench.verification import Draft


class Oracle(Drafter):
    """Replays the baseline's continuation, each token right with probability ``hit_rate``.

    With hit_rate 1, k+1 tokens per verify pass are committed until the text ends. Below 1 the tokens are wrong
    independently, so tokens per pass tend to (1 - h^(k+1)) / (1 - h). Wrong tokens are the right one's neighbours.
    """

    needs_reference = True

    def __init__(self, hit_rate: float = 1.0, seed: int = 0):
        if not 0 <= hit_rate <= 1:
            raise ConfigError(f"drafter.hit_rate={hit_rate} is not in [0, 1]")
        self.hit_rate = hit_rate
        self.seed = seed
        self._vocab_size = 0

    def bind(self, target: CausalLM) -> None:
        """Learn the vocabulary, to be wrong within it."""
        self._vocab_size = target.vocab_size

    def start(self, batch: Batch, taps: object) -> None:
        """Decide, per row and position, whether to be right."""
        self._right = []
        for request in batch.requests:
            key = [self.seed, *request.uid.encode()]
            size = len(request.reference or ())
            self._right.append(np.random.default_rng(key).random(size) < self.hit_rate)

    def propose(self, batch: Batch, k: int) -> Draft:
        """Per row, the next tokens of the reference."""
        return draft_rows(batch, k, lambda row: self._propose_row(batch, row, k))

    def _propose_row(self, batch: Batch, row: int, k: int) -> list[int]:
        reference = batch.requests[row].reference
        if reference is None:
            raise ValueError(f"the oracle has no reference for {batch.requests[row].uid}")
        at = len(batch.generated(row))
        right = self._right[row][at : at + k]
        return [
            token if hit else (token + 1) % self._vocab_size
            for token, hit in zip(reference[at : at + k], right, strict=True)
        ]
