"""DFlash: a block of tokens drafted in one pass, from the target's features as context (Chen et al. 2026, "DFlash:
Block Diffusion for Flash Speculative Decoding").

Legend: B rows, S positions, K drafted tokens, b tokens of a block, m taps, D width of the head, F = m * the target's
width, n committed tokens of a row.

    C = hidden_norm(fc([tap_1; ...; tap_m]))               of every position the target has been through
    block = emb([anchor, MASK, MASK, ...])                 the anchor is the last committed token
    in each layer the block reads keys and values of C (as it is) and of itself (normed), in both directions
    logits_i = head(norm(h_i)) predict the token AT position i of the block

The anchor's own features do not exist yet, so the context is the n-1 positions before it, and stays in the cache; the
block's entries are written behind it and overwritten by the next context. ``anchor_first`` heads (as in DSpark) predict
the token AFTER position i, so that the anchor's position drafts as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafters import initial
from drafters.blocks import Block, Memory, RMSNorm, Rotary, Rotation, Shape, entry_widths, hide, in_cache, joined_to
from drafters.cached import Cached
from drafters.checkpoints import dflash
from drafters.checkpoints.files import Loaded, Written
from drafters.draft_model import DraftModel, InputEmbedding, OutputHead
from drafters.neural import Neural, Passages, Sum, Unrolled
from drafters.neural import Options as AnyOptions
from drafters.proposing import Proposal
from specbench.cache import places, write, written_slots
from specbench.drafting import Batch
from specbench.errors import ConfigError
from specbench.model import PREFILL_CHUNK, CausalLM
from specbench.verification import Draft, Verdict


@dataclass(frozen=True)
class Spec:
    """What a DFlash head is made of.

    taps: residual streams it reads. target_width: theirs. block: tokens of a block, anchor included. mask: id of the
    token that stands for what is to be drafted. anchor_first: position i of the block predicts the token after it.
    vocabulary: rows of its own output head; None to use the target's. embeddings: rows of its own table.
    embedding_scale: what the target's bare embeddings are multiplied by; None for whatever the target does.
    logit_scale, logit_cap: logits are multiplied, and bent to stay within +-cap."""

    shape: Shape
    taps: tuple[int, ...]
    target_width: int
    block: int
    mask: int
    anchor_first: bool = False
    vocabulary: int | None = None
    embeddings: int | None = None
    embedding_scale: float | None = None
    logit_scale: float = 1.0
    logit_cap: float | None = None

    @property
    def drafts(self) -> int:
        """Most tokens that one pass drafts."""
        return self.block if self.anchor_first else self.block - 1

    def ends(self) -> tuple[InputEmbedding, OutputHead]:
        """Embedding and head, their weights not set."""
        width = self.shape.width
        head = OutputHead(width, self.vocabulary, self.logit_scale, self.logit_cap)
        return InputEmbedding(width, self.embeddings, self.embedding_scale), head

    def model(self, target: CausalLM) -> DraftModel:
        """The network with its ends, its weights not set."""
        embedding, head = self.ends()
        return DraftModel(embedding, Backbone(self), head)


@dataclass(frozen=True)
class Options:
    """Of a new head. taps: residual streams by number of blocks, None for three spread over the target. mask: id of a
    token that texts do not contain, None for the target's own mask, padding or end token. inner: width inside the
    perceptrons, None for the target's. vocabulary: size of the draft vocabulary, None for all tokens."""

    taps: Sequence[int] | None = None
    layers: int = 2
    inner: int | None = None
    block: int = 8
    mask: int | None = None
    anchor_first: bool = False
    vocabulary: int | None = None

    def fields(self, target: CausalLM) -> dict[str, Any]:
        """What a ``Spec`` is made of, for a head as wide as ``target``. Raises ConfigError for what cannot be."""
        taps = tuple(self.taps) if self.taps is not None else default_taps(len(target.blocks), 3)
        if not taps:
            raise ConfigError("drafter.network.taps=[] gives the head no context; null takes three")
        if self.block < 2:
            raise ConfigError(f"drafter.network.block={self.block} drafts nothing; give 2 or more")
        if self.mask is not None and not 0 <= self.mask < target.vocab_size:
            raise ConfigError(
                f"drafter.network.mask={self.mask} is no token of {target.name}: 0..{target.vocab_size - 1}"
            )
        initial.check_layers(self.layers)
        initial.check_vocabulary(self.vocabulary, target)
        if self.inner is not None and self.inner < 1:
            raise ConfigError(f"drafter.network.inner={self.inner} is no width; give 1 or more, or null")
        inner = {} if self.inner is None else {"inner": self.inner}
        return {
            "shape": initial.target_shape(target, layers=self.layers, head_norms=True, **inner),
            "taps": taps,
            "target_width": target.width,
            "block": self.block,
            "mask": initial.mask_token(target) if self.mask is None else self.mask,
            "anchor_first": self.anchor_first,
            "vocabulary": self.vocabulary,
        }

    def spec(self, target: CausalLM) -> Spec:
        """See ``fields``."""
        return Spec(**self.fields(target))


