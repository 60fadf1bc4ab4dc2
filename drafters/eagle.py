"""EAGLE-3: one decoder block that recurses on a feature (Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of
Large Language Models via Training-Time Test"), drafting a chain.

Legend: B rows, S tokens, m taps, D width of the head, F = m * the target's width.

    h = fc([tap_1; ...; tap_m])                     true features; after the first step h is the block's own output
    a = [input_layernorm(emb(token)); hidden_norm(h)]         what attention reads, 2D wide
    h = h + attention(a);  h = h + mlp(post_attention_layernorm(h));  further blocks, if any, are plain
    logits = head(norm(h))

Published heads differ in options, which ``Options`` names as they are named in the field.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from drafters import initial
from drafters.blocks import Block, Memory, RMSNorm, Rotation, Shape
from drafters.checkpoints import eagle3
from drafters.checkpoints.files import Loaded, Written
from drafters.draft_model import DraftModel, InputEmbedding, OutputHead
from drafters.neural import Neural, Passages, Sum
from drafters.recursive import Cell, Recursion
from specbench.errors import ConfigError
from specbench.model import CausalLM


@dataclass(frozen=True)
class Spec:
    """What an EAGLE-3 head is made of.

    taps: the residual streams it reads, by number of blocks before them. target_width: theirs. vocabulary: rows of its
    own output head; None to use the target's. embeddings: rows of its own embedding table. norm_before_residual: what
    is added to is the normed h. norm_before_fc: one norm over the joined taps. tap_norms: one norm per tap.
    norm_output: the normed output is recursed on (EAGLE-3.1). every_block: all blocks read the token, not the first
    alone (DeepSpec). Without fuse there is no fc, and the one feature is the target's after its final norm; without
    token_norm or final_norm there is no input_layernorm, or norm (NVIDIA)."""

    shape: Shape
    taps: tuple[int, ...]
    target_width: int
    vocabulary: int | None = None
    embeddings: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    tap_norms: bool = False
    norm_output: bool = False
    every_block: bool = False
    fuse: bool = True
    fc_bias: bool = False
    token_norm: bool = True
    final_norm: bool = True

    def model(self, target: CausalLM) -> DraftModel:
        """The head, its weights not set."""
        width = self.shape.width
        return DraftModel(InputEmbedding(width, self.embeddings), EagleCell(self), OutputHead(width, self.vocabulary))


@dataclass(frozen=True)
class Options:
    """Of a new head. taps: None for (2, N/2, N-3), of N blocks of the target (Li et al. 2025). vocabulary: size of the
    draft vocabulary, None for all tokens. rope_theta: None for the target's own. grouped: query heads share key heads
    as in the target."""

    taps: Sequence[int] | None = None
    layers: int = 1
    vocabulary: int | None = None
    rope_theta: float | None = None
    grouped: bool = True
    head_norms: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    tap_norms: bool = False
    norm_output: bool = False

    def spec(self, target: CausalLM) -> Spec:
        """For a head as wide as ``target``. Raises ConfigError for what cannot be."""
        taps = tuple(self.taps) if self.taps is not None else default_taps(len(target.blocks))
        if not taps:
            raise ConfigError("drafter.network.taps=[] gives the head nothing to read; null takes the usual three")
        initial.check_layers(self.layers)
        if self.norm_before_fc and self.tap_norms:
            raise ConfigError("drafter.network.norm_before_fc and .tap_norms exclude each other; choose one")
        initial.check_vocabulary(self.vocabulary, target)
        rope = {} if self.rope_theta is None else {"rope": {"rope_type": "default", "rope_theta": self.rope_theta}}
        shape = initial.target_shape(target, layers=self.layers, head_norms=self.head_norms, **rope)
        return Spec(
            shape if self.grouped else replace(shape, kv_heads=shape.heads),
            taps,
            target.width,
            self.vocabulary,
            norm_before_residual=self.norm_before_residual,
            norm_before_fc=self.norm_before_fc,
            tap_norms=self.tap_norms,
            norm_output=self.norm_output,
        )


class TokenBlock(Block):
    """A block whose attention reads the token beside the residual stream."""

    def __init__(self, spec: Spec):
        super().__init__(spec.shape, 2 * spec.shape.width, input_norm=spec.token_norm)
        self.hidden_norm = RMSNorm(spec.shape.width, spec.shape.eps)
        self.norm_before_residual = spec.norm_before_residual

    def read_token(self, embeddings: Tensor, x: Tensor, rotation: Rotation, memory: Memory, mask: Tensor) -> Tensor:
        """Embedded tokens and residual stream [B, S, D] -> [B, S, D]."""
        normed = self.hidden_norm(x)
        reads = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)
        return self(normed if self.norm_before_residual else x, rotation, memory, mask, reads)


class EagleCell(Cell):
    """See the top of the file."""

    def __init__(self, spec: Spec):
        super().__init__(spec.shape)
        shape, joint = spec.shape, len(spec.taps) * spec.target_width
        self.spec = spec
        self.fc = nn.Linear(joint, shape.width, bias=spec.fc_bias) if spec.fuse else nn.Identity()
        self.input_norm = RMSNorm(joint, shape.eps) if spec.norm_before_fc else nn.Identity()
        self.fc_norm = nn.ModuleList(RMSNorm(spec.target_width, shape.eps) for _ in spec.taps if spec.tap_norms)
        self.layers = nn.ModuleList(
            TokenBlock(spec) if i == 0 or spec.every_block else Block(shape) for i in range(shape.layers)
        )
        self.norm = RMSNorm(shape.width, shape.eps) if spec.final_norm else nn.Identity()

    def encode(self, features: Tensor) -> Tensor:
        """features [B, S, F], taps side by side -> [B, S, D]."""
        features = self.input_norm(features)
        if len(self.fc_norm):
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def step(
        self, embeddings: Tensor, features: Tensor, rotation: Rotation, memories: Sequence[Memory], mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See ``Cell``."""
        x = features
        for block, memory in zip(self.layers, memories, strict=True):
            if isinstance(block, TokenBlock):
                x = block.read_token(embeddings, x, rotation, memory, mask)
            else:
                x = block(x, rotation, memory, mask)
        out = self.norm(x)
        return out, out if self.spec.norm_output else x


