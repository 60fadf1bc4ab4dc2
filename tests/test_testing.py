"""The kit finds drafters that break the contract, and passes those that keep it."""

import pytest
import torch
from conftest import tiny

from drafters.model_free import draft_rows
from drafters.ngram import NGram
from drafters.oracle import Oracle
from drafters.small_lm import SmallLM
from drafters.suffix import Suffix
from specbench import testing
from specbench.drafting import Batch, Drafter
from specbench.model import CausalLM
from specbench.sampling import draw
from specbench.verification import Draft, verify


class Sampler(Drafter):
    """Draws from a law of its own; subclasses get something wrong."""

    def bind(self, target: CausalLM) -> None:
        generator = torch.Generator().manual_seed(0)
        self.logits = 3 * torch.randn(target.vocab_size, generator=generator)

    def propose(self, batch: Batch, k: int) -> Draft:
        if batch.sampling.greedy or not k:
            return draft_rows(batch, k, lambda row: [5] * k)
        law = batch.sampling.law(self.logits.expand(len(batch), k, -1))
        tokens = torch.stack([self.drawn(batch, law[:, i], i) for i in range(k)], dim=1)
        return Draft(tokens, torch.full((len(batch),), k), self.claimed(law))

    def drawn(self, batch: Batch, law: torch.Tensor, i: int) -> torch.Tensor:
        return draw(law, batch.noise_at(i, 1, "draft")[:, 0])

    def claimed(self, law: torch.Tensor) -> torch.Tensor:
        return law


class DrawsFlatter(Sampler):
    def drawn(self, batch, law, i):
        return super().drawn(batch, law.sqrt(), i)


class ClaimsToBeSurer(Sampler):
    def claimed(self, law):
        return law.square() / law.square().sum(-1, keepdim=True)


class ClaimsTooLittle(Sampler):
    def claimed(self, law):
        return law / 2


class TooLong(Drafter):
    def propose(self, batch, k):
        return (
            draft_rows(batch, k + 1, lambda row: [5] * (k + 1)) if k == 2 else draft_rows(batch, k, lambda row: [5] * k)
        )


class Remembers(Drafter):
    def __init__(self):
        self.rounds = 0

    def propose(self, batch, k):
        self.rounds += 1
        return draft_rows(batch, k, lambda row: [self.rounds % 200] * k)


class LooksAtRowZero(Drafter):
    def propose(self, batch, k):
        return draft_rows(batch, k, lambda row: batch.text(0)[-k:].tolist())


class WritesToTheBatch(Drafter):
    def propose(self, batch, k):
        batch.tokens[0, 0] = (batch.tokens[0, 0] + 1) % 200
        return draft_rows(batch, k, lambda row: [5] * k)


class WritesToTheTarget(Drafter):
    def bind(self, target):
        self.target = target

    def propose(self, batch, k):
        self.target.model.get_input_embeddings().weight[:1] += 1e-3
        return draft_rows(batch, k, lambda row: [5] * k)


@pytest.mark.parametrize(
    ("broken", "check", "said"),
    [
        (DrawsFlatter, testing.check_law_of_drafts, "does not draw from the law it hands on"),
        (ClaimsToBeSurer, testing.check_law_of_drafts, "does not draw from the law it hands on"),
        (ClaimsTooLittle, testing.check_law_of_drafts, "probs sum to"),
        (DrawsFlatter, testing.check_law_of_text, "does not have the target's law"),
        (ClaimsToBeSurer, testing.check_law_of_text, "does not have the target's law"),
        (TooLong, testing.check_max_k, "drafted 3 tokens where k=2"),
        (Remembers, testing.check_statelessness, "after other prompts"),
        (LooksAtRowZero, testing.check_batch_independence, "alone than with others"),
        (WritesToTheBatch, testing.check_leaves_the_target_alone, "wrote to the batch"),
    ],
)
def test_a_broken_drafter_is_found(broken, check, said):
    with pytest.raises(Exception, match=said):
        check(broken, tiny("llama"), 3)


def test_a_drafter_that_changes_the_target_is_found():
    from specbench.targets import load_tiny

    with pytest.raises(AssertionError, match="wrote to the target's"):
        testing.check_leaves_the_target_alone(WritesToTheTarget, load_tiny("llama", engine="plain"), 3)


def test_a_lossy_rule_is_found(monkeypatch):
    """Verification that accepts whatever is drafted: greedy text changes, and sampled text has the drafter's law."""

    def lenient(draft, logits, *args, **kwargs):
        verdict = verify(draft, logits, *args, **kwargs)
        return type(verdict)(draft.count, verdict.next)

    monkeypatch.setattr("specbench.decoding.verify", lenient)
    with pytest.raises(AssertionError, match="changed the text"):
        testing.check_greedy_equality(NGram, tiny("llama"), 3)
    with pytest.raises(AssertionError, match="does not have the target's law"):
        testing.check_law_of_text(Sampler, tiny("llama"), 3)


@pytest.mark.parametrize(
    "make", [Sampler, NGram, Suffix, Oracle, lambda: SmallLM(tiny("llama", seed=1), proposal="sample")]
)
def test_honest_drafters_pass(make):
    testing.check_drafter(make, tiny("llama"), k=3)


def test_drafters_that_learn_may_after_a_reset():
    testing.check_statelessness(lambda: Suffix(memory="run"), tiny("llama"), 3)
