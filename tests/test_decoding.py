import dataclasses

import pytest
import torch
from conftest import FAMILIES, plain_greedy, prompts, run, tiny
from transformers import AutoModelForCausalLM, GPT2Config

from drafters.ngram import NGram
from drafters.none import NoDrafter
from drafters.oracle import Oracle
from drafters.scripted import Scripted
from drafters.small_lm import SmallLM
from drafters.suffix import Suffix
from specbench.drafting import Drafter, Request
from specbench.errors import RunError
from specbench.model import CausalLM
from specbench.sampling import Sampling
from specbench.stopping import StopRule
from specbench.targets import byte_tokenizer
from specbench.verification import Draft

NEW = 24
DRAFTERS = {
    "none": lambda family: NoDrafter(),
    "ngram": lambda family: NGram(),
    "ngram_first": lambda family: NGram(max_n=2, match="first"),
    "suffix": lambda family: Suffix(),
    "suffix_run": lambda family: Suffix(memory="run"),
    "small_lm": lambda family: SmallLM(tiny(family, seed=1)),
    "small_lm_twin": lambda family: SmallLM(tiny(family)),
    "oracle": lambda family: Oracle(),
    "oracle_often_wrong": lambda family: Oracle(hit_rate=0.5),
    "scripted": lambda family: Scripted([(4, 4), (4, 0), (2, 1), (0, 0), (3, 3)]),
}


def requests_for(lm, count, sampling=None):
    """Requests with the baseline's reply as reference."""
    bare = [Request(f"p{i}", tokens) for i, tokens in enumerate(prompts(lm, count))]
    replies, _ = run(lm, NoDrafter(), bare, k=0, sampling=sampling)
    return [dataclasses.replace(r, reference=reply) for r, reply in zip(bare, replies, strict=True)]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_plain_decoding(family, name, batch):
    lm = tiny(family)
    requests = requests_for(lm, batch)
    replies, _ = run(lm, DRAFTERS[name](family), requests, k=0 if name == "none" else 4)
    for request, reply in zip(requests, replies, strict=True):
        assert reply == plain_greedy(lm, request.tokens, NEW)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=1.0), Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.3)],
    ids=["t1", "nucleus"],
)
def test_sampled_text_of_deterministic_drafts_is_that_of_plain_sampling(name, batch, sampling):
    lm = tiny("llama")
    requests = requests_for(lm, batch, sampling)
    replies, _ = run(lm, DRAFTERS[name]("llama"), requests, k=0 if name == "none" else 4, sampling=sampling)
    assert replies == [request.reference for request in requests]


def test_greedy_repetition_penalty_holds_inside_a_block(llama):
    sampling = Sampling(repetition_penalty=1.5)
    requests = requests_for(llama, 3, sampling)
    assert requests[0].reference != requests_for(llama, 1)[0].reference
    replies, _ = run(llama, Oracle(), requests, sampling=sampling)
    assert replies == [request.reference for request in requests]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "t1"])
def test_text_depends_neither_on_the_batch_nor_on_the_order(llama, sampling):
    requests = requests_for(llama, 3, sampling)
    for order in ([2, 0, 1], [1], [2, 2, 2, 2]):
        replies, _ = run(llama, NGram(), [requests[i] for i in order], sampling=sampling)
        assert replies == [requests[i].reference for i in order]


@pytest.mark.parametrize("name", DRAFTERS)
def test_nothing_survives_from_one_prompt_to_the_next(llama, name):
    if name == "suffix_run":
        pytest.skip("keeps earlier outputs by design")
    first, second, _ = requests_for(llama, 3)
    used = DRAFTERS[name]("llama")
    k = 0 if name == "none" else 4
    run(llama, used, [first], k=k)
    _, after = run(llama, used, [second], k=k)
    _, fresh = run(llama, DRAFTERS[name]("llama"), [second], k=k)
    assert [s.drafted for s in after] == [s.drafted for s in fresh]


def test_every_acceptance_length_occurs(llama):
    requests = requests_for(llama, 1)
    _, steps = run(llama, Scripted([(4, 0), (4, 1), (4, 2), (4, 3), (4, 4)]), requests)
    assert [s.accepted[0] for s in steps[1:6]] == [0, 1, 2, 3, 4]
    assert [len(s.committed[0]) for s in steps[1:6]] == [1, 2, 3, 4, 5]


def test_a_model_drafting_for_itself_is_always_right(lm):
    requests = requests_for(lm, 3)
    _, steps = run(lm, SmallLM(lm), requests, k=3, stop=StopRule(NEW))
    assert all(s.accepted == s.proposed for s in steps)


def test_oracle_commits_k_plus_one_tokens_a_pass(llama):
    _, steps = run(llama, Oracle(), requests_for(llama, 1), k=4, stop=StopRule(21))
    assert [len(s.committed[0]) for s in steps] == [1, 5, 5, 5, 5]


def plain_until(lm, request, stop):
    return run(lm, NoDrafter(), [request], k=0, stop=stop)[0][0]


@pytest.mark.parametrize("at", range(1, 12))
def test_an_end_token_anywhere_in_a_block_ends_the_text_there(llama, at):
    (request,) = requests_for(llama, 1)
    token = request.reference[at]
    stop = StopRule(NEW, token_ids=frozenset([token]))
    expected = request.reference[: request.reference.index(token) + 1]
    assert plain_until(llama, request, stop) == expected
    (reply,), steps = run(llama, Oracle(), [request], stop=stop)
    assert reply == expected
    assert steps[-1].finish == ["eos"]
    # nothing past the end counts
    assert steps[-1].proposed[0] <= len(steps[-1].committed[0])
    assert steps[-1].accepted[0] <= len(steps[-1].committed[0])


