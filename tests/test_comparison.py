import dataclasses

import pytest
from conftest import baseline

from drafters.ngram import NGram
from drafters.oracle import Oracle
from drafters.suffix import Suffix
from specbench import comparison
from specbench.comparison import Arm, Settings, compare
from specbench.drafting import Drafter
from specbench.errors import ConfigError, RunError
from specbench.prompts import Conversation
from specbench.sampling import Sampling
from specbench.stopping import StopRule
from specbench.verification import Draft

CONVERSATIONS = [
    Conversation("a", "chat", ("hello", "and again")),
    Conversation("b", "code", ("one two one two",)),
    Conversation("c", "chat", ("tell me", "more")),
]


def settings(batch_size=1, n=8, **stop):
    return Settings(batch_size, Sampling(), 0, StopRule(n, **stop))


def measure(lm, *methods, conversations=CONVERSATIONS, shared=None):
    plain = baseline(lm)
    for arm in methods:
        arm.drafter.bind(lm)
    return plain, compare(lm, conversations, plain, methods, shared or settings())


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_arms_stand_equally_often_at_each_place_whoever_needs_a_reference(llama, extra):
    arms = [baseline(llama), *(Arm(str(i), NGram(), 1) for i in range(1 + extra)), Arm("oracle", Oracle(), 1)]
    orders = [comparison.in_turns(arms, batch) for batch in range(24)]
    for arm in arms[:-1]:
        places = [order.index(arm) for order in orders]
        assert len({places.count(place) for place in range(2 + extra)}) == 1
    followed = {order[order.index(arms[1]) - 1].name for order in orders if order.index(arms[1]) > 0}
    assert len(followed) > 1 or extra == 0


def test_the_order_is_recorded(llama):
    arm = Arm("ngram", NGram(), 2)
    plain, _ = measure(llama, arm)
    ours, theirs = ([r["order"] for r in a.steps if r["round"] == 0] for a in (plain, arm))
    assert [a + b for a, b in zip(ours, theirs, strict=True)] == [1] * 5
    assert {0, 1} == set(ours)


def test_arms_that_need_the_baselines_reply_come_last(llama):
    oracle, ngram = Arm("oracle", Oracle(), 2), Arm("ngram", NGram(), 2)
    measure(llama, oracle, ngram)
    assert {r["order"] for r in oracle.steps} == {2}


def test_a_second_turn_follows_the_baselines_reply(llama):
    arm = Arm("ngram", NGram(), 2)
    plain, outcome = measure(llama, arm)
    second = next(t for t in outcome.turns if t.request.uid == "a/2")
    reply = llama.tokenizer.decode(plain.replies["a/1"], skip_special_tokens=True)
    text = llama.tokenizer.decode(second.request.tokens)
    assert text == f"<s><turn>user: hello</s><turn>assistant: {reply}</s><turn>user: and again</s><turn>assistant: "


def test_the_reply_that_a_second_turn_follows_ends_before_the_stop_string(llama):
    plain, _ = measure(llama)
    reply = llama.tokenizer.decode(plain.replies["a/1"], skip_special_tokens=True)
    string = reply[2:4]
    stopped = settings(strings=(string,), decode=llama.tokenizer.decode)
    plain, outcome = measure(llama, shared=stopped)
    assert plain.finish["a/1"] == "stop_string"
    second = next(t for t in outcome.turns if t.request.uid == "a/2")
    kept = reply[: reply.find(string)]
    assert f"<turn>assistant: {kept}</s><turn>user: and again" in llama.tokenizer.decode(second.request.tokens)


def test_every_turn_is_decoded_once_by_every_arm(llama):
    arm = Arm("ngram", NGram(), 2)
    plain, outcome = measure(llama, arm, shared=settings(batch_size=2))
    uids = [t.request.uid for t in outcome.turns]
    assert uids == ["b/1", "a/1", "c/1", "a/2", "c/2"]  # conversations of as many turns go together, turn by turn
    placed = {r["uid"]: (r["unit"], r["batch"]) for r in plain.steps}
    assert placed == {"b/1": (0, 0), "a/1": (1, 1), "c/1": (1, 1), "a/2": (1, 2), "c/2": (1, 2)}
    assert set(plain.replies) == set(arm.replies) == set(uids)
    assert plain.replies == arm.replies


def test_the_oracle_is_given_the_baselines_reply(llama):
    arm = Arm("oracle", Oracle(), 3)
    measure(llama, arm, shared=settings(batch_size=3, n=9))
    assert all(r["accepted"] == r["proposed"] for r in arm.steps)


def test_warm_up_is_not_measured_and_not_remembered(llama):
    class Counting(NGram):
        resets = 0

        def reset(self):
            self.resets += 1

    arm = Arm("counting", Counting(), 2)
    measure(llama, arm)
    assert not any("warm-up" in r["uid"] for r in arm.steps)
    assert arm.drafter.resets == 1


