"""Multi-token prediction modules (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2; FastMTP, Cai et al.
2025), drafting a chain.

Legend: B rows, S tokens, P tokens of a prompt, D the target's width, n committed tokens of a row, M depths.

    x = W [norm_e(emb(token)); norm_h(h)];  h' = block(x);  logits = head(norm(h'))     emb and head are the target's

At depth 1, h is the target's feature, after its final norm, of the position before the token. Deeper, there are two
ways:

``depths``  as DeepSeek-V3 was trained. At depth d module d reads, at position t, the output of depth d-1 at t and the
            token t+d; it attends to its own entries of all positions up to t, which it keeps apart from other depths'.
            With one module for all depths this is FastMTP.
``recurse`` as serving engines use a single module: its output takes the place of the feature of the next position, in
            one cache, as in EAGLE (see ``drafters.recursive``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from drafters import initial
from drafters.blocks import Block, Memory, RMSNorm, Rotation, Shape, hide, in_cache, joined_to
from drafters.cached import Cached
from drafters.checkpoints import mtp
from drafters.checkpoints.files import Loaded, Written
from drafters.draft_model import DraftModel, InputEmbedding, OutputHead
from drafters.foreign import ForeignBlock, ForeignRotary
from drafters.neural import Loop, Neural, Passages, Sum, gathered
from drafters.proposing import Proposal
from drafters.recursive import Cell, Recursion
from specbench.cache import visible, written_slots
from specbench.drafting import Batch
from specbench.errors import ConfigError, RunError
from specbench.model import PREFILL_CHUNK, CausalLM
from specbench.verification import Draft, Verdict

WAYS = ("recurse", "depths")


@dataclass(frozen=True)
class Spec:
    """What MTP modules are made of.

    taps: the last residual stream. modules: how many there are. way: see the top of the file. depths: how deep they
    draft that way. hidden_first: W reads [h; emb] (MiMo). norm_feature: h is the target's after its final norm, else
    before it (MiMo). norm_output: the normed output is what is read next. foreign: the blocks are of the target's own
    kind, as transformers has them. embeddings, outputs: rows of an embedding table and an output head of their own;
    None to use the target's."""

    shape: Shape
    taps: tuple[int, ...]
    modules: int = 1
    way: str = "recurse"
    depths: int = 1
    hidden_first: bool = False
    norm_feature: bool = True
    norm_output: bool = True
    foreign: bool = False
    embeddings: int | None = None
    outputs: int | None = None

    def model(self, target: CausalLM) -> DraftModel:
        """The modules, their weights not set."""
        width = self.shape.width
        cells = [MtpCell(self, target) for _ in range(self.modules)]
        network = Depths(cells, self.depths)
        return DraftModel(InputEmbedding(width, self.embeddings), network, OutputHead(width, self.outputs))


@dataclass(frozen=True)
class Options:
    """Of new modules; see ``Spec``. vocabulary: size of the draft vocabulary, None for all tokens."""

    modules: int = 1
    layers: int = 1
    hidden_first: bool = False
    norm_feature: bool = True
    norm_output: bool = True
    vocabulary: int | None = None

    def spec(self, target: CausalLM) -> Spec:
        """For modules as wide as ``target``. Raises ConfigError for what cannot be."""
        if self.modules < 1:
            raise ConfigError(f"drafter.network.modules={self.modules} drafts nothing; give 1 or more")
        initial.check_layers(self.layers)
        initial.check_vocabulary(self.vocabulary, target)
        return Spec(
            initial.target_shape(target, layers=self.layers, **initial.block_kind(target)),
            (len(target.blocks),),
            self.modules,
            hidden_first=self.hidden_first,
            norm_feature=self.norm_feature,
            norm_output=self.norm_output,
            outputs=self.vocabulary,
        )


