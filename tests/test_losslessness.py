import math

import pytest
import torch
from conftest import plain_greedy, prompts, run, tiny

from drafters.none import NoDrafter
from specbench import losslessness
from specbench.drafting import Request
from specbench.law import Evidence
from specbench.losslessness import Divergence, divergence, summarise
from specbench.model import Output
from specbench.sampling import Noise, Sampling
from specbench.targets import load_tiny

GREEDY, T1 = Sampling(), Sampling(temperature=1.0)


@pytest.fixture
def replied(llama):
    prompt = prompts(llama, 1)[0]
    return llama, prompt, plain_greedy(llama, prompt, 10)


def judge(replied, reply, sampling=GREEDY):
    lm, prompt, expected = replied
    return divergence(lm, "p", prompt, expected, reply, sampling, 0)


def test_equal_replies_have_no_divergence(replied):
    assert judge(replied, list(replied[2])) is None


def test_the_first_difference_is_found_with_its_margin(replied):
    lm, prompt, expected = replied
    wrong = [*expected[:4], (expected[4] + 1) % lm.vocab_size, *expected[5:]]
    found = judge(replied, wrong)
    with torch.inference_mode():
        logits = lm.model(input_ids=torch.tensor([[*prompt, *expected[:4]]]), use_cache=False).logits[0, -1]
    assert found.position == 4
    assert found.margin == pytest.approx((logits[expected[4]] - logits[wrong[4]]).item(), abs=1e-4)


def test_no_tie_is_forgiven_in_float32(replied):
    expected = replied[2]
    assert judge(replied, [*expected[:9], expected[9] + 1]).verdict == "mismatch"


@pytest.mark.parametrize("reply", [[], "shorter", "longer"])
def test_a_reply_of_other_length_is_a_mismatch(replied, reply):
    expected = replied[2]
    reply = {"shorter": expected[:5], "longer": [*expected, 7]}.get(reply, []) if isinstance(reply, str) else reply
    found = judge(replied, reply)
    assert found.verdict == "mismatch"
    assert found.margin == math.inf


def test_low_precision_forgives_a_near_tie_and_nothing_else(monkeypatch):
    lm = load_tiny("llama", dtype="bfloat16")
    prompt = prompts(lm, 1)[0]
    forward = lm.forward

    def with_logits(margin):
        def patched(*args, **kwargs):
            logits = torch.zeros_like(forward(*args, **kwargs).logits)
            logits[..., 7] = 16.0
            logits[..., 9] = 16.0 - margin
            return Output(logits, None)

        monkeypatch.setattr(lm, "forward", patched)
        return divergence(lm, "p", prompt, [7], [9], GREEDY, 0)

    # bfloat16 steps by 1/8 between 16 and 32: up to four of them are a tie
    assert with_logits(0.375).verdict == "near-tie"
    assert with_logits(0.5).verdict == "near-tie"
    assert with_logits(0.75).verdict == "mismatch"


def test_sampled_text_after_a_difference_is_judged_as_well():
    """A reply that is what the noise says stands, whatever another arm said; one token that is not, is found."""
    lm = tiny("llama")
    prompt = prompts(lm, 1)[0]
    (reply,), _ = run(lm, NoDrafter(), [Request("p", prompt)], k=0, sampling=T1)
    other = [*reply[:2], (reply[2] + 1) % lm.vocab_size, *reply[3:]]
    honest = divergence(lm, "p", prompt, other, reply, T1, 0)
    assert (honest.position, honest.verdict) == (2, "near-tie")
    wrong = [*reply[:6], (reply[6] + 40) % lm.vocab_size, *reply[7:]]
    found = divergence(lm, "p", prompt, other, wrong, T1, 0)
    assert (found.position, found.verdict) == (6, "mismatch")


def test_greedy_text_after_a_tie_is_judged_as_well(monkeypatch):
    lm = load_tiny("llama", dtype="bfloat16")
    prompt = prompts(lm, 1)[0]
    tied = torch.zeros(lm.vocab_size)
    tied[[7, 9]] = 16.0
    monkeypatch.setattr(losslessness, "rescore", lambda target, text, start: (tied for _ in text[start:]))
    assert divergence(lm, "p", prompt, [7, 7, 7], [7, 9, 7], GREEDY, 0) == Divergence(1, 0.0, 0.5)
    found = divergence(lm, "p", prompt, [7, 7, 7], [7, 9, 8], GREEDY, 0)
    assert (found.position, found.margin, found.verdict) == (2, 16.0, "mismatch")


def test_a_sampled_divergence_is_judged_by_the_noise():
    lm = tiny("llama")
    prompt = prompts(lm, 1)[0]
    (reply,), _ = run(lm, NoDrafter(), [Request("p", prompt)], k=0, sampling=T1)
    law = T1.law(lm.forward(torch.tensor([prompt]), lm.new_cache(1, 64), last_only=True).logits[0, -1])
    far = (reply[0] + 40) % lm.vocab_size
    found = divergence(lm, "p", prompt, reply, [far, *reply[1:]], T1, 0)
    low, high = law[:far].sum().item(), law[: far + 1].sum().item()
    assert found.verdict == "mismatch"
    assert found.margin > 0
    # the margin is the distance of the noise, which lies in the chosen token's interval, from the other's interval
    chosen_low = law[: reply[0]].sum().item()
    chosen_high = chosen_low + law[reply[0]].item()
    nearest = min(abs(low - chosen_high), abs(chosen_low - high))
    assert nearest - 1e-5 <= found.margin <= nearest + law[reply[0]].item() + 1e-5


