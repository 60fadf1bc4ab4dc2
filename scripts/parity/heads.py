"""Drafting heads for the comparison with vLLM, briefly trained on a few replies of the target's own.

They are to be right often enough, and wrong often enough, that two engines which draft differently are told apart;
they are no good beyond the texts they have seen. Seeds are fixed. One loop trains all families:

Legend: N positions, D width, J drafts.

    at position t, where the target's feature is known up to t and the text up to t+1, draft j (from 0) of a round is
    the token t+2+j; the loss is the cross-entropy of all drafts at some positions of one reply
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters import dflash, dspark, eagle, eagle1, medusa, mtp
from drafters.dflash import DFlash
from drafters.draft_model import DraftModel
from drafters.dspark import DSpark
from drafters.eagle import Eagle
from drafters.eagle1 import Eagle1
from drafters.initial import SPREAD, read_weight
from drafters.medusa import Medusa
from drafters.mtp import Mtp
from drafters.neural import Neural, Passages
from drafters.training.batches import Places
from specbench.model import CausalLM

VOCABULARY = 8192  # of the heads with a draft vocabulary
POSITIONS = 24  # a step's
RATE, CLIP = 1e-3, 1.0
TOKEN = 0.3  # spread of EAGLE-1's first weights of the token's embedding
KEYS = 0.5  # spread of DFlash's first weights of key norms
SEED = 0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Text:
    """A prompt and the target's reply to it: ``tokens`` [T], of which the first ``prompt`` are the prompt's."""

    tokens: Tensor
    prompt: int


@dataclass(frozen=True)
class Head:
    """A head to be made: its ``kind`` of drafter and the ``options`` of its network, how many drafts ahead it is
    trained (``depth``; 0: not at all), in how many ``steps``, and the layout it is exported in."""

    kind: type[Neural]
    options: Any
    depth: int
    steps: int = 160
    layout: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OwnOutputs(medusa.Options):
    """Medusa heads with an output matrix each, as published ones have: vLLM knows no other."""

    def spec(self, target: CausalLM) -> medusa.Spec:
        """See ``medusa.Options``."""
        return replace(super().spec(target), outputs=target.vocab_size)


HEADS = {
    "eagle3": Head(Eagle, eagle.Options(vocabulary=VOCABULARY), 4),
    "eagle3-3-steps": Head(Eagle, eagle.Options(vocabulary=VOCABULARY), 3),
    "eagle3-6-steps": Head(Eagle, eagle.Options(vocabulary=VOCABULARY), 6),
    "eagle1": Head(Eagle1, eagle1.Options(bias=False), 4, steps=100),
    "mtp": Head(Mtp, mtp.Options(), 3, layout="mimo", settings={"way": "recurse"}),
    "medusa": Head(Medusa, OwnOutputs(heads=3), 3),
    "dflash": Head(DFlash, dflash.Options(layers=2, block=8, vocabulary=VOCABULARY), 7),
    "dflash-1-layer": Head(DFlash, dflash.Options(layers=1, block=8), 7),
    "dspark": Head(DSpark, dspark.Options(), 0),
}


def trained(head: Head, target: CausalLM, texts: Sequence[Text], folder: Path, say: Say) -> None:
    """Write ``head``, trained for ``target`` on ``texts``, as a checkpoint to ``folder``. The target's layers must be
    differentiable: engine ``plain``."""
    drafter = head.kind(network=head.options, **head.settings)
    model = drafter.build(target).requires_grad_(True)
    prepare(model, target, texts)
    streams = [streams_of(target, text, drafter.taps) for text in texts]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(SEED)
    for step in range(head.steps if head.depth else 0):
        which = step % len(texts)
        found = loss(drafter, model, target, texts[which], streams[which], head.depth, generator)
        optimizer.zero_grad()
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, 2 * (1 - step / head.steps))  # down to 0 in the second half
        optimizer.step()
        say(f"step {step + 1} of {head.steps}, loss {found.item():.2f}")
    drafter.write(model.requires_grad_(False), target).save(folder)


@torch.no_grad()
def prepare(model: DraftModel, target: CausalLM, texts: Sequence[Text]) -> None:
    """Where a head starts from.

    Output matrices of its own are given the target's rows: a draft vocabulary those of the texts' tokens and of others
    drawn at random. EAGLE-1 has no norm that holds its feature in scale from one step to the next, so nothing of the
    target's is kept, and the token, much smaller than the feature, is made heard. DFlash's key norms, which training in
    earnest tells apart, begin apart."""
    generator = torch.Generator().manual_seed(SEED)
    if isinstance(model.network, eagle1.Eagle1Cell):
        for weight in model.network.parameters():
            weight.fill_(1) if weight.ndim == 1 else weight.normal_(0, SPREAD, generator=generator)
        model.network.fc.weight[:, : target.width].normal_(0, TOKEN, generator=generator)
        block = model.network.layers[0]
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
    if isinstance(model.network, dflash.Backbone):
        for block in model.network.layers:
            block.self_attn.k_norm.weight.mul_(1 + KEYS * torch.randn(block.self_attn.width, generator=generator))
    table = read_weight(target.model.get_output_embeddings(), target.width, target)
    for output in getattr(model.network, "outputs", ()):
        output.weight.copy_(table)
    if model.head.lm_head is not None:
        said = torch.cat([text.tokens[text.prompt :] for text in texts]).unique()
        order = torch.randperm(target.vocab_size, generator=generator)
        others = order[~torch.isin(order, said)]
        model.head.ids = torch.cat((said, others))[: model.head.lm_head.out_features].sort().values
        model.head.lm_head.weight.copy_(table[model.head.ids])


def streams_of(target: CausalLM, text: Text, taps: Sequence[int]) -> Tensor:
    """What heads read of the target, [1, T, m, D]."""
    cache = target.new_cache(1, len(text.tokens), steps=len(text.tokens))
    streams = target.prefill(text.tokens, cache, 0, taps).taps
    assert streams is not None
    return streams.clone()  # made without gradients in mind; a copy may take part in them


def loss(
    drafter: Neural,
    model: DraftModel,
    target: CausalLM,
    text: Text,
    streams: Tensor,
    depth: int,
    draws: torch.Generator,
) -> Tensor:
    """Mean cross-entropy of ``depth`` drafts at some positions of the reply."""
    first, last = text.prompt - 1, len(text.tokens) - 2  # a draft at the last position but one is past the end
    at = (first + torch.randperm(last - first, generator=draws)[:POSITIONS]).sort().values
    following = torch.cat((text.tokens, torch.full((depth,), -1)))
    places = Places(model.head.ids, at.device)
    drafts = drafter.unroll(model, target, Passages(text.tokens[None], streams, at[None]), depth)
    losses = [
        F.cross_entropy(logits[0], places(following[at + 2 + j]), ignore_index=-1)
        for j, logits in enumerate(drafts.logits)
    ]
    return torch.stack(losses).mean()
