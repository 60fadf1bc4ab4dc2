import logging
from dataclasses import replace
from functools import cache

import pytest
import torch
from conftest import FAMILIES, break_cache, mutated, prompts, run, tiny, untrace

from drafters.ngram import NGram
from drafters.none import NoDrafter
from drafters.small_lm import SmallLM
from specbench import decoding, graphs
from specbench.cache import RaggedCache
from specbench.decoding import PARTS
from specbench.drafting import Request
from specbench.errors import RunError
from specbench.graphs import Recordings
from specbench.model import CausalLM
from specbench.sampling import Sampling
from specbench.stopping import StopRule
from specbench.targets import byte_tokenizer, load_tiny

CPU = torch.device("cpu")
NEW = 16
GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.0)


def add_to(other):
    return lambda inputs: (inputs + other, inputs * 2)


def test_a_replay_is_what_running_gives():
    recordings, run_ = Recordings(CPU), add_to(torch.tensor([10, 20]))
    for inputs in (torch.tensor([1, 2]), torch.tensor([3, 5]), torch.tensor([3, 5])):
        total, twice = recordings.replay("key", run_, inputs)
        assert total.tolist() == (inputs + torch.tensor([10, 20])).tolist()
        assert twice.tolist() == (2 * inputs).tolist()


def test_a_replay_overwrites_the_outputs_of_the_one_before():
    recordings, run_ = Recordings(CPU), add_to(torch.tensor([0]))
    (kept, _), copy = recordings.replay("key", run_, torch.tensor([1])), torch.tensor([1])
    assert kept.tolist() == copy.tolist()
    recordings.replay("key", run_, torch.tensor([7]))
    assert kept.tolist() == [7]


def test_a_replay_leaves_the_inputs_of_its_caller():
    recordings, first, second = Recordings(CPU), torch.tensor([1]), torch.tensor([2])
    for inputs in (first, second):
        recordings.replay("key", add_to(torch.tensor([0])), inputs)
    assert (first.tolist(), second.tolist()) == ([1], [2])


def test_a_second_key_is_a_second_recording():
    recordings = Recordings(CPU)
    assert len(recordings) == 0
    (one, _) = recordings.replay(1, add_to(torch.tensor([0])), torch.tensor([1]))
    (two, _) = recordings.replay(2, add_to(torch.tensor([100])), torch.tensor([1, 2]))
    assert (one.tolist(), two.tolist()) == ([1], [101, 102])
    assert len(recordings) == 2
    assert 1 in recordings
    assert 3 not in recordings


def test_the_computation_first_given_for_a_key_is_the_one_that_counts():
    recordings = Recordings(CPU)
    recordings.replay("key", add_to(torch.tensor([0])), torch.tensor([1]))
    (total, _) = recordings.replay("key", add_to(torch.tensor([100])), torch.tensor([1]))
    assert total.tolist() == [1]


def test_other_tensors_count_by_their_content_at_the_replay():
    other = torch.tensor([10])
    recordings, run_ = Recordings(CPU), add_to(other)
    recordings.replay("key", run_, torch.tensor([1]))
    other.fill_(50)
    assert recordings.replay("key", run_, torch.tensor([1]))[0].tolist() == [51]


def new_recorded(family="llama", seed=0):
    """A model that records its steps, off a GPU too."""
    plain = load_tiny(family, seed=seed, engine="plain").model
    return CausalLM(plain, byte_tokenizer(), name=f"recorded-{family}", record=True)


recorded = cache(new_recorded)


@pytest.fixture
def lm():
    """One with nothing recorded on any spare cache."""
    lm = recorded()
    lm._spare.clear()
    return lm


def drafter_of(name, model, small, sampling=GREEDY):
    if name == "none":
        return NoDrafter(), 0
    if name == "ngram":
        return NGram(), 4
    proposal = "greedy" if sampling.greedy else "sample"
    return SmallLM(small if name == "small_lm" else model, proposal), 3


