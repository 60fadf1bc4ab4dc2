"""What a drafter must keep to, as checks to put into its tests.

    from specbench.testing import check_drafter

    def test_my_drafter():
        check_drafter(lambda: MyDrafter(), k=4)

Each check raises AssertionError with what went wrong. They judge whether a drafter keeps the text and the contract, not
whether it guesses well: one that reads the wrong residual streams passes. They run on tiny random models in float32, in
seconds and without a download, and are the checks that specbench's own drafters pass. Nothing here is random: the same
code gives the same answer each time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from drafters.none import NoDrafter
from specbench import law
from specbench.decoding import Step, decode
from specbench.drafting import Batch, Drafter, Request
from specbench.model import CausalLM
from specbench.sampling import Sampling
from specbench.stopping import StopRule
from specbench.targets import load_tiny
from specbench.verification import Draft

Make = Callable[[], Drafter]

FAMILIES = ("llama", "qwen3", "gemma3")
TEXTS = ("one two one two one", "abc abc abd abc abc abd ab", "x", "the end of the line of the")
NEW_TOKENS = 16
LAWS = (Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=40, top_p=0.9))
COPIES = 96  # of a prompt, whose drafts differ by their noise alone
DOUBT = 1e-4  # chance that an honest drafter fails a statistical check, were its noise drawn anew each time


@dataclass
class Run:
    """What came of some requests: a reply each, the drafts made for each, round by round, and the steps."""

    replies: list[list[int]]
    drafted: list[list[list[int]]]
    steps: list[Step]
    drafts: list[Draft] = field(default_factory=list)


def check_drafter(make: Make, target: CausalLM | None = None, k: int = 4) -> None:
    """All checks, for the drafter that ``make`` gives anew each time, drafting up to ``k`` tokens.

    ``target``: a model to draft for, in float32; None for tiny random ones, of each of FAMILIES where it may matter.
    """
    targets = [target] if target is not None else [load_tiny(family) for family in FAMILIES]
    for lm in targets:
        check_greedy_equality(make, lm, k)
        check_batch_independence(make, lm, k)
    check_max_k(make, targets[0], k)
    check_statelessness(make, targets[0], k)
    check_leaves_the_target_alone(make, targets[0], k)
    check_law_of_drafts(make, targets[0], k)
    check_law_of_text(make, targets[0], k)


def check_greedy_equality(make: Make, target: CausalLM, k: int) -> None:
    """Greedy text is that of plain decoding, token for token, alone and in a batch."""
    drafter, k = _bound(make, target, k)
    for count in (1, 3):
        asked = requests(target, count)
        expected = run(target, NoDrafter(), asked, 0).replies
        found = run(target, drafter, _with_references(drafter, asked, expected), k, bind=False).replies
        for request, ours, plain in zip(asked, found, expected, strict=True):
            assert ours == plain, (
                f"{_name(drafter)} changed the text of {request.uid!r} in a batch of {count}: {ours} and not {plain}"
            )


def check_max_k(make: Make, target: CausalLM, k: int) -> None:
    """No draft is longer than what was asked for, down to nothing, or than the drafter says it can be."""
    drafter, k = _bound(make, target, k)
    for asked in range(k + 1):
        for draft in _run(target, drafter, requests(target, 2), asked).drafts:
            width = draft.tokens.shape[1]
            assert width <= asked, f"{_name(drafter)} drafted {width} tokens where {asked} were asked for"
            assert int(draft.count.max()) <= width, f"{_name(drafter)} counts more tokens than it drafted"


def check_batch_independence(make: Make, target: CausalLM, k: int) -> None:
    """What is drafted for a prompt depends neither on the prompts beside it nor on its row; greedily and sampled."""
    drafter, k = _bound(make, target, k)
    for sampling in (Sampling(), LAWS[0]):
        asked = requests(target, 3)
        together = _run(target, drafter, asked, k, sampling)
        turned = _run(target, drafter, asked[::-1], k, sampling)
        for row, request in enumerate(asked):
            alone = _run(target, drafter, [request], k, sampling)
            for other, beside in (
                (together.drafted[row], "others"),
                (turned.drafted[2 - row], "others, turned around"),
            ):
                assert other == alone.drafted[0], (
                    f"{_name(drafter)} drafts otherwise for {request.uid!r} alone than with {beside}: "
                    f"{alone.drafted[0]} and {other}"
                )


def check_statelessness(make: Make, target: CausalLM, k: int) -> None:
    """Drafts for a prompt do not depend on the prompts before it, unless the drafter says it is ``stateful``; and not
    even then after ``reset``."""
    asked = requests(target, 3)
    used, k = _bound(make, target, k)
    fresh = _run(target, used, asked[-1:], k).drafted
    _run(target, used, asked[:2], k)
    if used.stateful:
        used.reset()
    again = _run(target, used, asked[-1:], k).drafted
    assert again == fresh, f"{_name(used)} drafts {again} after other prompts and {fresh} at first"


def check_leaves_the_target_alone(make: Make, target: CausalLM, k: int) -> None:
    """The target's weights, and what the loop knows of the texts, are as they were."""
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    drafter, k = _bound(make, target, k)
    _run(target, drafter, requests(target, 2), k, Sampling(repetition_penalty=1.2), watch=True)
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(tensor, before[name]), f"{_name(drafter)} wrote to the target's {name}"


