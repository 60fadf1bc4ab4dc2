"""A drafting network between its two ends: embeddings and an output head, its own or the target's.

Legend: V the target's vocabulary, Vd the draft vocabulary, D width.

A small draft vocabulary makes a small model's head cheap: of a model of 135 million parameters with 49152 tokens, a
head over 8192 of them costs a sixth of a full one.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specbench.model import CausalLM
from specbench.prepack import prepack


class InputEmbedding(nn.Module):
    """Embeddings of tokens: from a table of its own, or from the target's."""

    def __init__(self, width: int, rows: int | None = None, scale: float | None = None):
        """``rows``: of a table of its own; None to use the target's. ``scale``: what the target's bare rows are
        multiplied by; None for whatever the target does (Gemma scales its embeddings)."""
        super().__init__()
        self.table = nn.Embedding(rows, width) if rows is not None else None
        self.scale = scale
        self._target: tuple[CausalLM, ...] = ()  # in a tuple: no submodule

    def bind(self, target: CausalLM) -> None:
        """Use the table of ``target`` where there is none of its own."""
        self._target = (target,)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...] -> [..., D]."""
        if self.table is not None:
            return self.table(tokens)
        if self.scale is None:
            return self._target[0].embed(tokens)
        return F.embedding(tokens, self._target[0].model.get_input_embeddings().weight) * self.scale


class OutputHead(nn.Module):
    """From hidden states to logits over the draft vocabulary: by a matrix of its own, or by the target's."""

    def __init__(self, width: int, rows: int | None = None, scale: float = 1.0, cap: float | None = None):
        """``rows``: Vd, of a matrix of its own; None to use the target's. ``scale``: logits are multiplied by it;
        ``cap``: then bent by a hyperbolic tangent to stay within +-cap."""
        super().__init__()
        self.scale, self.cap = scale, cap
        self.lm_head = nn.Linear(width, rows, bias=False) if rows is not None else None
        self.ids: Tensor | None  # target ids of the rows; None where they are all ids in their order
        self.register_buffer("ids", None)
        self._target: tuple[CausalLM, ...] = ()  # in a tuple: no submodule

    def bind(self, target: CausalLM) -> None:
        """Use the head of ``target`` where there is none of its own."""
        self._target = (target,)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., D], normed -> logits [..., Vd]."""
        logits = self._target[0].head(hidden) if self.lm_head is None else self.lm_head(hidden)
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


class DraftModel(nn.Module):
    """Embedding, network and head of a drafter."""

    def __init__(self, embedding: InputEmbedding, network: nn.Module, head: OutputHead):
        super().__init__()
        self.embedding = embedding
        self.network: Any = network
        self.head = head

    def bind(self, target: CausalLM) -> None:
        """Make ready to draft for ``target``: its device, its dtype, for inference only."""
        self.to(target.device, target.dtype).eval().requires_grad_(False)
        self.embedding.bind(target)
        self.head.bind(target)

    def pack(self) -> None:
        """Lay the weights out for the kernels; the model can no longer be saved or trained afterwards."""
        prepack(self)

    @property
    def parameters_own(self) -> int:
        """Number of parameters that are not the target's."""
        return sum(p.numel() for p in self.parameters())