def requests_for(lm, count=3):
    return [Request(f"p{i}", tokens) for i, tokens in enumerate(prompts(lm, count))]


def text_of(lm, small=None, name="none", sampling=GREEDY):
    drafter, k = drafter_of(name, lm, small, sampling)
    return run(lm, drafter, requests_for(lm), k=k, sampling=sampling, stop=StopRule(NEW))[0]


@cache
def expected_text(family, name, sampling):
    """By an unrecorded model; only drafts that come with a law change the text."""
    if name != "none" and (sampling.greedy or name == "ngram"):
        return expected_text(family, "none", sampling)
    return text_of(tiny(family), tiny(family, seed=1), name, sampling)


DRAFTERS = ["none", "ngram", "small_lm", "twin"]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "t1"])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_text_is_that_of_an_unrecorded_model(family, name, sampling):
    lm, small = recorded(family), recorded(family, seed=1)
    assert text_of(lm, small, name, sampling) == expected_text(family, name, sampling)
    assert lm._record
    assert lm._spare


@pytest.mark.parametrize(
    ("kind", "method", "change"),
    [
        (graphs._Recorded, "__call__", ("held.copy_(given, non_blocking=True)", "pass")),
        (graphs._Recorded, "__call__", ("self._refill()", "pass")),
        (RaggedCache, "place", ("self._starts.copy_", "self._starts.clone().copy_")),
        (RaggedCache, "clear", ("self.lengths = torch.zeros_like(self.lengths)", "self.lengths = self.lengths // 2")),
    ],
    ids=["old_tokens", "old_logits", "old_places", "old_text"],
)
def test_a_replay_of_what_is_past_is_noticed(lm, monkeypatch, kind, method, change):
    expected = expected_text("llama", "none", GREEDY)
    monkeypatch.setattr(kind, method, mutated(getattr(kind, method), change))
    assert any(text_of(lm) != expected for _ in range(2))


def forwards(lm, taps=()):
    """Outputs of two forwards on one cache, and a copy of the first made in time."""
    cache = lm.new_cache(2, 64)
    first, second = torch.randint(3, lm.vocab_size, (2, 2, 4), generator=torch.Generator().manual_seed(0))
    one = lm.forward(first, cache, taps=taps)
    in_time = replace(one, logits=one.logits.clone(), taps=one.taps.clone() if taps else None)
    return one, in_time, lm.forward(second, cache, taps=taps)


def test_taps_outlive_the_next_forward_and_logits_do_not(lm):
    one, in_time, two = forwards(lm, taps=(0, 2))
    assert not torch.allclose(in_time.taps, two.taps)
    assert torch.equal(one.taps, in_time.taps)
    assert torch.equal(one.logits, two.logits)
    assert not torch.equal(in_time.logits, two.logits)


def test_taps_that_are_no_copies_are_noticed(lm, monkeypatch):
    monkeypatch.setattr(CausalLM, "_replay", mutated(CausalLM._replay, ("stream.clone()", "stream")))
    one, in_time, _ = forwards(lm, taps=(0, 2))
    assert not torch.equal(one.taps, in_time.taps)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_outputs_are_those_of_an_unrecorded_model(family):
    for taps in ((), (1,), (3, 0)):
        for ours, theirs in zip(forwards(recorded(family), taps), forwards(tiny(family), taps), strict=True):
            assert ours.taps is None if not taps else torch.allclose(ours.taps, theirs.taps, atol=1e-4)
        assert torch.allclose(ours.logits, theirs.logits, atol=1e-4)


def test_forwards_with_other_taps_or_logits_are_recordings_of_their_own(lm):
    cache, tokens = lm.new_cache(1, 64), torch.tensor([[5]])
    shapes = []
    for how in ({}, {"taps": (1,)}, {"taps": (1, 2)}, {"last_only": True}, {"taps": (1,), "last_only": True}):
        output = lm.forward(tokens, cache, **how)
        shapes.append(0 if output.taps is None else output.taps.shape[2])
    assert shapes == [0, 1, 2, 0, 1]
    assert len(cache.recordings) == 5