@pytest.mark.parametrize("n", range(1, 14))
def test_the_token_limit_is_exact(llama, n):
    (request,) = requests_for(llama, 1)
    (reply,), steps = run(llama, Oracle(), [request], stop=StopRule(n))
    assert reply == request.reference[:n]
    assert steps[-1].finish == ["length"]


@pytest.mark.parametrize("room", range(1, 10))
def test_the_context_limit_is_exact(llama, room):
    (request,) = requests_for(llama, 1)
    stop = StopRule(NEW, context=len(request.tokens) + room)
    assert plain_until(llama, request, stop) == request.reference[:room]
    (reply,), steps = run(llama, Oracle(), [request], stop=stop)
    assert reply == request.reference[:room]
    assert steps[-1].finish == ["context"]


def test_learned_positions_reach_exactly_to_the_end_of_their_table():
    tokenizer = byte_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=48, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3
    )
    torch.manual_seed(0)
    lm = CausalLM(AutoModelForCausalLM.from_config(config, dtype=torch.float32), tokenizer, name="gpt2")
    prompt = tokenizer("ab " * 17).input_ids  # 51 of 64 positions
    (reply,), _ = run(lm, NGram(), [Request("p", prompt)], k=7, stop=StopRule(NEW, context=lm.context))
    assert reply == plain_greedy(lm, prompt, lm.context - len(prompt))


def test_a_drafter_that_proposes_nothing_costs_a_plain_pass(llama, monkeypatch):
    widths = []
    forward = llama.forward
    monkeypatch.setattr(
        llama, "forward", lambda tokens, *a, **kw: widths.append(tokens.shape[1]) or forward(tokens, *a, **kw)
    )
    run(llama, NGram(min_n=4), [Request("p", [5, 6, 7])], k=16, stop=StopRule(4))
    assert widths == [3, 1, 1, 1]


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("start", range(3, 9))
def test_a_stop_string_is_found_across_block_boundaries(llama, start, length):
    (request,) = requests_for(llama, 1)

    def decode(tokens):
        return "".join(f"<{t}>" for t in tokens)  # every token visible, whatever bytes it stands for

    string = decode(request.reference[start : start + length])[1:-1]  # begins and ends inside tokens
    stop = StopRule(NEW, strings=(string,), decode=decode)
    expected = plain_until(llama, request, stop)
    assert string in decode(expected)
    assert string not in decode(expected[:-1])
    (reply,), steps = run(llama, Oracle(), [request], stop=stop)
    assert reply == expected
    assert steps[-1].finish == ["stop_string"]


def test_the_first_of_several_ends_counts(llama):
    (request,) = requests_for(llama, 1)
    end = frozenset([request.reference[5], request.reference[7]])
    first = min(request.reference.index(t) for t in end)
    (reply,), _ = run(llama, Oracle(), [request], stop=StopRule(NEW, token_ids=end))
    assert reply == request.reference[: first + 1]


def test_finished_rows_are_inert(llama):
    requests = requests_for(llama, 3)
    token = requests[1].reference[2]
    stop = StopRule(NEW, token_ids=frozenset([token]))
    expected = [plain_until(llama, r, stop) for r in requests]
    replies, steps = run(llama, NGram(), requests, stop=stop)
    assert replies == expected
    ended = [next(s.round for s in steps if row in s.rows and s.finish[s.rows.index(row)]) for row in range(3)]
    assert len(set(ended)) > 1
    assert all(row not in s.rows for row in range(3) for s in steps if s.round > ended[row])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_fail_and_name_the_round(llama, monkeypatch, bad):
    forward, calls = llama.forward, []

    def poisoned(*args, **kwargs):
        output = forward(*args, **kwargs)
        calls.append(output)
        if len(calls) == 4:  # prefill, then rounds 1, 2, 3
            output.logits[0, 0, 7] = bad
        return output

    monkeypatch.setattr(llama, "forward", poisoned)
    with pytest.raises(RunError, match="NaN or infinite in round 3 of prompt p0"):
        run(llama, NoDrafter(), [Request("p0", [5, 6, 7])], k=0)


ONE, TWO = torch.tensor([1]), torch.zeros(1, 2, dtype=torch.long)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft(torch.zeros(1, 3, dtype=torch.long), ONE), "drafted 3 tokens where k=2"),
        (Draft(TWO + 100_000, ONE), "outside the vocabulary"),
        (Draft(TWO - 1, ONE), "outside the vocabulary"),
        (Draft(TWO, ONE + 2), r"counts \[3\] drafted tokens where it gave 2"),
        (Draft(TWO.float(), ONE), "drafted torch.float32"),
        (Draft(torch.zeros(2, 2, dtype=torch.long), ONE), r"\[2, 2\] with counts \[1\]"),
        (Draft(TWO, ONE, torch.zeros(1, 2, 5)), r"handed on probs \[1, 2, 5\]"),
    ],
)
def test_a_malformed_draft_is_an_error(llama, draft, message):
    class Wrong(Drafter):
        def propose(self, batch, k):
            return draft

    with pytest.raises(RunError, match=message):
        run(llama, Wrong(), [Request("p0", [5, 6])], k=2)


def test_a_stop_string_is_found_where_text_changes_with_the_next_token(llama):
    """Two tokens make one character: what the first alone reads as must end the text in every arm, or in none."""
    tokens = llama.tokenizer("é").input_ids
    stop = StopRule(NEW, strings=("\ufffd",), decode=llama.tokenizer.decode)
    assert stop.cut([], tokens[:1], 1) == stop.cut([], tokens, 1) == (1, "stop_string")
