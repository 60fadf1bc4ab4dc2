"""Sampled speculative decoding has exactly the target's law, shown on 5 tokens with 1e5 draws; and the same test fails
for each of the bugs that others have shipped."""

import pytest
import torch
from conftest import mutated
from scipy import stats

from specbench import decoding, verification
from specbench.decoding import decode
from specbench.drafting import Drafter, Request
from specbench.model import Output
from specbench.sampling import Sampling, draw
from specbench.stopping import StopRule
from specbench.verification import Draft, verify

V = 5
ROWS, LENGTH = 10_000, 4  # prefill's token, two drafts and their bonus
ALARM = 1e-6  # a p-value below this is a wrong law; honest runs stay far above

LAWS = {
    "t1": Sampling(temperature=1.0),
    "t0.7": Sampling(temperature=0.7),
    "top_k": Sampling(temperature=1.0, top_k=3),
    "top_p": Sampling(temperature=1.0, top_p=0.8),
}


class Markov:
    """A target of five tokens whose next-token logits depend on the last token alone."""

    device, vocab_size, context = torch.device("cpu"), V, None

    def __init__(self, seed: int):
        self.table = 1.5 * torch.randn(V, V, generator=torch.Generator().manual_seed(seed))

    def new_cache(self, batch, slots, steps=1):
        return self

    def prepare(self, cache, steps, taps):
        pass

    def recycle(self, cache):
        pass

    def advance(self, counts, row=None):
        pass

    def prefill(self, tokens, cache, row, taps):
        return self.forward(tokens[None], cache, last_only=True)

    def forward(self, tokens, cache, row=None, taps=(), last_only=False):
        return Output(self.table[tokens][:, -1:] if last_only else self.table[tokens], None)


class SampledGuess(Drafter):
    """Samples from another Markov model's law, under the sampling of the batch, and hands that law on."""

    def __init__(self, claimed=None):
        self.table = Markov(seed=2).table
        self.claimed = claimed  # a wrong law to hand on, if any

    def propose(self, batch, k):
        last, tokens, laws = batch.last(), [], []
        for step in range(k):
            laws.append(batch.sampling.law(self.table[last]))
            last = draw(laws[-1], batch.noise_at(step, 1, "draft")[:, 0])
            tokens.append(last)
        probs = torch.stack(laws, dim=1)
        if self.claimed is not None:
            probs = torch.full_like(probs, self.claimed)
        return Draft(torch.stack(tokens, dim=1), torch.full((len(batch),), k), probs)


def p_value(sampling: Sampling, drafter: Drafter, batches: int = 2) -> float:
    """Chi-square of the first LENGTH tokens against the target's exact law of them."""
    target, counts = Markov(seed=1), torch.zeros((V,) * LENGTH)
    for batch in range(batches):
        requests = [Request(f"{batch}/{row}", [0]) for row in range(ROWS)]
        texts: list[list[int]] = [[] for _ in range(ROWS)]
        for step in decode(target, drafter, requests, 2, sampling, 0, StopRule(LENGTH)):
            for row, committed in zip(step.rows, step.committed, strict=True):
                texts[row] += committed
        replies = torch.tensor(texts)
        counts.index_put_(tuple(replies.T), torch.ones(ROWS), accumulate=True)
    law = sampling.law(target.table)
    expected = torch.einsum("a,ab,bc,cd->abcd", law[0], law, law, law).flatten() * ROWS * batches
    observed = counts.flatten()
    if observed[expected == 0].sum() > 0:
        return 0.0  # drew the impossible
    common = expected >= 5  # cells too rare for the chi-square approximation are pooled
    pooled = [observed[~common].sum(), expected[~common].sum()]
    observed = torch.cat([observed[common], pooled[0][None]] if pooled[1] > 0 else [observed[common]]).double()
    expected = torch.cat([expected[common], pooled[1][None]] if pooled[1] > 0 else [expected[common]]).double()
    return stats.chisquare(observed.numpy(), (expected * observed.sum() / expected.sum()).numpy()).pvalue


@pytest.mark.parametrize("name", LAWS)
def test_sampled_drafts_leave_the_targets_law(name):
    assert p_value(LAWS[name], SampledGuess(), batches=10) > 1e-3


