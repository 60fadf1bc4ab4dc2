"""Drafting by recursion on a feature: the loop and the parallel form that EAGLE and MTP modules share.

Legend: B rows, S tokens, P tokens of a prompt, n committed tokens of a row, F numbers of a true feature, D width.

A cell reads a token and the target's feature of the position before it, and predicts the token after: the pair
(feature at t, token at t+1) stands at slot t and predicts the token at t+2. Where the target has not been yet, the cell
reads its own output in place of a feature.

Of n committed tokens the last has not been through the target, so there are n-1 pairs and the last of them predicts the
first draft. Each round the pairs that verification has made true are run first, in one pass, and stay; then k-1 single
steps on the cell's own output follow, whose entries are dropped.

    tokens      a b c d | x y           pairs (f_a, b) (f_b, c) (f_c, d) -> x
    features    a b c                   then  (h, x) -> y
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from drafters.blocks import Memory, Rotary, Rotation, Shape, entry_widths, hide, in_cache, joined_to
from drafters.cached import Cached
from drafters.draft_model import DraftModel
from drafters.proposing import Proposal
from specbench.cache import visible, written_slots
from specbench.drafting import Batch
from specbench.model import PREFILL_CHUNK, CausalLM
from specbench.verification import Draft, Verdict


class Cell(nn.Module, ABC):
    """One step of recursion, for many positions at once."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.rotary: nn.Module = Rotary(shape)
        self.layers_kept = entry_widths(shape)  # of each block, numbers kept per token

    @abstractmethod
    def encode(self, features: Tensor) -> Tensor:
        """The target's features [B, S, F] as the cell takes its own: [B, S, D]."""

    @abstractmethod
    def step(
        self, embeddings: Tensor, features: Tensor, rotation: Rotation, memories: Sequence[Memory], mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Embedded tokens and features [B, S, D] -> what the output head reads, and the feature that is recursed on,
        [B, S, D] each. ``memories``: one per block. ``mask`` [B, S, T]: what is added to the scores."""

    def forward(
        self, embeddings: Tensor, features: Tensor, starts: Tensor, ids: Tensor, kept: list[Tensor], true: bool
    ) -> tuple[Tensor, Tensor]:
        """``step`` for pairs that stand at slots from ``starts`` [B] on, after what each block has ``kept``.
        ``true``: the features are the target's."""
        slots = written_slots(embeddings, starts)
        rotation = self.rotary(slots, embeddings)
        memories = [in_cache(layer, slots, ids.shape[0]) for layer in kept]
        mask = hide(visible(slots, ids), embeddings.dtype)
        return self.step(embeddings, self.encode(features) if true else features, rotation, memories, mask)

    def unroll(self, embeddings: Tensor, features: Tensor, steps: int, at: Tensor | None = None) -> list[Tensor]:
        """Many positions of a text at once, as in training: ``steps`` recursions from each, on true tokens.

        Embedded tokens [B, T, D] and the target's features [B, T, F] of a text -> for each step j the hidden states [B,
        A, D] that the output head reads, at the positions ``at`` [B, A] (None: at all). At position t they predict
        token t+2+j and are meaningful while t+1+j < T. At step j a position attends to step 0's entries up to its own,
        and to its own entries of steps 1 to j (EAGLE-3's training-time test, Li et al. 2025, Figure 6)."""
        batch, size, _ = embeddings.shape
        every = torch.arange(size, device=embeddings.device).expand(batch, -1)
        at = every if at is None else at
        entries: list[list[Tensor]] = [[] for _ in self.layers_kept]
        memories = [joined_to(layer) for layer in entries]
        seen = visible(every, every[0])
        tokens = torch.nn.functional.pad(embeddings[:, 1:], (0, 0, 0, 1))
        rotation = self.rotary(every, embeddings)
        out, feature = self.step(tokens, self.encode(features), rotation, memories, hide(seen, embeddings.dtype))
        rows = torch.arange(batch, device=at.device)[:, None]
        out, feature, seen = out[rows, at], feature[rows, at], seen[rows, at]
        own = torch.eye(at.shape[1], dtype=torch.bool, device=at.device).expand(batch, -1, -1)
        hidden = [out]
        for j in range(1, steps):
            seen = torch.cat((seen, own), dim=-1)
            tokens = embeddings[rows, (at + 1 + j).clamp(max=size - 1)]
            rotation = self.rotary(at + j, embeddings)
            out, feature = self.step(tokens, feature, rotation, memories, hide(seen, embeddings.dtype))
            hidden.append(out)
        return hidden


class Recursion:
    """The drafting loop around a ``Cell``, with the ends of its model. See ``drafters.neural.Loop``."""

    def __init__(
        self,
        cell: Cell,
        model: DraftModel,
        target: CausalLM,
        proposal: str,
        features: Callable[[Tensor, CausalLM], Tensor],
        taps: Sequence[int],
        name: str,
        eager: bool = False,
    ):
        """``features``: the target's residual streams [B, S, m, D] at the ``taps`` as the cell's features [B, S, F].
        ``eager``: see ``Cached``."""
        self._taps = taps
        self._model, self._target, self._proposal = model, target, proposal
        self._features: Callable[[Tensor], Tensor] = lambda streams: features(streams, target)
        self._run = Cached(cell, target, cell.layers_kept, name, eager)

    def prepare(self, rows: int, slots: int, k: int) -> None:
        """Record the pass over a round's pairs and a single step."""
        self._cache = self._run.new_cache(rows, slots)
        features = self._features(self._run.zeros(rows, 1, len(self._taps), self._target.width)).shape[-1]
        for steps in (1, k + 1) if self._run.recorded else ():
            embeddings = self._model.embedding(torch.zeros(rows, steps, dtype=torch.long, device=self._target.device))
            self._run(self._cache, embeddings, self._run.zeros(rows, steps, features), writes=steps, true=True)
            if steps == 1:
                self._run(self._cache, embeddings, torch.zeros_like(embeddings), writes=1, true=False)

    def start(self, batch: Batch, taps: list[Tensor]) -> None:
        """Run the pairs of the prompts; the last of each row waits for the first round."""
        last = []
        for row, streams in enumerate(taps):
            features = self._features(streams[None])  # [1, P, F]
            self._prefill(batch, row, features[:, :-1])
            last.append(features[:, -1:])
        self._pending = torch.cat(last)  # [B, S, F]

    def propose(self, batch: Batch, k: int) -> Draft:
        """True pairs, then k-1 recursions."""
        hidden, feature = self._catch_up(batch)
        proposal = Proposal(batch, self._proposal, self._target.vocab_size, self._model.head.ids)
        for step in range(k):
            tokens = proposal.add(self._model.head(hidden))
            if step < k - 1:
                hidden, feature = self._step(tokens, feature)
        self._cache.rewind(torch.from_numpy(batch.lengths - 1))  # the entries of drafted tokens are forgotten
        return proposal.draft()

    def observe(self, batch: Batch, verdict: Verdict, taps: Tensor) -> None:
        """Keep the features of the round; those of rejected drafts are padding."""
        self._pending = self._features(taps)

    def _prefill(self, batch: Batch, row: int, features: Tensor) -> None:
        """Run a row's first pairs, with features [1, P-1, F]."""
        tokens = torch.from_numpy(batch.tokens[row, 1 : features.shape[1] + 1]).to(batch.device)
        for chunk, part in zip(tokens.split(PREFILL_CHUNK), features.split(PREFILL_CHUNK, dim=1), strict=True):
            if len(chunk):
                self._run(self._cache, self._model.embedding(chunk)[None], part, writes=len(chunk), row=row, true=True)
                self._cache.advance(torch.tensor(len(chunk)), row=row)

    def _catch_up(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run the pairs that the last round has made true: hidden state and feature [B, D] at each row's last.

        Rows that advanced less than others are padded; their padding is not committed to the cache.
        """
        lag = torch.from_numpy(batch.lengths - 1) - self._cache.lengths  # [B]
        # a recorded forward has one shape; else no more is run than must be
        steps = self._pending.shape[1] if self._run.recorded else max(1, int(lag.max()))
        columns = self._cache.lengths[:, None] + 1 + torch.arange(steps)
        columns = columns.clamp(max=batch.tokens.shape[1] - 1)
        tokens = torch.from_numpy(batch.tokens).gather(1, columns).to(batch.device, non_blocking=True)
        embeddings = self._model.embedding(tokens)
        outputs = self._run(self._cache, embeddings, self._pending[:, :steps], writes=steps, true=True)
        self._cache.advance(lag)
        at = (lag - 1).clamp(min=0).to(batch.device, non_blocking=True)
        rows = torch.arange(len(batch), device=batch.device)
        hidden, feature = (output[rows, at] for output in outputs)
        return hidden, feature

    def _step(self, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """One recursion on ``tokens`` [B] and the cell's own ``feature`` [B, D]: the next hidden state and feature."""
        embeddings = self._model.embedding(tokens[:, None])
        hidden, feature = self._run(self._cache, embeddings, feature[:, None], writes=1, true=False)
        self._cache.advance(torch.ones(len(tokens), dtype=torch.long))
        return hidden[:, 0], feature[:, 0]
