"""The test of sampled text: it finds every bug of a known kind, and blames no honest run."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from conftest import mutated, tiny
from scipy import stats

from drafters import proposing
from drafters.small_lm import SmallLM
from specbench import decoding, law
from specbench.drafting import Request
from specbench.law import Evidence, Score, check
from specbench.model import CausalLM
from specbench.sampling import Sampling
from specbench.stopping import StopRule
from specbench.targets import load_tiny
from specbench.verification import verify

PLAIN, NUCLEUS = Sampling(0.7), Sampling(0.7, top_p=0.9)

LAW = "sampling.law(logits, seen)"

# where the rule is broken, how, and under which law it shows
BUGS = {
    "q dropped in acceptance": (PLAIN, ("noise_accept * q_x < p_x", "noise_accept < p_x")),
    "q dropped altogether": (
        PLAIN,
        ("noise_accept * q_x < p_x", "noise_accept < p_x"),
        ("padded_q = torch.cat([q,", "padded_q = torch.cat([(9.0 * (q == q_x[..., None])),"),
    ),
    "the target's own arm at another temperature": (PLAIN, (LAW, "sampling.law(1.15 * logits, seen)")),
    "residual not taken": (PLAIN, ("(p_next - q_next).clamp(min=0)", "p_next")),
    "top-p in one arm only": (NUCLEUS, (LAW, "Sampling(sampling.temperature).law(logits)")),
    "bonus of the place before": (
        PLAIN,
        ("p_next = p[rows, accepted]", "p_next = p[rows, accepted - (accepted == draft.count).long()]"),
    ),
    "every draft is kept": (PLAIN, ("proposed & (noise_accept * q_x < p_x)", "proposed")),
}  # fmt: skip


@cache
def small() -> CausalLM:
    """Much like the target, and not the same: some of what it drafts is kept."""
    model = load_tiny("llama", engine="plain").model
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.08 * weight.std() * torch.randn(weight.shape, generator=noise) if weight.ndim > 1 else 0.0
    return CausalLM(model, tiny("llama").tokenizer, name="small", files={})


def batches(target: CausalLM, count: int = 24, seed: int = 0) -> list[list[Request]]:
    texts = ("one two one two one", "abc abd", "the end of the")
    asked = [Request(f"{text}-{seed}-{i}", target.tokenizer(text).input_ids) for text in texts for i in range(count)]
    return [asked[i : i + 24] for i in range(0, len(asked), 24)]


def found(seed: int = 0, sampling: Sampling = PLAIN, tokens: int = 40, count: int = 24) -> Evidence:
    target, drafter = tiny("llama"), SmallLM(small(), proposal="sample")
    drafter.bind(target)
    return check(target, drafter, batches(target, count, seed), 3, sampling, seed, StopRule(tokens))


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_a_known_kind_is_found(bug, monkeypatch):
    sampling, *changes = BUGS[bug]
    monkeypatch.setattr(decoding, "verify", mutated(verify, *changes))
    said = found(sampling=sampling).verdict()
    assert said["verdict"] == "mismatch", said


def test_drafts_that_are_not_of_the_law_handed_on_are_found(monkeypatch):
    """The drafter draws at one temperature, and says another."""
    monkeypatch.setattr(proposing.Proposal, "add", mutated(proposing.Proposal.add, ("draw(law", "draw(law.pow(1.5)")))
    said = found().verdict()
    assert said["verdict"] == "mismatch", said


@pytest.mark.parametrize("sampling", [PLAIN, NUCLEUS, Sampling(0.7, repetition_penalty=1.3)], ids=str)
def test_twenty_honest_runs_are_not_blamed(sampling):
    said = [found(seed, sampling, tokens=24, count=8).verdict() for seed in range(20)]
    assert [s["verdict"] for s in said] == ["law"] * 20
    assert min(s["p_value"] for s in said) > law.LEVEL
    # p-values of single tests are spread evenly, so that the level is what it says
    for name in ("surprisal", "overlap", "acceptance", "integral"):
        assert stats.kstest([s["p_values"][name] for s in said], "uniform").pvalue > 0.01


def test_every_token_is_a_place_and_drafts_are_told_from_what_has_none():
    evidence = found(tokens=24, count=8)
    assert len(evidence.integrals) == evidence.surprisal.places == 3 * 8 * 24
    assert evidence.bonus.places + evidence.overlap.places == evidence.surprisal.places
    assert evidence.bonus.places >= 3 * 8  # the first of each reply
    assert evidence.acceptance.places == evidence.overlap.places > 100


def test_the_least_that_is_noticed_is_noticed(monkeypatch):
    """A temperature off by what a run says it would notice, in most runs; by a third of that, in few."""
    least = found().verdict()["noticed_temperature"]
    assert 0.02 < least < 0.1

    def blamed(error):
        bug = mutated(verify, (LAW, f"sampling.law({1 + error} * logits, seen)"))
        monkeypatch.setattr(decoding, "verify", bug)
        return sum(found(seed).verdict()["verdict"] == "mismatch" for seed in range(6))

    assert blamed(least) >= 5
    assert blamed(least / 3) <= 1


def test_a_score_has_the_tails_of_its_skewness():
    score = Score(excess=3.0, variance=4.0, places=200)
    assert score.z == 1.5
    assert score.p_value == pytest.approx(2 * stats.norm.sf(1.5))
    assert Score(excess=3.0, variance=4.0, third=4.0).p_value == pytest.approx(2 * stats.pearson3.sf(1.5, 0.5))
    assert Score().p_value == 1.0


def test_a_draft_that_is_hardly_ever_refused_may_be_refused_once():
    """200 drafts from a law almost the target's: of one refusal the normal law would say that it cannot be chance."""
    score = Score()
    for place in range(200):
        score.add(float(place > 0), 0.99975, 0.99975 * 0.00025, 0.99975 * 0.00025 * (1 - 2 * 0.99975))
    assert 2 * stats.norm.sf(abs(score.z)) < law.LEVEL / 5
    assert score.p_value > 10 * law.LEVEL