def test_summary_counts_each_kind():
    tie, bad, end = Divergence(3, 0.1, 0.2), Divergence(1, 2.0, 0.2), Divergence(5, math.inf, 0.0)
    found = summarise([None, None, tie, bad, end])
    assert found["verdict"] == "mismatch"
    assert (found["prompts"], found["equal"], found["near_ties"], found["mismatches"]) == (5, 2, 1, 2)
    assert (found["largest_near_tie_margin"], found["largest_mismatch_margin"]) == (0.1, 2.0)
    assert summarise([None, tie])["verdict"] == "near-tie"
    assert summarise([None])["verdict"] == "equal"


def test_two_wrong_tokens_of_equal_rank_are_no_tie(replied):
    lm, prompt, _ = replied
    logits = lm.forward(torch.tensor([prompt]), lm.new_cache(1, 64), last_only=True).logits[0, -1]
    *_, almost, worst = logits.argsort(descending=True).tolist()
    found = divergence(lm, "p", prompt, [almost], [worst], GREEDY, 0)
    assert found.margin == pytest.approx((logits.max() - logits[worst]).item(), abs=1e-4)


def test_a_token_ruled_out_is_no_tie(llama):
    prompt = prompts(llama, 1)[0]
    sampling = Sampling(temperature=1.0, top_k=1)
    best = plain_greedy(llama, prompt, 1)[0]
    for wrong in range(0, llama.vocab_size, 20):
        if wrong != best:
            assert divergence(llama, "p", prompt, [best], [wrong], sampling, 0).margin == math.inf


def test_in_half_precision_rounding_may_carry_a_token_across_the_edge_of_a_truncated_law(monkeypatch):
    """The method saw 0.06 of probability for a token that the target, asked alone, just drops."""
    lm = load_tiny("llama", dtype="bfloat16")
    prompt = prompts(lm, 1)[0]
    noise = Noise(0, ["p"], len(prompt) + 1).at(torch.tensor([[len(prompt)]]), "target").item()
    law = torch.zeros(lm.vocab_size, dtype=torch.double)
    law[[10, 20, 30]] = torch.tensor([noise, 0.0, 1 - noise], dtype=torch.double)  # the edge is at token 20
    monkeypatch.setattr(losslessness, "rescore", lambda target, text, start: (law.log() for _ in text[start:]))
    nucleus = Sampling(1.0, top_p=0.9999)
    assert divergence(lm, "p", prompt, [10], [20], nucleus, 0).verdict == "near-tie"
    assert divergence(lm, "p", prompt, [10], [lm.vocab_size - 1], nucleus, 0).margin == pytest.approx(1 - noise)


def test_a_sharpened_law_is_judged_by_a_wider_tolerance():
    """A rounding of a logit moves twice as much of it at half the temperature."""
    lm = load_tiny("llama", dtype="bfloat16")
    prompt = prompts(lm, 1)[0]
    tolerances = [divergence(lm, "p", prompt, [1], [2], Sampling(t), 0).tolerance for t in (2.0, 1.0, 0.5)]
    assert tolerances == pytest.approx([0.15, 0.15, 0.3])


def test_a_reply_of_one_token_is_judged(monkeypatch):
    lm = load_tiny("llama", dtype="bfloat16")
    prompt = prompts(lm, 1)[0]
    best = lm.forward(torch.tensor([prompt]), lm.new_cache(1, 64), last_only=True).logits[0, -1].argmax().item()
    widths = []
    forward = lm.forward
    monkeypatch.setattr(
        lm, "forward", lambda tokens, *a, **h: widths.append(tokens.shape[-1]) or forward(tokens, *a, **h)
    )
    assert divergence(lm, "p", prompt, [(best + 1) % lm.vocab_size, 1], [best], GREEDY, 0).position == 0
    assert 0 not in widths


def test_sampled_drafts_are_judged_by_the_evidence_of_their_law():
    divergences = [None, Divergence(1, 2.0, 0.0)]
    untested = summarise(divergences, by_law=True)
    assert (untested["verdict"], untested["prompts"], untested["equal"]) == ("untested", 2, 1)
    evidence = Evidence()
    for _ in range(200):
        evidence.surprisal.add(-1.0, -1.0, 1.0, 0.0)
    assert summarise(divergences, evidence, by_law=True)["verdict"] == "law"
    for _ in range(200):
        evidence.surprisal.add(-2.0, -1.0, 1.0, 0.0)
    assert summarise(divergences, evidence, by_law=True)["verdict"] == "mismatch"
    assert summarise(divergences, evidence)["verdict"] == "mismatch"  # token by token


def test_no_sampled_draft_is_excused_by_the_law_of_others():
    assert summarise([None], Evidence())["verdict"] == "equal"