class Eagle(Neural):
    """Drafts with an EAGLE-3 head; see ``Neural``."""

    spec_type = Spec
    family = "eagle"

    def __init__(
        self,
        checkpoint: str | None = None,
        proposal: str = "greedy",
        layer_ids: str = "auto",
        network: Options | None = None,
    ):
        """``layer_ids``: how a checkpoint counts its taps where its layout leaves that open, ``streams`` (i: after i
        blocks) or ``outputs`` (i: of block i, counted from 0); ``auto`` reads them as vLLM does."""
        super().__init__(checkpoint, proposal, network or Options(), Options())
        if layer_ids not in eagle3.LAYER_IDS:
            raise ConfigError(f"drafter.layer_ids={layer_ids} is unknown; choices: {', '.join(eagle3.LAYER_IDS)}")
        self._layer_ids = layer_ids

    def read(self, path: str, target: CausalLM) -> Loaded:
        """See ``checkpoints.eagle3``."""
        return eagle3.read(path, target, self._layer_ids)

    def write(self, model: DraftModel, target: CausalLM) -> Written:
        """See ``checkpoints.eagle3``."""
        return eagle3.write(model, self.spec, target)

    def begin(self, model: DraftModel, target: CausalLM) -> None:
        """As the target's last block on its last tap, attention on the token that is read."""
        cell = model.network
        for block in cell.layers:
            initial.start_block(block, target)
            if isinstance(block, TokenBlock):
                initial.attend_to_own(block.self_attn, target.width)
                if isinstance(block.input_layernorm, RMSNorm):
                    nn.init.ones_(block.input_layernorm.weight)  # it reads embeddings, as no block of the target does
        nn.init.zeros_(cell.fc.weight)
        cell.fc.weight[:, -target.width :].fill_diagonal_(1)
        initial.start_norm(cell.layers[0].hidden_norm, getattr(target.blocks[-1], "input_layernorm", None))
        initial.start_norm(cell.norm, target.final_norm)
        initial.start_head(model.head, target)

    def last_sum(self, model: DraftModel) -> Sum:
        """What is made of the taps and of the token in turn, as neither waits for the other; then the rest."""
        cell = model.network
        token, *rest = [linear for block in cell.layers for linear in initial.added(block)]
        features = [cell.fc] if self.spec.fuse else []
        return Sum(cell.norm, [*features, token, *features, token, *rest])

    def make_loop(self, model: DraftModel, target: CausalLM) -> Recursion:
        """Taps side by side, or the one feature that the target's head reads."""

        return Recursion(model.network, model, target, self.proposal, self.features, self.taps, "the EAGLE-3 head")

    def features(self, streams: Tensor, target: CausalLM) -> Tensor:
        """See ``make_loop``."""
        return streams.flatten(2) if self.spec.fuse else target.norm(streams[:, :, 0])

    def hidden(self, model: DraftModel, target: CausalLM, passages: Passages, k: int) -> Sequence[Tensor]:
        """See ``recursive.Cell``."""
        features = self.features(passages.streams, target)
        return model.network.unroll(model.embedding(passages.tokens), features, k, passages.at)


def default_taps(blocks: int) -> tuple[int, ...]:
    """Low, middle and high, of a target of so many ``blocks``.

    >>> default_taps(32)
    (2, 16, 29)
    """
    return tuple(max(tap, 0) for tap in (min(2, blocks), blocks // 2, blocks - 3))