@pytest.mark.parametrize("refused", [1e-3, 1e-5, 1e-7, 1e-9, 1e-11])
def test_that_no_draft_was_refused_proves_nothing_where_hardly_any_would_be(refused):
    score = Score()
    for _ in range(200):
        score.add(1.0, 1 - refused, refused * (1 - refused), refused * (1 - refused) * (2 * refused - 1))
    assert score.p_value > 0.1


def test_laws_that_do_not_quite_sum_to_1_are_brought_to_it():
    """As those of float32 do not, whose excess over thousands of places would look like a bias."""
    rounded = torch.tensor([0.25, 0.75000006], dtype=torch.float32)
    assert law._sums_to_1(rounded).sum().item() == pytest.approx(1.0, abs=1e-15)


def test_power_is_that_of_the_stated_level():
    evidence = Evidence()
    for _ in range(400):
        evidence.surprisal.add(-1.0, -1.0, 0.5, 0.0)
        evidence.acceptance.add(1.0, 0.5, 0.25, 0.0)
    said = evidence.verdict()
    reach = stats.norm.isf(law.LEVEL / 2 / 2) + stats.norm.ppf(law.POWER)  # two tests
    assert said["noticed_temperature"] == pytest.approx(reach / (400 * 0.5) ** 0.5)
    assert said["noticed_acceptance"] == pytest.approx(reach * (400 * 0.25) ** 0.5 / 400)
    assert said["z"]["acceptance"] == pytest.approx(200 / 100**0.5)
    assert said["verdict"] == "mismatch"


def judged(p: Sequence[float], token: int, q: Sequence[float] | None, kept: bool, exact: bool = True) -> Evidence:
    evidence = Evidence()
    asked = None if q is None else torch.tensor(q, dtype=torch.double)
    law._judge(torch.tensor(p, dtype=torch.double), token, asked, kept, 0.5, evidence, exact)
    return evidence


def test_a_place_by_hand():
    p, q = [0.5, 0.3, 0.2, 0.0], [0.2, 0.6, 0.1, 0.1]
    evidence = judged(p, 1, q, True)
    mean = sum(x * np.log(x) for x in p[:3])
    assert evidence.surprisal.excess == pytest.approx(np.log(0.3) - mean)
    assert evidence.surprisal.variance == pytest.approx(sum(x * (np.log(x) - mean) ** 2 for x in p[:3]))
    assert evidence.integrals == [pytest.approx(0.5 + 0.5 * 0.3)]
    assert evidence.overlap.excess == pytest.approx(1.0 - 0.6)  # min(1, q/p) there, and sum min(p, q)
    assert evidence.overlap.variance == pytest.approx(0.5 * 0.4**2 + 0.3 + 0.2 * 0.5**2 - 0.6**2)
    assert evidence.acceptance.excess == pytest.approx(1 - 0.6)
    assert evidence.acceptance.variance == pytest.approx(0.6 * 0.4)
    assert evidence.surprisal.third == pytest.approx(sum(x * (np.log(x) - mean) ** 3 for x in p[:3]))
    assert evidence.overlap.third == pytest.approx(
        0.5 * (0.4 - 0.6) ** 3 + 0.3 * (1 - 0.6) ** 3 + 0.2 * (0.5 - 0.6) ** 3
    )
    assert evidence.acceptance.third == pytest.approx(0.6 * (1 - 0.6) ** 3 + 0.4 * (0 - 0.6) ** 3)
    assert evidence.bonus.places == 0
    assert judged(p, 1, None, False).bonus.places == 1


def test_a_token_that_is_ruled_out_settles_it_where_rounding_cannot_explain_it():
    p = [0.5, 0.3, 0.2, 0.0]
    assert judged(p, 3, None, False).verdict()["verdict"] == "mismatch"
    half = judged(p, 3, None, False, exact=False)
    assert half.ruled_out == 0
    assert half.integrals == [pytest.approx(0.8 + 0.5 * 0.2)]  # as the least likely


def test_too_few_tokens_say_nothing():
    assert found(tokens=4, count=1).verdict()["verdict"] == "untested"