def check_law_of_drafts(make: Make, target: CausalLM, k: int) -> None:
    """A draft that was drawn follows the law handed on with it: probabilities that sum to 1, of which the tokens are as
    likely as they say."""
    drafter, k = _bound(make, target, k)
    for sampling in LAWS:
        # of each text the first round alone: later ones use the noise of the same positions again
        first = _run(target, drafter, _copies(target, COPIES), k, sampling, stop=StopRule(2)).drafts[:1]
        drafts = [draft for draft in first if draft.probs is not None]
        drawn, expected, variance = 0.0, 0.0, 0.0
        for draft in drafts:
            law: Tensor = draft.probs.double()  # type: ignore[union-attr]
            total = law.sum(-1)
            assert torch.allclose(total, torch.ones_like(total), atol=1e-4), f"{_name(drafter)}: probs sum to {total}"
            counted = torch.arange(law.shape[1]) < draft.count[:, None].cpu()  # [B, K]
            chosen = law.gather(2, draft.tokens[..., None]).squeeze(2).cpu()[counted]
            assert bool((chosen > 0).all()), f"{_name(drafter)} drafted a token to which its own law gives no chance"
            # the probability of the token drawn has mean sum q^2 under the law that was claimed
            law = law.cpu()[counted]
            mean = law.square().sum(-1)
            drawn += chosen.sum().item()
            expected += mean.sum().item()
            variance += (law.pow(3).sum(-1) - mean.square()).sum().item()
        if variance > 0:
            chance = 2 * stats.norm.sf(abs(drawn - expected) / math.sqrt(variance))
            assert chance > DOUBT, (
                f"{_name(drafter)} does not draw from the law it hands on: its tokens had a probability of {drawn:.1f} "
                f"in all where {expected:.1f} was due (p = {chance:.1g})"
            )


def check_law_of_text(make: Make, target: CausalLM, k: int) -> None:
    """Sampled text has the target's law: the test that every run with sampled drafts is put to (see ``law``)."""
    drafter, k = _bound(make, target, k)
    for sampling in LAWS:
        asked = _copies(target, COPIES)
        if drafter.needs_reference:
            asked = _with_references(drafter, asked, run(target, NoDrafter(), asked, 0, sampling).replies)
        found = law.check(target, drafter, [asked], k, sampling, 0, StopRule(NEW_TOKENS)).verdict()
        assert not found["ruled_out"], (
            f"text drafted by {_name(drafter)} has {found['ruled_out']} tokens that {sampling} rules out"
        )
        assert found["p_value"] > DOUBT, (
            f"text drafted by {_name(drafter)} does not have the target's law under {sampling}: "
            + ", ".join(f"p = {p:.1g} for {name}" for name, p in found["p_values"].items())
        )


def requests(target: CausalLM, count: int) -> list[Request]:
    """Prompts of different lengths, with repeats for a drafter to find."""
    return [Request(text, target.tokenizer(text).input_ids) for text in TEXTS[:count]]


def _copies(target: CausalLM, count: int) -> list[Request]:
    """Two prompts, each so many times: the same text under other noise."""
    return [Request(f"{text}-{i}", target.tokenizer(text).input_ids) for text in TEXTS[:2] for i in range(count)]


def run(
    target: CausalLM,
    drafter: Drafter,
    asked: Sequence[Request],
    k: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: StopRule | None = None,
    bind: bool = True,
) -> Run:
    """Decode ``asked`` together, with ``drafter`` bound to ``target`` first."""
    if bind:
        drafter.bind(target)
    replies: list[list[int]] = [[] for _ in asked]
    drafted: list[list[list[int]]] = [[] for _ in asked]
    steps = []
    for step in decode(target, drafter, asked, k, sampling or Sampling(), seed, stop or StopRule(NEW_TOKENS)):
        steps.append(step)
        for i, row in enumerate(step.rows):
            replies[row] += step.committed[i]
            if step.round > 0:
                drafted[row].append(step.drafted[i])
    return Run(replies, drafted, steps)


def _run(
    target: CausalLM,
    drafter: Drafter,
    asked: Sequence[Request],
    k: int,
    sampling: Sampling | None = None,
    stop: StopRule | None = None,
    watch: bool = False,
) -> Run:
    """As ``run`` with a drafter that is bound, keeping the drafts; with the references the drafter asks for.
    ``watch``: that it writes nothing to the batch."""
    if drafter.needs_reference:
        asked = _with_references(drafter, asked, run(target, NoDrafter(), asked, 0, sampling).replies)
    drafts: list[Draft] = []
    propose = drafter.propose

    def proposing(batch: Batch, k: int) -> Draft:
        before = [array.copy() for array in (batch.tokens, batch.lengths, batch.active, _seen(batch))]
        drafts.append(propose(batch, k))
        if watch:
            for old, new in zip(before, (batch.tokens, batch.lengths, batch.active, _seen(batch)), strict=True):
                assert (old == new).all(), f"{_name(drafter)} wrote to the batch"
        return drafts[-1]

    drafter.propose = proposing  # type: ignore[method-assign]
    try:
        made = run(target, drafter, asked, k, sampling, stop=stop, bind=False)
    finally:
        drafter.propose = propose  # type: ignore[method-assign]
    made.drafts = drafts
    return made


def _seen(batch: Batch) -> np.ndarray:
    return np.zeros(0) if batch.seen is None else batch.seen.cpu().numpy()


def _with_references(
    drafter: Drafter, asked: Sequence[Request], replies: Sequence[Sequence[int] | None]
) -> list[Request]:
    if not drafter.needs_reference:
        return list(asked)
    return [Request(r.uid, r.tokens, reply) for r, reply in zip(asked, replies, strict=True)]


def _bound(make: Make, target: CausalLM, k: int) -> tuple[Drafter, int]:
    """A new drafter, and the largest k up to ``k`` that it can draft."""
    drafter = make()
    drafter.bind(target)
    return drafter, k if drafter.max_k is None else min(k, drafter.max_k)


def _name(drafter: Drafter) -> str:
    return type(drafter).__name__