class MtpCell(Cell):
    """One module; see the top of the file."""

    def __init__(self, spec: Spec, target: CausalLM):
        super().__init__(spec.shape)
        shape = spec.shape
        self.spec = spec
        self.token_norm = RMSNorm(shape.width, shape.eps)
        self.hidden_norm = RMSNorm(shape.width, shape.eps)
        self.input_proj = nn.Linear(2 * shape.width, shape.width, bias=False)
        if spec.foreign:
            self.rotary = ForeignRotary(target)
            self.layers = nn.ModuleList(ForeignBlock(target) for _ in range(shape.layers))
            self.layers_kept = [block.entry_width(self.rotary) for block in self.layers]  # type: ignore[operator]
        else:
            self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width, shape.eps)

    def encode(self, features: Tensor) -> Tensor:
        """A feature of the target's is like one of its own."""
        return features

    def step(
        self, embeddings: Tensor, features: Tensor, rotation: Rotation, memories: Sequence[Memory], mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See ``Cell``."""
        token, hidden = self.token_norm(embeddings), self.hidden_norm(features)
        x = self.input_proj(torch.cat((hidden, token) if self.spec.hidden_first else (token, hidden), dim=-1))
        for block, memory in zip(self.layers, memories, strict=True):
            x = block(x, rotation, memory, mask)
        out = self.norm(x)
        return out, out if self.spec.norm_output else x


class Depths(nn.Module):
    """Modules one behind the other; the last serves all depths that have none of their own."""

    def __init__(self, cells: Sequence[MtpCell], depths: int):
        super().__init__()
        self.cells = nn.ModuleList(cells)
        self.depths = depths
        self.layers_kept = cells[0].layers_kept * depths

    def cell(self, depth: int) -> Any:
        """The module of a depth, counted from 0."""
        return self.cells[min(depth, len(self.cells) - 1)]

    def forward(
        self, embeddings: Tensor, features: Tensor, starts: Tensor, ids: Tensor, kept: list[Tensor], depth: int
    ) -> tuple[Tensor, Tensor]:
        """One depth, for positions from ``starts`` [B] on: see ``Cell.step``."""
        cell = self.cell(depth)
        layers = len(cell.layers)
        slots = written_slots(embeddings, starts)
        memories = [in_cache(layer, slots, ids.shape[0]) for layer in kept[depth * layers : (depth + 1) * layers]]
        mask = hide(visible(slots, ids), embeddings.dtype)
        return cell.step(embeddings, features, cell.rotary(slots, embeddings), memories, mask)

    def unroll(self, embeddings: Tensor, features: Tensor, steps: int) -> list[Tensor]:
        """All positions of a text at once, as in training: embedded tokens [B, T, D] and features [B, T, D] -> for each
        of so many depths the hidden states [B, T, D] that the output head reads. At position t depth d (from 0)
        predicts token t+2+d; it is meaningful while t+1+d < T."""
        size = embeddings.shape[1]
        positions = torch.arange(size, device=embeddings.device)[None]
        seen = torch.ones(1, size, size, dtype=torch.bool, device=embeddings.device).tril()
        hidden = []
        for depth in range(steps):
            cell = self.cell(depth)
            tokens = nn.functional.pad(embeddings[:, 1 + depth :], (0, 0, 0, 1 + depth))
            memories = [joined_to([]) for _ in cell.layers]
            rotation = cell.rotary(positions, embeddings)
            out, features = cell.step(tokens, features, rotation, memories, hide(seen, embeddings.dtype))
            hidden.append(out)
        return hidden


class Mtp(Neural):
    """Drafts with MTP modules; see ``Neural``. A checkpoint is one of its own, or a target that carries modules.

    way: see the top of the file; None for ``recurse`` with a single module and ``depths`` with more. depths: how deep
    ``depths`` drafts, None for once per module.
    """

    spec_type = Spec
    family = "mtp"

    def __init__(
        self,
        checkpoint: str | None = None,
        proposal: str = "greedy",
        way: str | None = None,
        depths: int | None = None,
        network: Options | None = None,
    ):
        super().__init__(checkpoint, proposal, network or Options(), Options())
        if way is not None and way not in WAYS:
            raise ConfigError(f"drafter.way={way} is unknown; choices: {', '.join(WAYS)}")
        if depths is not None and (type(depths) is not int or depths < 1):
            raise ConfigError(f"drafter.depths={depths} is no depth; give a whole number from 1 on, or null")
        self._way, self._depths = way, depths

    def settle(self, spec: Spec) -> Spec:
        """Add the way its modules are used."""
        way = self._way or ("recurse" if spec.modules == 1 and self._depths is None else "depths")
        depths = self._depths or spec.modules
        if way == "recurse" and (spec.modules > 1 or self._depths is not None):
            raise ConfigError(
                f"drafter.way=recurse uses a single module, as often as k asks for, and not modules={spec.modules}, "
                f"depths={self._depths}; use way=depths"
            )
        if depths < spec.modules:
            raise ConfigError(f"drafter.depths={depths} leaves some of the {spec.modules} modules out; give more")
        return replace(spec, way=way, depths=depths)

    def read(self, path: str, target: CausalLM) -> Loaded:
        """See ``checkpoints.mtp``."""
        return mtp.read(path, target)

    def write(self, model: DraftModel, target: CausalLM) -> Written:
        """See ``checkpoints.mtp``."""
        return mtp.write(model, self.spec, target)

    def begin(self, model: DraftModel, target: CausalLM) -> None:
        """As the target's last block on its feature, the token's embedding nearly unheard."""
        network = model.network
        for cell in network.cells:
            for block in cell.layers:
                initial.start_block(block, target)
            nn.init.normal_(cell.input_proj.weight, std=initial.SPREAD)
            hidden = slice(0, target.width) if self.spec.hidden_first else slice(target.width, None)
            cell.input_proj.weight[:, hidden].fill_diagonal_(1)
            initial.start_norm(cell.norm, target.final_norm)
        initial.start_head(model.head, target)

    def last_sum(self, model: DraftModel) -> Sum:
        """What the first module makes of token and feature, then the rest."""
        cell = model.network.cells[0]
        blocks = () if self.spec.foreign else cell.layers
        return Sum(cell.norm, [cell.input_proj, *(linear for block in blocks for linear in initial.added(block))])

    def make_loop(self, model: DraftModel, target: CausalLM) -> Loop:
        """By the way they are to be used."""

        if self.spec.way == "recurse":
            cell = model.network.cells[0]
            return Recursion(
                cell, model, target, self.proposal, self.features, self.taps, "the MTP module", self.spec.foreign
            )
        self.max_k = self.spec.depths
        return DepthByDepth(model, target, self.proposal, self.features, eager=self.spec.foreign)

    def features(self, streams: Tensor, target: CausalLM) -> Tensor:
        """The last residual stream, as it is or as the target's head reads it."""
        return target.norm(streams[:, :, 0]) if self.spec.norm_feature else streams[:, :, 0]

    def hidden(self, model: DraftModel, target: CausalLM, passages: Passages, k: int) -> Sequence[Tensor]:
        """By the way they are to be used."""
        features, embeddings = self.features(passages.streams, target), model.embedding(passages.tokens)
        if self.spec.way == "recurse":
            return model.network.cells[0].unroll(embeddings, features, k, passages.at)
        return [gathered(h, passages.at) for h in model.network.unroll(embeddings, features, k)]


class DepthByDepth:
    """The drafting loop around ``Depths``. See ``drafters.neural.Loop``.

    Depth d can be sure of position t only when token t+d is committed, so the last M-1 positions of each text are run
    again, at every depth, when more of it is known. All depths run the same window of positions each round:

        committed  a b c d, M = 3       positions a b | c                     c waits for its first token to be known
        depth 1    (f_a, b) (f_b, c) (f_c, d) -> x
        depth 2    (h_a, c) (h_b, d) (h_c, x) -> y
        depth 3    (g_a, d) (g_b, x) (g_c, y) -> z                next round runs b and c again, with what was accepted
    """

    def __init__(
        self,
        model: DraftModel,
        target: CausalLM,
        proposal: str,
        features: Callable[[Tensor, CausalLM], Tensor],
        eager: bool,
    ):
        """``features``: the target's residual streams [B, S, 1, D] as the first module reads them, [B, S, D]."""
        self._model, self._target, self._proposal = model, target, proposal
        self._features: Callable[[Tensor], Tensor] = lambda streams: features(streams, target)
        network = model.network
        self._depths: int = network.depths
        self._run = Cached(network, target, network.layers_kept, "the MTP modules", eager)

    def prepare(self, rows: int, slots: int, k: int) -> None:
        """Record each depth."""
        self._cache = self._run.new_cache(rows, slots + self._depths)
        self._width = self._depths + k  # of all windows, where they are recorded
        for depth in range(k or self._depths) if self._run.recorded else ():
            tokens = torch.zeros(rows, self._width, dtype=torch.long, device=self._target.device)
            embeddings = self._model.embedding(tokens)
            self._run(self._cache, embeddings, torch.zeros_like(embeddings), writes=self._width, depth=depth)

    def start(self, batch: Batch, taps: list[Tensor]) -> None:
        """Run the prompts at every depth; the last positions of each row wait for the first round."""
        self._deepest = 0
        waiting = []
        for row, streams in enumerate(taps):
            features = self._features(streams[None])  # [1, P, D]
            settled = min(max(0, int(batch.lengths[row]) - self._depths), features.shape[1] - 1)
            self._prefill(batch, row, features[:, :settled])
            waiting.append(features[0, settled:])
        self._held = torch.tensor([len(part) for part in waiting])  # [B] positions that wait
        self._settled = torch.zeros_like(self._held)  # [B] of those, how many the last round has settled
        self._pending = nn.utils.rnn.pad_sequence(waiting, batch_first=True)  # [B, S, D] their features
        if self._run.recorded:
            self._pending = nn.functional.pad(self._pending, (0, 0, 0, self._width - self._pending.shape[1]))

    def propose(self, batch: Batch, k: int) -> Draft:
        """Each depth over the positions that wait, up to depth k."""
        if self._deepest and k > self._deepest:
            raise RunError(
                f"k={k} after k={self._deepest} in a text: MTP depths that were left out cannot be caught up"
            )
        self._deepest = k or self._deepest
        depths = k or self._deepest or self._depths  # where nothing is asked for, entries are still to be kept up
        steps = self._pending.shape[1]
        columns = self._cache.lengths[:, None] + 1 + torch.arange(steps + depths)
        columns = columns.clamp(max=batch.tokens.shape[1] - 1)
        known = torch.from_numpy(batch.tokens).gather(1, columns).to(batch.device, non_blocking=True)
        rows = torch.arange(len(batch), device=batch.device)
        last = (self._held - 1).clamp(min=0).to(batch.device, non_blocking=True)  # each row's last position, of those
        proposal = Proposal(batch, self._proposal, self._target.vocab_size, self._model.head.ids)
        feature = self._pending
        for depth in range(depths):
            embeddings = self._model.embedding(known[:, depth : depth + steps])
            hidden, feature = self._run(self._cache, embeddings, feature, writes=steps, depth=depth)
            tokens = proposal.add(self._model.head(hidden[rows, last]))
            known = known.scatter(1, (last + depth + 1)[:, None], tokens[:, None])
        # at position t the deepest has read token t+depths, which is committed
        self._settled = (torch.from_numpy(batch.lengths) - depths - self._cache.lengths).clamp(min=0)
        return proposal.draft() if k else Draft.empty(len(batch), batch.device)

    def observe(self, batch: Batch, verdict: Verdict, taps: Tensor) -> None:
        """Let go of what is settled, and add the features of what was accepted."""
        fresh = self._features(taps)  # [B, K+1, D]
        kept = self._held - self._settled
        self._cache.advance(self._settled)
        self._held = torch.from_numpy(batch.lengths - 1) - self._cache.lengths
        # a recorded forward has one shape
        width = self._width if self._run.recorded else max(1, int(self._held.max()))
        at = torch.arange(width)
        # old ones first; from there, past their padding, the new ones
        at = torch.where(at < kept[:, None], at + self._settled[:, None], at - kept[:, None] + self._pending.shape[1])
        at = at.clamp(max=self._pending.shape[1] + fresh.shape[1] - 1).to(batch.device, non_blocking=True)
        joined = torch.cat((self._pending, fresh), dim=1)
        self._pending = joined.gather(1, at[..., None].expand(-1, -1, joined.shape[2]))
        self._settled = torch.zeros_like(self._held)

    def _prefill(self, batch: Batch, row: int, features: Tensor) -> None:
        """Run a row's first positions at every depth, with features [1, S, D]."""
        for start in range(0, features.shape[1], PREFILL_CHUNK):
            part = features[:, start : start + PREFILL_CHUNK]
            size = part.shape[1]
            for depth in range(self._depths):
                tokens = torch.from_numpy(batch.tokens[row, start + depth + 1 : start + depth + 1 + size])
                embeddings = self._model.embedding(tokens.to(batch.device))[None]
                _, part = self._run(self._cache, embeddings, part, writes=size, row=row, depth=depth)
            self._cache.advance(torch.tensor(size), row=row)
