"""Medusa: heads that predict, from one feature of the target, the tokens further on (Cai et al. 2024, "Medusa: Simple
LLM Inference Acceleration Framework with Multiple Decoding Heads"), drafting the chain of each head's proposal.

Legend: B rows, K drafted tokens, D the target's width, Vd the draft vocabulary.

    x_i = h;  x_i = x_i + SiLU(W_ij x_i + b_ij) for j = 1..L;  logits_i = U_i x_i

The feature h at position t is what the target's own head reads to predict t+1; head i (from 0) predicts t+2+i. Heads do
not see each other's tokens. Each has its own U_i in published checkpoints; new heads share the target's, or one over a
draft vocabulary, of which an adapter this small can make good use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters import initial
from drafters.checkpoints import medusa
from drafters.checkpoints.files import Loaded, Written
from drafters.draft_model import DraftModel, InputEmbedding, OutputHead
from drafters.neural import Neural, Passages, Unrolled, gathered
from drafters.proposing import Proposal
from specbench.drafting import Batch
from specbench.errors import ConfigError
from specbench.model import CausalLM
from specbench.verification import Draft, Verdict


@dataclass(frozen=True)
class Spec:
    """What Medusa heads are made of. heads: how many. layers: residual layers of each (L). outputs: rows of
    a U_i of each head's own, if it has one; else they share vocabulary: rows of one U, None for the target's."""

    width: int
    taps: tuple[int, ...]
    heads: int
    layers: int = 1
    outputs: int | None = None
    vocabulary: int | None = None

    @property
    def drafts(self) -> int:
        """Most tokens that are drafted."""
        return self.heads

    def model(self, target: CausalLM) -> DraftModel:
        """The heads, their weights not set."""
        head = OutputHead(self.width, self.vocabulary)
        return DraftModel(InputEmbedding(self.width), MedusaHeads(self), head)


@dataclass(frozen=True)
class Options:
    """Of new heads. vocabulary: size of the draft vocabulary, None for all tokens."""

    heads: int = 4
    layers: int = 1
    vocabulary: int | None = None

    def spec(self, target: CausalLM) -> Spec:
        """For ``target``. Raises ConfigError for what cannot be."""
        if self.heads < 1:
            raise ConfigError(f"drafter.network.heads={self.heads} drafts nothing; give 1 or more")
        initial.check_layers(self.layers)
        initial.check_vocabulary(self.vocabulary, target)
        return Spec(target.width, (len(target.blocks),), self.heads, self.layers, vocabulary=self.vocabulary)


class MedusaHeads(nn.Module):
    """See the top of the file."""

    def __init__(self, spec: Spec):
        super().__init__()
        width = spec.width
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width) for _ in range(spec.layers)) for _ in range(spec.heads)
        )
        own = [] if spec.outputs is None else [nn.Linear(width, spec.outputs, bias=False) for _ in range(spec.heads)]
        self.outputs = nn.ModuleList(own)

    def forward(self, feature: Tensor, heads: int) -> Tensor:
        """feature [..., D] -> what the first ``heads`` heads make of it, [..., heads, D]."""
        return torch.stack(self.hidden(feature, heads), dim=-2)

    def hidden(self, feature: Tensor, heads: int) -> list[Tensor]:
        """feature [..., D] -> what each of the first ``heads`` heads makes of it [..., D]."""
        return [self.head(feature, i) for i in range(heads)]

    def head(self, feature: Tensor, i: int) -> Tensor:
        """feature [..., D] -> what head ``i`` makes of it [..., D]."""
        layers: Any = self.heads[i]
        for layer in layers:
            feature = feature + F.silu(layer(feature))
        return feature

    def logits(self, feature: Tensor, heads: int, head: OutputHead) -> list[Tensor]:
        """feature [..., D] -> of each of the first ``heads`` heads logits [..., Vd], by its own output or ``head``."""
        hidden = self.hidden(feature, heads)
        return [self.outputs[i](h) if len(self.outputs) else head(h) for i, h in enumerate(hidden)]


class Medusa(Neural):
    """Drafts with Medusa heads, one token each; see ``Neural``. Verification is exact; the lossy acceptance of the
    paper is not used."""

    spec_type = Spec
    family = "medusa"

    def __init__(self, checkpoint: str | None = None, proposal: str = "greedy", network: Options | None = None):
        super().__init__(checkpoint, proposal, network or Options(), Options())

    def read(self, path: str, target: CausalLM) -> Loaded:
        """See ``checkpoints.medusa``."""
        return medusa.read(path, target)

    def write(self, model: DraftModel, target: CausalLM) -> Written:
        """See ``checkpoints.medusa``."""
        return medusa.write(model, self.spec, target)

    def begin(self, model: DraftModel, target: CausalLM) -> None:
        """W = 0, so that each head begins as the target's own (Cai et al. 2024, section 2.1)."""
        for layer in [layer for head in model.network.heads for layer in head]:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        initial.start_head(model.head, target)

    def make_loop(self, model: DraftModel, target: CausalLM) -> "HeadByHead":
        """As many drafts as heads."""
        self.max_k = self.spec.heads
        return HeadByHead(model, target, self.proposal)

    def features(self, streams: Tensor, target: CausalLM) -> Tensor:
        """What the target's own head reads."""
        return target.norm(streams[:, :, 0])

    def hidden(self, model: DraftModel, target: CausalLM, passages: Passages, k: int) -> Sequence[Tensor]:
        """The first ``k`` heads, where they share an output."""
        feature = gathered(self.features(passages.streams, target), passages.at)
        return model.network.hidden(feature, k)

    def unroll(self, model: DraftModel, target: CausalLM, passages: Passages, k: int) -> Unrolled:
        """The first ``k`` heads, each with its own output if it has one."""
        feature = gathered(self.features(passages.streams, target), passages.at)
        return Unrolled(model.network.logits(feature, k, model.head))


class HeadByHead:
    """Drafts a token by each head, from one feature. See ``drafters.neural.Loop``."""

    def __init__(self, model: DraftModel, target: CausalLM, proposal: str):
        self._model, self._target, self._proposal = model, target, proposal

    def prepare(self, rows: int, slots: int, k: int) -> None:
        """There is no cache, and nothing is recorded."""

    def start(self, batch: Batch, taps: list[Tensor]) -> None:
        """Keep the feature of each prompt's last token."""
        self._feature = self._target.norm(torch.stack([streams[-1, 0] for streams in taps]))  # [B, D]

    def propose(self, batch: Batch, k: int) -> Draft:
        """The first k heads on the feature of the last token that the target has been through."""
        proposal = Proposal(batch, self._proposal, self._target.vocab_size, self._model.head.ids)
        for logits in self._model.network.logits(self._feature, k, self._model.head):
            proposal.add(logits)
        return proposal.draft()

    def observe(self, batch: Batch, verdict: Verdict, taps: Tensor) -> None:
        """Keep the feature of the last accepted token."""
        rows = torch.arange(len(batch), device=batch.device)
        self._feature = self._target.norm(taps[rows, verdict.accepted, 0])