def test_a_row_alone_is_not_recorded(lm):
    cache = lm.new_cache(2, 64)
    lm.forward(torch.tensor([[5, 6]]), cache, row=1)
    lm.prefill(torch.tensor([5, 6, 7]), cache, 0)
    assert len(cache.recordings) == 0


@pytest.mark.parametrize(("slots", "size"), [(1, 320), (257, 320), (258, 576), (513, 576), (514, 1088), (5000, 8256)])
def test_sizes_are_powers_of_two_from_256_on_and_room_for_drafts(lm, slots, size):
    cache = lm.new_cache(2, slots)
    assert cache.slots == size
    cache.place(1)
    assert len(cache.ids) == size


def test_an_unrecorded_model_has_the_room_it_asked_for(llama):
    assert llama.new_cache(2, 70).slots == 70
    assert len(llama.new_cache(2, 70).recordings) == 0


def test_without_a_gpu_nothing_is_recorded_unless_asked_for(llama):
    text_of(llama)
    assert not llama._record
    assert not llama._spare


def used_cache(lm, batch, slots):
    cache = lm.new_cache(batch, slots)
    lm.forward(torch.full((batch, 1), 5), cache)
    cache.advance(torch.ones(batch, dtype=torch.long))
    return cache


def test_a_cache_serves_the_next_texts_of_its_size(lm):
    cache = used_cache(lm, 3, 100)
    lm.recycle(cache)
    others = [lm.new_cache(batch, slots) for batch, slots in ((2, 100), (3, 258))]
    again, beside = lm.new_cache(3, 200), lm.new_cache(3, 200)
    assert again is cache
    assert again.lengths.tolist() == [0, 0, 0]
    assert all(other is not cache for other in (*others, beside))


def test_only_the_last_caches_are_kept(lm):
    caches = [used_cache(lm, batch, 100) for batch in (1, 2, 3)]
    for used in caches:
        lm.recycle(used)
    assert lm._spare == [caches[2], caches[1]]


def test_a_cache_without_recordings_is_not_kept(lm, llama):
    lm.recycle(lm.new_cache(2, 64))
    assert not lm._spare
    llama.recycle(used_cache(llama, 2, 64))
    assert not llama._spare


