"""A drafter whose hits and misses are written down beforehand, so that metrics can be checked by hand."""

from collections.abc import Sequence

from drafters.model_free import draft_rows
from specbench.drafting import Batch, Drafter
from specbench.errors import ConfigError
from specbench.model import CausalLM
from specbench.verification import Draft


class Scripted(Drafter):
    """Round r proposes ``script[r][0]`` tokens of which the first ``script[r][1]`` are right; then it starts over.

    Every row follows the same script, counted in rounds since its prompt began.
    """

    needs_reference = True

    def __init__(self, script: Sequence[Sequence[int]] = ((4, 4), (4, 0), (4, 2))):
        self.script = [tuple(pair) for pair in script]
        if not self.script or any(len(p) != 2 or not 0 <= p[1] <= p[0] for p in self.script):
            raise ConfigError(f"drafter.script={script}: needs pairs [proposed, right] with 0 <= right <= proposed")
        self._vocab_size = 0
        self._round = 0

    def bind(self, target: CausalLM) -> None:
        """Learn the vocabulary, to be wrong within it."""
        self._vocab_size = target.vocab_size

    def start(self, batch: Batch, taps: object) -> None:
        """Begin the script again."""
        self._round = 0

    def propose(self, batch: Batch, k: int) -> Draft:
        """What the script says for this round."""
        proposed, right = self.script[self._round % len(self.script)]
        self._round += 1
        return draft_rows(batch, k, lambda row: self._propose_row(batch, row, proposed, right))

    def _propose_row(self, batch: Batch, row: int, proposed: int, right: int) -> list[int]:
        reference = list(batch.requests[row].reference or ())
        at = len(batch.generated(row))
        upcoming = reference[at : at + proposed]
        upcoming += [0] * (proposed - len(upcoming))
        return [token if i < right else (token + 1) % self._vocab_size for i, token in enumerate(upcoming)]