BUGS = {
    "q dropped from the acceptance": [("noise_accept * q_x < p_x", "noise_accept < p_x")],
    "residual not taken": [("(p_next - q_next)", "(p_next)")],
    "residual taken after a full accept": [
        ("accepted == draft.count", "accepted < 0"),
        ("torch.zeros_like(q[:, :1])", "q[:, -1:]"),
    ],
    "bonus from one position early": [("p_next = p[rows, accepted]", "p_next = p[rows, (accepted - 1).clamp(min=0)]")],
    "acceptance reuses the target's noise": [("noise_accept * q_x", "noise_target[:, :drafted] * q_x")],
    "hits after the first miss counted": [("_leading(proposed & (noise_accept", "_count(proposed & (noise_accept")],
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_rule_is_noticed(bug, monkeypatch):
    monkeypatch.setattr(verification, "_count", lambda kept: kept.long().sum(dim=1), raising=False)
    monkeypatch.setattr(decoding, "verify", mutated(verify, *BUGS[bug]))
    assert p_value(LAWS["t1"], SampledGuess()) < ALARM


def test_a_law_that_was_not_drawn_from_is_noticed():
    assert p_value(LAWS["t1"], SampledGuess(claimed=1 / V)) < ALARM


@pytest.mark.parametrize(
    ("ours", "drafters"),
    [(LAWS["t1"], LAWS["t0.7"]), (LAWS["top_p"], LAWS["t1"]), (LAWS["t1"], LAWS["top_k"])],
)
def test_drafts_drawn_under_one_law_and_claimed_under_another_are_noticed(ours, drafters):
    class OtherLaw(SampledGuess):
        def propose(self, batch, k):
            claimed, tokens, last = [], [], batch.last()
            for step in range(k):
                claimed.append(ours.law(self.table[last]))
                last = draw(drafters.law(self.table[last]), batch.noise_at(step, 1, "draft")[:, 0])
                tokens.append(last)
            return Draft(torch.stack(tokens, 1), torch.full((len(batch),), k), torch.stack(claimed, 1))

    assert p_value(ours, OtherLaw()) < ALARM


def block(accepted_tokens, k=4):
    """Logits [1, k+1, V] whose argmax is accepted_tokens, position by position."""
    logits = torch.zeros(1, k + 1, V)
    logits[0, torch.arange(k + 1), torch.tensor(accepted_tokens)] = 5.0
    return logits


@pytest.mark.parametrize("right", range(5))
def test_greedy_keeps_the_right_prefix_and_corrects_the_next(right):
    own = [1, 2, 3, 4, 0]
    tokens = torch.tensor([own[:4]])
    tokens[0, right:] = 0  # wrong from here on, though the last wrong token may look right again
    verdict = verify(Draft(tokens, torch.tensor([4])), block(own), Sampling())
    assert verdict.accepted.tolist() == [right]
    assert verdict.next.tolist() == [own[right]]


@pytest.mark.parametrize("count", range(5))
def test_padding_is_never_accepted(count):
    own = [1, 2, 3, 4, 0]
    draft = Draft(torch.tensor([own[:4]]), torch.tensor([count]))  # the padding happens to be right
    verdict = verify(draft, block(own), Sampling())
    assert verdict.accepted.tolist() == [count]
    assert verdict.next.tolist() == [own[count]]


def test_padding_of_a_sampled_draft_is_never_accepted():
    probs = torch.full((1, 2, V), 1 / V)
    draft = Draft(torch.tensor([[1, 1]]), torch.tensor([1]), probs)
    noise = torch.zeros(1, 3, dtype=torch.float64)
    verdict = verify(draft, torch.zeros(1, 3, V), Sampling(temperature=1.0), noise, noise[:, :2])
    assert verdict.accepted.tolist() == [1]
    assert verdict.next.tolist() == [0]  # the bonus, from p at position 1, with noise 0


def test_an_empty_draft_yields_the_targets_own_token():
    verdict = verify(Draft.empty(1, torch.device("cpu")), block([3], k=0), Sampling())
    assert (verdict.accepted.tolist(), verdict.next.tolist()) == ([0], [3])


def test_greedy_judges_a_sampled_draft_by_the_argmax():
    probs = torch.full((1, 1, V), 1 / V)
    verdict = verify(Draft(torch.tensor([[2]]), torch.tensor([1]), probs), block([2, 4], k=1), Sampling())
    assert (verdict.accepted.tolist(), verdict.next.tolist()) == ([1], [4])


def test_a_sampled_draft_without_noise_is_an_error():
    probs = torch.full((1, 1, V), 1 / V)
    with pytest.raises(ValueError, match="needs noise"):
        verify(Draft(torch.tensor([[2]]), torch.tensor([1]), probs), block([2, 4], k=1), Sampling(temperature=1.0))