def test_all_is_measured_as_often_as_repeats_are_asked_for(llama):
    once, thrice = Arm("ngram", NGram(), 2), Arm("ngram", NGram(), 2)
    _, alone = measure(llama, once)
    plain, outcome = measure(llama, thrice, shared=Settings(1, Sampling(), 0, StopRule(8), repeats=3))
    assert len(thrice.steps) == 3 * len(once.steps)
    assert {row["repeat"] for row in plain.steps} == {0, 1, 2}
    assert len({row["batch"] for row in plain.steps}) == 15  # each has its own time
    assert outcome.batches == alone.batches
    assert (thrice.replies, thrice.finish) == (once.replies, once.finish)
    assert thrice.changed == set()
    # who is first in one repeat is not in the next
    first = [r["order"] for r in thrice.steps if r["round"] == 0 and r["uid"] == "b/1"]
    assert len(set(first)) == 2


def test_a_drafter_has_forgotten_a_repeat_when_the_next_begins(llama):
    """Else it would draft the very reply it has just seen."""
    arm = Arm("suffix", Suffix(), 3)
    measure(llama, arm, shared=Settings(1, Sampling(), 0, StopRule(8), repeats=2))
    drafts = [[r["drafted"] for r in arm.steps if r["repeat"] == repeat] for repeat in (0, 1)]
    assert drafts[0] == drafts[1]


def test_a_text_that_changes_from_repeat_to_repeat_is_named(llama):
    class Wandering(NGram):
        calls = 0

        def propose(self, batch, k):
            self.calls += 1
            batch.tokens[0, batch.lengths[0] - 1] = self.calls % 200  # what no drafter may do
            return super().propose(batch, k)

    arm = Arm("wandering", Wandering(), 2)
    measure(llama, arm, shared=Settings(1, Sampling(), 0, StopRule(8), repeats=2))
    assert arm.changed == {"a/1", "a/2", "b/1", "c/1", "c/2"}


@pytest.mark.parametrize("repeats", [0, -1])
def test_impossible_repeats_are_refused(repeats):
    with pytest.raises(ConfigError, match=f"repeats={repeats} measures nothing; give 1 or more"):
        Settings(1, Sampling(), 0, StopRule(8), repeats)


class Failing(Drafter):
    """Works until the prompt ``uid`` comes."""

    def __init__(self, uid):
        self.uid = uid

    def propose(self, batch, k):
        if any(r.uid == self.uid for r in batch.requests):
            raise RuntimeError("no idea")
        return Draft.empty(len(batch), batch.device)


def test_a_failing_method_does_not_take_the_others_along(llama):
    failing, fine = Arm("failing", Failing("b/1"), 2), Arm("ngram", NGram(), 2)
    plain, outcome = measure(llama, failing, fine)
    assert str(failing.error) == "no idea"
    assert fine.error is None
    assert len(fine.replies) == len(plain.replies) == len(outcome.turns)
    assert "b/1" not in failing.replies


def test_a_failing_baseline_fails_the_run(llama):
    arm = Arm("baseline", Failing("a/1"), 0)
    with pytest.raises(RunError, match="the baseline failed: no idea"):
        compare(llama, CONVERSATIONS, arm, [], settings())


def test_prompts_beyond_the_context_are_left_out_and_named(llama):
    long = Conversation("long", "code", ("x" * 600, "more"))
    _, outcome = measure(
        llama, Arm("ngram", NGram(), 2), conversations=[long, *CONVERSATIONS], shared=settings(context=llama.context)
    )
    assert outcome.too_long == ["long/1", "long/2"]


def test_a_second_turn_beyond_the_context_is_left_out_and_named(llama):
    grows = Conversation("grows", "code", ("x" * 400, "y" * 90))
    plain, outcome = measure(
        llama, Arm("ngram", NGram(), 2), conversations=[grows, *CONVERSATIONS], shared=settings(context=llama.context)
    )
    assert outcome.too_long == ["grows/2"]
    assert "grows/1" in plain.replies


def test_the_rest_goes_on_without_prompts_beyond_the_context(llama):
    long = Conversation("long", "code", ("x" * 600, "more"))
    _, outcome = measure(
        llama, Arm("ngram", NGram(), 2), conversations=[long, *CONVERSATIONS], shared=settings(context=llama.context)
    )
    assert len(outcome.turns) == 5


def test_nothing_but_prompts_beyond_the_context_is_an_error(llama):
    long = Conversation("long", "code", ("x" * 600,))
    with pytest.raises(ConfigError, match="longer than the context of tiny-llama"):
        measure(llama, conversations=[long], shared=settings(context=llama.context))


@pytest.mark.parametrize("size", [0, -1, 65])
def test_impossible_batch_sizes_are_refused(size):
    with pytest.raises(ConfigError, match=f"batch_size={size}"):
        settings(batch_size=size)


def test_impossible_draft_lengths_are_refused(llama):
    with pytest.raises(ConfigError, match="k=-1 is negative"):
        Arm("ngram", NGram(), -1)
    with pytest.raises(ConfigError, match="k=1 is above what drafter baseline can draft"):
        dataclasses.replace(baseline(llama), k=1)


def test_a_batch_of_64_runs_with_uneven_rows(llama):
    conversations = [Conversation(str(i), "x", ("ab " * (1 + i % 9),)) for i in range(64)]
    arm = Arm("ngram", NGram(), 3)
    plain, _ = measure(llama, arm, conversations=conversations, shared=settings(comparison.MAX_BATCH, n=6))
    assert plain.replies == arm.replies
