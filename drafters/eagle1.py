"""EAGLE-1: one decoder block that predicts the target's next feature (Li et al. 2024, "EAGLE: Speculative Sampling
Requires Rethinking Feature Uncertainty"), drafting a chain.

Legend: B rows, S tokens, D the target's width.

    h = fc([emb(token); feature])        the feature is what the target's head reads, after its final norm
    h = block(h), whose attention reads h itself: the first block has no norm in front
    logits = head(h)                     the target's head, with no norm: h is a feature itself, and recursed on
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafters import initial
from drafters.blocks import Block, Memory, Rotation, Shape
from drafters.checkpoints import eagle1
from drafters.checkpoints.files import Loaded, Written
from drafters.draft_model import DraftModel, InputEmbedding, OutputHead
from drafters.neural import Neural, Passages
from drafters.recursive import Cell, Recursion
from specbench.model import CausalLM


@dataclass(frozen=True)
class Spec:
    """What an EAGLE-1 head is made of. taps: the last residual stream. embeddings: rows of its own table, None to use
    the target's. bias: ``fc`` has one."""

    shape: Shape
    taps: tuple[int, ...]
    embeddings: int | None = None
    bias: bool = True

    def model(self, target: CausalLM) -> DraftModel:
        """The head, its weights not set."""
        width = self.shape.width
        return DraftModel(InputEmbedding(width, self.embeddings), Eagle1Cell(self), OutputHead(width))


@dataclass(frozen=True)
class Options:
    """Of a new head."""

    layers: int = 1
    bias: bool = True

    def spec(self, target: CausalLM) -> Spec:
        """For a head as wide as ``target``."""
        initial.check_layers(self.layers)
        return Spec(initial.target_shape(target, layers=self.layers), (len(target.blocks),), bias=self.bias)


class Eagle1Cell(Cell):
    """See the top of the file."""

    def __init__(self, spec: Spec):
        super().__init__(spec.shape)
        width = spec.shape.width
        self.fc = nn.Linear(2 * width, width, bias=spec.bias)
        self.layers = nn.ModuleList(Block(spec.shape, input_norm=i > 0) for i in range(spec.shape.layers))

    def encode(self, features: Tensor) -> Tensor:
        """A feature of the target's is like one of its own."""
        return features

    def step(
        self, embeddings: Tensor, features: Tensor, rotation: Rotation, memories: Sequence[Memory], mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See ``Cell``."""
        x = self.fc(torch.cat((embeddings, features), dim=-1))
        for block, memory in zip(self.layers, memories, strict=True):
            x = block(x, rotation, memory, mask)
        return x, x


class Eagle1(Neural):
    """Drafts with an EAGLE-1 head; see ``Neural``."""

    spec_type = Spec
    family = "eagle1"

    def __init__(self, checkpoint: str | None = None, proposal: str = "greedy", network: Options | None = None):
        super().__init__(checkpoint, proposal, network or Options(), Options())

    def read(self, path: str, target: CausalLM) -> Loaded:
        """See ``checkpoints.eagle1``."""
        return eagle1.read(path, target)

    def write(self, model: DraftModel, target: CausalLM) -> Written:
        """See ``checkpoints.eagle1``."""
        return eagle1.write(model, self.spec, target)

    def begin(self, model: DraftModel, target: CausalLM) -> None:
        """As the target's last block on its feature, the token's embedding nearly unheard."""
        cell = model.network
        for block in cell.layers:
            initial.start_block(block, target)
        nn.init.normal_(cell.fc.weight, std=initial.SPREAD)
        cell.fc.weight[:, target.width :].fill_diagonal_(1)
        if cell.fc.bias is not None:
            nn.init.zeros_(cell.fc.bias)

    def make_loop(self, model: DraftModel, target: CausalLM) -> Recursion:
        """Features as the target's head reads them."""

        return Recursion(model.network, model, target, self.proposal, self.features, self.taps, "the EAGLE-1 head")

    def features(self, streams: Tensor, target: CausalLM) -> Tensor:
        """See ``make_loop``."""
        return target.norm(streams[:, :, 0])

    def hidden(self, model: DraftModel, target: CausalLM, passages: Passages, k: int) -> Sequence[Tensor]:
        """See ``recursive.Cell``."""
        features = self.features(passages.streams, target)
        return model.network.unroll(model.embedding(passages.tokens), features, k, passages.at)