class Backbone(nn.Module):
    """See the top of the file."""

    def __init__(self, spec: Spec):
        super().__init__()
        shape = spec.shape
        self.fc = nn.Linear(len(spec.taps) * spec.target_width, shape.width, bias=False)
        self.hidden_norm = RMSNorm(shape.width, shape.eps)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width, shape.eps)
        self.rotary = Rotary(shape)
        self.layers_kept = entry_widths(shape)

    def context(self, features: Tensor) -> Tensor:
        """features [B, S, F], taps side by side -> [B, S, D]."""
        return self.hidden_norm(self.fc(features))

    def forward(
        self,
        embeddings: Tensor,
        features: Tensor,
        fresh: Tensor,
        starts: Tensor,
        ids: Tensor,
        kept: list[Tensor],
        draft: bool,
    ) -> tuple[Tensor, ...]:
        """Append to the context, and draft.

        features [B, S, F] of the positions from ``starts`` [B] on, of which ``fresh`` [B] are true and the others
        padding; the embedded block [B, b, D] stands behind the true ones -> the block's hidden states [B, b, D],
        normed. Without ``draft`` nothing but the context is written, and its last entries are returned."""
        context = self.context(features)
        slots = written_slots(features, starts)
        rotation = self.rotary(slots, context)
        for block, layer in zip(self.layers, kept, strict=True):
            attention: Any = block.self_attn
            entries = attention.entries(context, rotation)
            write(layer, entries, places(slots, layer.shape[1]))
        if not draft:
            return (entries,)
        begin = starts + fresh
        slots = written_slots(embeddings, begin)
        rotation = self.rotary(slots, embeddings)
        end = begin[:, None] + embeddings.shape[1]
        mask = hide((ids < end)[:, None].expand(-1, embeddings.shape[1], -1), embeddings.dtype)  # [B, b, T']
        memories = [in_cache(layer, slots, ids.shape[0]) for layer in kept]
        return (self.draft(embeddings, rotation, memories, mask),)

    def draft(self, embeddings: Tensor, rotation: Rotation, memories: Sequence[Memory], mask: Tensor) -> Tensor:
        """The block's hidden states [B, b, D], normed."""
        x = embeddings
        for block, memory in zip(self.layers, memories, strict=True):
            x = block(x, rotation, memory, mask)
        return self.norm(x)

    def unroll(self, embeddings: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Blocks at many anchors at once, as in training.

        Embedded blocks [B, A, b, D] at the positions ``anchors`` [B, A] of a text with features [B, T, F] -> hidden
        states [B, A, b, D]. A block sees the context strictly before its anchor, and itself; no other block.
        """
        batch, count, size, _ = embeddings.shape
        length = features.shape[1]
        context = self.context(features)
        positions = torch.arange(length, device=features.device).expand(batch, -1)
        context_rotation = self.rotary(positions, context)
        x = embeddings.flatten(1, 2)  # [B, A*b, D]
        steps = torch.arange(size, device=features.device)
        rotation = self.rotary((anchors[..., None] + steps).flatten(1), x)
        before = positions[:, None] < anchors[..., None]  # [B, A, T]
        block_of = torch.arange(count, device=features.device).repeat_interleave(size)
        own = (block_of[:, None] == block_of).expand(batch, -1, -1)  # [B, A*b, A*b]
        mask = hide(torch.cat((before.repeat_interleave(size, dim=1), own), dim=-1), x.dtype)
        memories = []
        for block in self.layers:
            attention: Any = block.self_attn
            memories.append(joined_to([attention.entries(context, context_rotation)]))
        return self.draft(x, rotation, memories, mask).unflatten(1, (count, size))


class BlockDrafter(Neural):
    """What drafters with a ``Backbone`` share; see ``Neural``.

    whole_block: always show the network as many masks as it was trained with, and use the first k drafts; else a block
    of as many as are drafted, which costs less and is what serving engines do.
    """

    def __init__(
        self, checkpoint: str | None, proposal: str, whole_block: bool, network: AnyOptions, default: AnyOptions
    ):
        super().__init__(checkpoint, proposal, network, default)
        if not isinstance(whole_block, bool):
            raise ConfigError(f"drafter.whole_block={whole_block} is neither true nor false")
        self.whole_block = whole_block

    def features(self, streams: Tensor, target: CausalLM) -> Tensor:
        """Taps side by side."""
        return streams.flatten(2)

    def hidden(self, model: DraftModel, target: CausalLM, passages: Passages, k: int) -> Sequence[Tensor]:
        """Of the positions that draft."""
        return self.blocks(model, target, passages, k).unbind(dim=2)

    def last_sum(self, model: DraftModel) -> Sum:
        """All layers, reading what they were given to start with."""
        layers = [linear for block in model.network.layers for linear in initial.added(block)]
        return Sum(model.network.norm, layers, self.spec.drafts)

    def blocks(self, model: DraftModel, target: CausalLM, passages: Passages, k: int) -> Tensor:
        """Hidden states [B, A, K, D] of the positions that draft, in blocks behind each of the passages' positions."""
        first = 0 if self.spec.anchor_first else 1
        anchors = passages.at + 1
        blocks = torch.full((*anchors.shape, first + k), self.spec.mask, device=anchors.device)
        blocks[..., 0] = passages.tokens_after(1)
        features = self.features(passages.streams, target)
        return model.network.unroll(model.embedding(blocks), features, anchors)[:, :, first:]


class DFlash(BlockDrafter):
    """Drafts with a DFlash head; see ``BlockDrafter``."""

    spec_type = Spec
    family = "dflash"

    def __init__(
        self,
        checkpoint: str | None = None,
        proposal: str = "greedy",
        whole_block: bool = False,
        network: Options | None = None,
    ):
        super().__init__(checkpoint, proposal, whole_block, network or Options(), Options())

    def read(self, path: str, target: CausalLM) -> Loaded:
        """See ``checkpoints.dflash``."""
        return dflash.read(path, target)

    def write(self, model: DraftModel, target: CausalLM) -> Written:
        """See ``checkpoints.dflash``."""
        return dflash.write(model, self.spec, target)

    def begin(self, model: DraftModel, target: CausalLM) -> None:
        """Blocks as the target's last one, on its last tap."""
        begin_backbone(model, target)

    def make_loop(self, model: DraftModel, target: CausalLM) -> "BlockByBlock":
        """As many drafts as the block has room for."""
        self.max_k = self.spec.drafts
        return BlockByBlock(model, target, self.spec, self.proposal, self.whole_block, "the DFlash head")

    def unroll(self, model: DraftModel, target: CausalLM, passages: Passages, k: int) -> Unrolled:
        """Blocks of ``k`` drafts."""
        hidden = self.blocks(model, target, passages, k)
        # one product of two matrices: of tensors that do not lie in one piece linear layers copy their weight for each
        logits = model.head(hidden.flatten(0, 2)).unflatten(0, hidden.shape[:3])
        return Unrolled(logits.unbind(dim=2))


class BlockByBlock:
    """The drafting loop around a ``Backbone``. See ``drafters.neural.Loop``."""

    def __init__(self, model: DraftModel, target: CausalLM, spec: Spec, proposal: str, whole_block: bool, name: str):
        self._model, self._target, self._spec = model, target, spec
        self._proposal, self._whole_block = proposal, whole_block
        backbone = model.network
        self._run = Cached(backbone, target, backbone.layers_kept, name)

    def prepare(self, rows: int, slots: int, k: int) -> None:
        """Record the pass over the new context and a block."""
        self._cache = self._run.new_cache(rows, slots + self._spec.block)
        features = len(self._spec.taps) * self._spec.target_width
        for steps in (1, k + 1) if self._run.recorded else ():
            block = torch.full((rows, self._block(k)), self._spec.mask, device=self._target.device)
            given = (self._model.embedding(block), self._run.zeros(rows, steps, features))
            fresh = torch.zeros(rows, dtype=torch.long, device=self._target.device)
            self._run(self._cache, *given, fresh, writes=steps + block.shape[1], draft=True)

    def _block(self, k: int) -> int:
        """Tokens of a block that drafts k."""
        return self._spec.block if self._whole_block else max(1, k if self._spec.anchor_first else k + 1)

    def start(self, batch: Batch, taps: list[Tensor]) -> None:
        """Make the prompts' features context; the last of each row waits for the first round."""
        nothing = torch.zeros(1, 0, self._spec.shape.width, dtype=self._target.dtype, device=batch.device)
        last = []
        for row, streams in enumerate(taps):
            features = streams.flatten(1)[None]  # [1, P, F]
            for chunk in features[:, :-1].split(PREFILL_CHUNK, dim=1):
                if chunk.shape[1]:
                    count = torch.tensor([chunk.shape[1]], device=batch.device)
                    self._run(self._cache, nothing, chunk, count, writes=chunk.shape[1], row=row, draft=False)
                    self._cache.advance(torch.tensor(chunk.shape[1]), row=row)
            last.append(features[:, -1:])
        self._pending = torch.cat(last)  # [B, S, F]

    def propose(self, batch: Batch, k: int) -> Draft:
        """One pass over the new context and the block."""
        hidden = self._pass(batch, k)
        first = 0 if self._spec.anchor_first else 1
        return self.choose(batch, hidden[:, 0], hidden[:, first : first + k])

    def choose(self, batch: Batch, anchor: Tensor, hidden: Tensor) -> Draft:
        """Tokens by the hidden states [B, K, D] of the positions that draft; ``anchor`` [B, D] is the anchor's."""
        proposal = Proposal(batch, self._proposal, self._target.vocab_size, self._model.head.ids)
        if hidden.shape[1]:
            for logits in self._model.head(hidden).unbind(dim=1):
                proposal.add(logits)
        return proposal.draft()

    def observe(self, batch: Batch, verdict: Verdict, taps: Tensor) -> None:
        """Keep the features of the round; those of rejected drafts are padding."""
        self._pending = taps.flatten(2)

    def _pass(self, batch: Batch, k: int) -> Tensor:
        """Hidden states [B, b, D] of a block behind each row's text."""
        lag = torch.from_numpy(batch.lengths - 1) - self._cache.lengths  # [B]
        steps = self._pending.shape[1] if self._run.recorded else max(1, int(lag.max()))
        block = self._block(k)
        tokens = torch.full((len(batch), block), self._spec.mask, device=batch.device)
        tokens[:, 0] = batch.last()
        (hidden,) = self._run(
            self._cache,
            self._model.embedding(tokens),
            self._pending[:, :steps],
            lag.to(batch.device, non_blocking=True),
            writes=steps + block,
            draft=True,
        )
        self._cache.advance(lag)
        return hidden


def begin_backbone(model: DraftModel, target: CausalLM) -> None:
    """Give a new head the target's last block in each layer, reading the last tap, and the rows of its output head."""
    backbone = model.network
    for block in backbone.layers:
        initial.start_block(block, target)
    nn.init.zeros_(backbone.fc.weight)
    backbone.fc.weight[:, -target.width :].fill_diagonal_(1)
    initial.start_norm(backbone.hidden_norm, getattr(target.blocks[-1], "input_layernorm", None))
    initial.start_norm(backbone.norm, target.final_norm)
    initial.start_head(model.head, target)


def default_taps(blocks: int, taps: int) -> tuple[int, ...]:
    """So many streams spread over a target of so many ``blocks``, from after the second block to before the last two.

    >>> default_taps(30, 3)
    (2, 15, 28)
    """
    if taps == 1:
        return (blocks // 2 + 1,)
    return tuple(round(1 + i * max(0, blocks - 4) / (taps - 1)) + 1 for i in range(taps))