@torch.inference_mode()
def spoil(*caches):
    """Fill what earlier texts left with junk."""
    for used in caches:
        for kept in used._kept.values():
            kept.copy_(9 * torch.randn(kept.shape, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_an_earlier_text_left_does_not_change_the_next(lm, name):
    drafter, k = drafter_of(name, lm, recorded(seed=1))
    expected = expected_text("llama", name, GREEDY)
    requests = requests_for(lm)

    def caches():
        return [*lm._spare, *([drafter._cache] if isinstance(drafter, SmallLM) else [])]

    run(lm, drafter, requests[::-1], k=k, stop=StopRule(30))
    used = caches()
    for _ in range(2):
        spoil(*used)
        assert run(lm, drafter, requests, k=k, stop=StopRule(NEW))[0] == expected
        assert {*map(id, caches())} == {*map(id, used)}
    assert run(lm, drafter, requests[:2], k=k, stop=StopRule(NEW))[0] == expected[:2]


def refuse():
    raise RunError("does not fit")


def test_a_cache_is_given_back_once_where_a_batch_was_refused(lm, monkeypatch):
    drafter, requests = SmallLM(lm), requests_for(lm)
    expected = expected_text("llama", "twin", GREEDY)
    assert run(lm, drafter, requests, k=3, stop=StopRule(NEW))[0] == expected
    with monkeypatch.context() as full:  # memory enough for the target's cache alone
        caches = [lm.new_cache(1, 64)]
        full.setattr(lm, "new_cache", lambda *_, **__: caches.pop() if caches else refuse())
        with pytest.raises(RunError, match="does not fit"):
            run(lm, drafter, requests[:1], k=3)
    assert run(lm, drafter, requests, k=3, stop=StopRule(NEW))[0] == expected


def test_junk_that_is_attended_to_is_noticed(lm, monkeypatch):
    text_of(lm)
    spoil(*lm._spare)
    if lm.engine.startswith("fused"):
        untrace(monkeypatch, lm)
    break_cache(monkeypatch, "visible", ("distance >= 0 if", "distance >= -1 if"))
    assert text_of(lm) != expected_text("llama", "none", GREEDY)


@pytest.mark.parametrize("taps", [(), (0, 3)])
def test_each_width_is_recorded_once_and_ahead_of_time(lm, monkeypatch, taps):
    made = []

    class Counted(graphs._Recorded):
        def __init__(self, run, inputs, pool):
            made.append(inputs[0].shape[1])
            super().__init__(run, inputs, pool)

    monkeypatch.setattr(graphs, "_Recorded", Counted)
    cache = lm.new_cache(2, 64)
    lm.prepare(cache, range(1, 5), taps)
    assert made == [1, 2, 3, 4]
    assert cache.lengths.tolist() == [0, 0]
    lm.prepare(cache, range(1, 5), taps)
    for steps in (4, 1, 3):
        lm.forward(torch.full((2, steps), 5), cache, taps=taps)
    lm.recycle(cache)
    assert lm.new_cache(2, 64) is cache
    lm.prepare(cache, range(1, 6), taps)
    assert made == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", DRAFTERS)
def test_decoding_records_nothing_once_it_has_begun(lm, monkeypatch, name):
    small = recorded(seed=1)
    drafter, k = drafter_of(name, lm, small)
    requests = requests_for(lm)
    drafter.bind(lm)
    steps = decoding.decode(lm, drafter, requests, k, GREEDY, 0, StopRule(24))
    next(steps)  # the prefill; what was recorded for it is no part of a round
    monkeypatch.setattr(graphs, "_Recorded", None)
    assert len(list(steps)) > 1


def test_an_unrecorded_model_prepares_nothing(llama):
    cache = llama.new_cache(2, 64)
    llama.prepare(cache, (1, 2))
    assert len(cache.recordings) == len(cache._kept) == 0


class Unrecordable:
    """``Recordings.replay`` that gives up from the ``after``-th call on."""

    def __init__(self, after):
        self.calls = 0
        self.after = after
        self.replay = Recordings.replay

    def __call__(self, key, run_, inputs):
        self.calls += 1
        if self.calls > self.after:
            raise RuntimeError("operation not permitted when stream is capturing")
        return self.replay(self.recordings, key, run_, inputs)

    def __get__(self, recordings, _):
        self.recordings = recordings
        return self


@pytest.mark.parametrize("after", [0, 3, 8])
@pytest.mark.parametrize("at_load", [True, False])
def test_a_model_that_cannot_be_recorded_says_so_once_and_runs(monkeypatch, caplog, at_load, after):
    fails = Unrecordable(after)
    lm = None if at_load else new_recorded()
    monkeypatch.setattr(Recordings, "replay", fails)
    lm = lm or new_recorded()
    for name in ("none", "ngram", "twin"):
        assert text_of(lm, name=name) == expected_text("llama", name, GREEDY)
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warnings == [
        "recorded-llama cannot be recorded as a CUDA graph and runs without: "
        "operation not permitted when stream is capturing"
    ]
    assert not lm._record
    assert fails.calls == after + 1


def steps_of(lm, k, split, drafter=None, new=12):
    requests = requests_for(lm, 2)
    drafter = drafter or (NGram() if k else NoDrafter())
    drafter.bind(lm)
    return list(decoding.decode(lm, drafter, requests, k, GREEDY, 0, StopRule(new), split=split))


@pytest.mark.parametrize("k", [0, 3])
def test_the_parts_of_a_round_sum_to_its_seconds(llama, k):
    first, *rounds = steps_of(llama, k, split=True)
    assert first.parts is None
    assert first.seconds > 0
    assert rounds
    for step in rounds:
        assert tuple(step.parts) == PARTS == ("draft", "verify", "accept", "bookkeeping")
        assert all(part >= 0 for part in step.parts.values())
        assert step.parts["verify"] > 0
        assert sum(step.parts.values()) == pytest.approx(step.seconds, rel=1e-6)


@pytest.mark.parametrize("k", [0, 3])
def test_a_round_is_split_only_where_asked_for_and_writes_the_same(llama, k):
    split, whole = steps_of(llama, k, split=True), steps_of(llama, k, split=False)
    assert all(step.parts is None for step in whole)
    assert all(step.seconds > 0 for step in whole)
    assert [(s.rows, s.drafted, s.committed, s.finish) for s in split] == [
        (s.rows, s.drafted, s.committed, s.finish) for s in whole
    ]


TAKEN = {"draft": 1, "verify": 10, "accept": 100, "bookkeeping": 1000}


def by_a_clock_of_ours(lm, monkeypatch, split, *changes):
    """Rounds in which drafting takes 1 second, the target's pass 10, judging 100, observing 1000."""
    clock = [0.0]

    def takes(seconds, function):
        def wrapped(*args, **kwargs):
            clock[0] += seconds
            return function(*args, **kwargs)

        return wrapped

    drafter = NGram()
    monkeypatch.setattr(decoding, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(drafter, "propose", takes(1, drafter.propose))
    monkeypatch.setattr(lm, "forward", takes(10, lm.forward))
    monkeypatch.setattr(decoding, "verify", takes(100, decoding.verify))
    monkeypatch.setattr(drafter, "observe", takes(1000, drafter.observe))
    monkeypatch.setattr(decoding, "decode", torch.inference_mode()(mutated(decoding.decode, *changes)))
    return steps_of(lm, 3, split, drafter)[1:]


@pytest.mark.parametrize("record", [False, True])
def test_each_part_is_the_time_of_what_it_names(record, monkeypatch):
    lm = recorded() if record else tiny("llama")
    rounds = by_a_clock_of_ours(lm, monkeypatch, split=True)
    assert all(s.parts == TAKEN for s in rounds)
    assert all(s.seconds == 1111 for s in rounds)


def test_a_round_takes_as_long_unsplit(llama, monkeypatch):
    assert {s.seconds for s in by_a_clock_of_ours(llama, monkeypatch, split=False)} == {1111}


@pytest.mark.parametrize(
    "change",
    [
        ('laps.mark("draft")', "pass"),
        ('laps.mark("accept")', 'laps.mark("verify")'),
        ('laps.mark("bookkeeping")', "pass"),
        ("round_ += 1\n        laps = _Laps(target.device, split)", "round_ += 1"),
    ],
    ids=["draft_in_verify", "accept_in_verify", "bookkeeping_lost", "clock_kept"],
)
def test_parts_taken_wrongly_are_noticed(llama, monkeypatch, change):
    rounds = by_a_clock_of_ours(llama, monkeypatch, True, change)
    assert any(s.parts != TAKEN for s in rounds)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_reads_its_slots_from_tensors_alone(family):
    """A recording replays no Python: what is made once, outside of it, would stay as it was."""
    lm = recorded(family)
    cache, tokens = lm.new_cache(2, 64), torch.randint(3, lm.vocab_size, (2, 3))
    cache.place(3)
    lm._decoder(tokens, cache)
    cache.advance(torch.tensor(7))
    cache._starts.copy_(cache.lengths)  # all that a replay sees of ``place``
    with torch.inference_mode():
        lm._decoder(tokens, cache)
    written = cache._kept[0].abs().sum(dim=-1) > 0
    assert written.nonzero()[:, 1].tolist() == [0, 1, 2, 7, 8, 9] * 2


@pytest.mark.parametrize("k", [0, 4, 16])
def test_every_draft_length_attends_to_as_much(k):
    lm = recorded("llama")
    assert lm.new_cache(1, 1021 + k + 1, steps=k + 1).slots == 1024 + 64
