"""DSpark: a block drafted in one pass by a DFlash backbone, made sequential by a light head, with a confidence for each
token (DeepSeek-AI 2026, "DSpark").

Legend: B rows, K drafted tokens, D width of the backbone, r rank, V the target's vocabulary, Vd the draft vocabulary.

The backbone gives logits U_k for all positions at once. Then, left to right, the token chosen before changes them:

    w = W1[x_{k-1}]                                           r numbers per token of the target's vocabulary
    vanilla:  logits_k = U_k + W2 w
    gated:    logits_k = U_k + W2 (sigmoid(G [h_k; w]) * w)
    rnn:      [g; c; o] = J [s; w; h_k];  s = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c);  logits_k = U_k + W2 tanh(o)
    confidence_k = sigmoid(P [h_k; w])                        how likely x_k is accepted if those before it are

x_{-1} is the anchor, the last committed token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafters import dflash, initial
from drafters.checkpoints import dspark
from drafters.checkpoints.files import Loaded, Written
from drafters.draft_model import DraftModel
from drafters.neural import Passages, Unrolled
from drafters.proposing import Proposal
from specbench.drafting import Batch
from specbench.errors import ConfigError
from specbench.model import CausalLM
from specbench.verification import Draft


@dataclass(frozen=True)
class Spec(dflash.Spec):
    """What a DSpark head is made of, besides its backbone.

    anchor_first: as it is in DSpark unless a checkpoint says otherwise. rank: r of the sequential head, 0 for none.
    kind: vanilla, gated or rnn. tokens: rows of W1. confidence: there is a confidence head. confidence_reads_token: it
    reads w. confidence_temperatures: what the confidences of the positions are divided by (see
    ``drafters.training.calibration``); as many as were calibrated, further ones as the last."""

    anchor_first: bool = True
    rank: int = 256
    kind: str = "vanilla"
    tokens: int = 0
    outputs: int = 0
    confidence: bool = True
    confidence_reads_token: bool = True
    confidence_temperatures: tuple[float, ...] = ()

    def model(self, target: CausalLM) -> DraftModel:
        """The network with its ends, its weights not set."""
        embedding, head = self.ends()
        return DraftModel(embedding, DSparkNetwork(self), head)


@dataclass(frozen=True)
class Options(dflash.Options):
    """Of a new head; see ``Spec``."""

    block: int = 7
    anchor_first: bool = True
    rank: int = 32
    kind: str = "vanilla"
    confidence: bool = True

    def spec(self, target: CausalLM) -> Spec:
        """For a head as wide as ``target``. Raises ConfigError for what cannot be."""
        if self.kind not in dspark.KINDS:
            raise ConfigError(f"drafter.network.kind={self.kind} is unknown; choices: {', '.join(dspark.KINDS)}")
        if self.rank < 0:
            raise ConfigError(f"drafter.network.rank={self.rank} is negative; 0 is no sequential head")
        return Spec(
            **self.fields(target),
            rank=self.rank,
            kind=self.kind,
            tokens=target.vocab_size,
            outputs=self.vocabulary or target.vocab_size,
            confidence=self.confidence,
            confidence_reads_token=self.rank > 0,
        )


class SequentialHead(nn.Module):
    """What the token before adds to the logits of a position; see the top of the file."""

    def __init__(self, spec: Spec):
        super().__init__()
        width, rank = spec.shape.width, spec.rank
        self.kind = spec.kind
        self.rank = rank
        self.markov_w1 = nn.Embedding(spec.tokens, rank)
        self.markov_w2 = nn.Linear(rank, spec.outputs, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank) if spec.kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank) if spec.kind == "rnn" else None

    def forward(self, token: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The tokens before [N], the positions' hidden states [N, D] and the state [N, r] (None at the first) -> what
        is added to the logits [N, Vd], w [N, r], and the next state."""
        read = self.markov_w1(token)
        if self.gate_proj is not None:
            gate = self.gate_proj(torch.cat((hidden, read), dim=-1)).sigmoid()
            return self.markov_w2(gate * read), read, None
        if self.joint_proj is not None:
            state = torch.zeros_like(read) if state is None else state
            gate, candidate, out = self.joint_proj(torch.cat((state, read, hidden), dim=-1)).chunk(3, dim=-1)
            gate = gate.sigmoid()
            state = gate * state + (1 - gate) * candidate.tanh()
            return self.markov_w2(out.tanh()), read, state
        return self.markov_w2(read), read, None


