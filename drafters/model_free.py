"""What the drafters without a network share: they work on token ids on the host, one row at a time."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from specbench.drafting import Batch
from specbench.verification import Draft


def draft_rows(batch: Batch, k: int, propose_row: Callable[[int], Sequence[int]]) -> Draft:
    """The deterministic draft made of ``propose_row(row)``, at most ``k`` token ids, for each active row.

    It is as wide as its longest row: where nothing is proposed the verify pass is one of plain decoding.
    """
    tokens = np.zeros((len(batch), k), dtype=np.int64)
    count = np.zeros(len(batch), dtype=np.int64)
    for row in range(len(batch)):
        if batch.active[row]:
            proposal = list(propose_row(row))[:k]
            count[row] = len(proposal)
            tokens[row, : len(proposal)] = proposal
    tokens = np.ascontiguousarray(tokens[:, : count.max()])
    made = (torch.from_numpy(array).to(batch.device, non_blocking=True) for array in (tokens, count))
    return Draft(*made)


def cut_at_end(proposal: Sequence[int], end_ids: frozenset[int]) -> Sequence[int]:
    """``proposal`` up to and including its first end-of-sequence id: nothing after it can be committed."""
    for i, token in enumerate(proposal):
        if token in end_ids:
            return proposal[: i + 1]
    return proposal
