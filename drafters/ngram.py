"""N-gram drafting, also known as prompt lookup: what followed the last n tokens when they occurred before?

Saxena 2023 (prompt lookup decoding). The longest suffix of the text, of ``max_n`` down to ``min_n`` tokens, that occurs
earlier in prompt or output is found, and the tokens that followed it there are proposed. Costs no model pass.
"""

import numpy as np

from drafters.model_free import cut_at_end, draft_rows
from specbench.drafting import Batch, Drafter
from specbench.errors import ConfigError
from specbench.model import CausalLM
from specbench.verification import Draft

MATCHES = ("first", "latest", "most_frequent")


class NGram(Drafter):
    """Copies what followed the longest earlier occurrence of the current suffix.

    match: which occurrence, if there are several: the ``first``, the ``latest``, or the latest of those followed by
    the ``most_frequent`` next token.
    """

    def __init__(self, min_n: int = 1, max_n: int = 4, match: str = "latest"):
        if not 1 <= min_n <= max_n:
            raise ConfigError(f"drafter.min_n={min_n} and drafter.max_n={max_n}: needs 1 <= min_n <= max_n")
        if match not in MATCHES:
            raise ConfigError(f"drafter.match={match} is unknown; choices: {', '.join(MATCHES)}")
        self.min_n = min_n
        self.max_n = max_n
        self.match = match
        self._end_ids: frozenset[int] = frozenset()

    def bind(self, target: CausalLM) -> None:
        """Learn the target's end ids."""
        self._end_ids = target.eos_ids

    def propose(self, batch: Batch, k: int) -> Draft:
        """Per row, the continuation of the longest match; nothing where no suffix occurs earlier."""
        return draft_rows(batch, k, lambda row: self.continuation(batch.text(row), k))

    def continuation(self, text: np.ndarray, k: int) -> list[int]:
        """Up to ``k`` tokens that followed the longest suffix of ``text`` where it occurred before.

        >>> NGram().continuation(np.array([7, 8, 9, 5, 7, 8]), k=3)
        [9, 5, 7]
        """
        ends = np.flatnonzero(text[:-1] == text[-1])  # where a match of the last n tokens ends
        longest = ends[:0]
        for n in range(1, self.max_n + 1):
            if n > 1:
                ends = ends[ends >= n - 1]
                ends = ends[text[ends - n + 1] == text[-n]]
            if not len(ends):
                break
            if n >= self.min_n:
                longest = ends
        if not len(longest):
            return []
        start = self._choose(text, longest + 1)
        return list(cut_at_end(text[start : start + k].tolist(), self._end_ids))

    def _choose(self, text: np.ndarray, follows: np.ndarray) -> int:
        if self.match == "first":
            return int(follows[0])
        if self.match == "latest":
            return int(follows[-1])
        tokens, counts = np.unique(text[follows], return_counts=True)
        best = tokens[counts == counts.max()]
        return int(follows[np.isin(text[follows], best)][-1])