class DSparkNetwork(dflash.Backbone):
    """The backbone, with the sequential and the confidence head beside it."""

    def __init__(self, spec: Spec):
        super().__init__(spec)
        self.markov_head = SequentialHead(spec) if spec.rank else None
        inputs = spec.shape.width + (spec.rank if spec.confidence_reads_token else 0)
        self.confidence_head = nn.Linear(inputs, 1) if spec.confidence else None
        self._reads_token = spec.confidence_reads_token

    def confidence(self, hidden: Tensor, read: Tensor | None) -> Tensor | None:
        """Hidden states [..., D] and w [..., r] -> logits [...] of being accepted; None without a confidence head."""
        if self.confidence_head is None:
            return None
        if self._reads_token and read is not None:
            hidden = torch.cat((hidden, read), dim=-1)
        return self.confidence_head(hidden).squeeze(-1)

    def sequence(self, logits: Tensor, hidden: Tensor, before: Tensor) -> tuple[Tensor, Tensor | None]:
        """All positions of blocks on given tokens, as in training: logits U [N, K, Vd], hidden states [N, K, D] and the
        token ``before`` each [N, K] -> logits [N, K, Vd] and confidence logits [N, K]."""
        if self.markov_head is None:
            return logits, self.confidence(hidden, None)
        changed, reads = [], []
        state: Tensor | None = None
        for own, h, token in zip(logits.unbind(dim=1), hidden.unbind(dim=1), before.unbind(dim=1), strict=True):
            added, read, state = self.markov_head(token, h, state)
            changed.append(own + added)
            reads.append(read)
        return torch.stack(changed, dim=1), self.confidence(hidden, torch.stack(reads, dim=1))


class DSpark(dflash.BlockDrafter):
    """Drafts with a DSpark head; see ``BlockDrafter``."""

    spec_type = Spec
    family = "dspark"

    def __init__(
        self,
        checkpoint: str | None = None,
        proposal: str = "greedy",
        whole_block: bool = False,
        network: Options | None = None,
    ):
        super().__init__(checkpoint, proposal, whole_block, network or Options(), Options())

    def read(self, path: str, target: CausalLM) -> Loaded:
        """See ``checkpoints.dspark``."""
        return dspark.read(path, target)

    def write(self, model: DraftModel, target: CausalLM) -> Written:
        """See ``checkpoints.dspark``."""
        return dspark.write(model, self.spec, target)

    def begin(self, model: DraftModel, target: CausalLM) -> None:
        """As DFlash; the sequential head adds nothing (W2 = 0) and the confidence head knows nothing."""
        dflash.begin_backbone(model, target)
        network = model.network
        if network.markov_head is not None:
            nn.init.normal_(network.markov_head.markov_w1.weight, std=initial.SPREAD)
            nn.init.zeros_(network.markov_head.markov_w2.weight)
        if network.confidence_head is not None:
            nn.init.zeros_(network.confidence_head.weight)
            nn.init.zeros_(network.confidence_head.bias)

    def make_loop(self, model: DraftModel, target: CausalLM) -> "SemiAutoregressive":
        """As many drafts as the block has room for."""
        self.max_k = self.spec.drafts
        return SemiAutoregressive(model, target, self.spec, self.proposal, self.whole_block, "the DSpark head")

    def unroll(self, model: DraftModel, target: CausalLM, passages: Passages, k: int) -> Unrolled:
        """Blocks of ``k`` drafts, each after the true token before it."""
        if not self.spec.anchor_first and self.spec.kind == "rnn":
            raise ConfigError("a recurrent sequential head whose anchor does not draft is not trained; use vanilla")
        hidden = self.blocks(model, target, passages, k)  # [B, A, K, D]
        before = torch.stack([passages.tokens_after(1 + j) for j in range(k)], dim=-1)
        logits, confidence = model.network.sequence(
            model.head(hidden).flatten(0, 1), hidden.flatten(0, 1), before.flatten(0, 1)
        )
        logits = logits.unflatten(0, before.shape[:2])
        return Unrolled(logits.unbind(dim=2), None if confidence is None else confidence.unflatten(0, before.shape[:2]))


class SemiAutoregressive(dflash.BlockByBlock):
    """One pass of the backbone, then the sequential head from left to right."""

    def choose(self, batch: Batch, anchor: Tensor, hidden: Tensor) -> Draft:
        """Tokens by hidden states [B, K, D], each after the one before."""
        network = self._model.network
        proposal = Proposal(batch, self._proposal, self._target.vocab_size, self._model.head.ids)
        if not hidden.shape[1]:
            return proposal.draft()
        logits = self._model.head(hidden)
        token, state = batch.last(), None
        if network.markov_head is not None and not self._spec.anchor_first:
            _, _, state = network.markov_head(token, anchor, state)  # the state goes through the anchor's position too
        reads = []
        for k in range(hidden.shape[1]):
            row = logits[:, k]
            if network.markov_head is not None:
                added, read, state = network.markov_head(token, hidden[:, k], state)
                row = row + added
                reads.append(read)
            token = proposal.add(row)
        confidence = network.confidence(hidden, torch.stack(reads, dim=1) if reads else None)
        if confidence is None:
            return proposal.draft()
        return proposal.draft((confidence.float() / self._temperatures(confidence)).sigmoid())

    def _temperatures(self, confidence: Tensor) -> Tensor:
        """Of each position of ``confidence`` [B, K]."""
        spec: Any = self._spec
        known = spec.confidence_temperatures or (1.0,)
        every = [known[min(k, len(known) - 1)] for k in range(confidence.shape[1])]
        return torch.tensor(every, device=confidence.device)
