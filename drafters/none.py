"""No drafting: plain autoregressive decoding, the baseline of every comparison."""

from specbench.drafting import Batch, Drafter
from specbench.verification import Draft


class NoDrafter(Drafter):
    """Proposes nothing, so each verify pass yields exactly one token."""

    max_k = 0

    def propose(self, batch: Batch, k: int) -> Draft:
        """An empty draft."""
        return Draft.empty(len(batch), batch.device)
