"""Metrics against values worked out by hand."""

import numpy as np
import pandas as pd
import pytest
from conftest import prompts, run

from drafters.none import NoDrafter
from drafters.scripted import Scripted
from specbench import metrics
from specbench.drafting import Request
from specbench.stopping import StopRule


def log(*rounds, batch=0, uid="p", seconds=1.0):
    """Steps of one prompt: a prefill, then rounds of (proposed, accepted, committed)."""
    rows = [(0, 0, 1), *rounds]
    return pd.DataFrame(
        [
            {
                "unit": batch,
                "batch": batch,
                "repeat": 0,
                "round": i,
                "uid": uid,
                "proposed": proposed,
                "accepted": accepted,
                "committed": committed,
                "seconds": 10.0 if i == 0 else seconds,
            }
            for i, (proposed, accepted, committed) in enumerate(rows)
        ]
    )


def plain(tokens, **kwargs):
    return log(*[(0, 0, 1)] * tokens, **kwargs)


def test_a_worked_example():
    ours = log((4, 4, 5), (4, 0, 1), (4, 2, 3), seconds=2.0)
    found = metrics.compute(ours, plain(9, seconds=1.0), k=4)
    assert found["acceptance_rate"] == 6 / 12
    assert found["tokens_per_pass"] == 9 / 3
    assert found["acceptance_by_position"]["joint"] == [2 / 3, 2 / 3, 1 / 3, 1 / 3]
    assert found["acceptance_by_position"]["conditional"] == [2 / 3, 1.0, 1 / 2, 1.0]
    assert found["accepted_length_histogram"] == [1, 0, 1, 0, 1]
    assert found["decode_tokens_per_s"] == 9 / 6
    assert found["baseline_decode_tokens_per_s"] == 1.0
    assert found["speedup"] == 1.5
    assert found["end_to_end_speedup"] == (10 / 16) / (10 / 19)
    assert found["ttft_s"] == 10.0
    assert found["rounds"] == 3
    assert (found["round_seconds"], found["baseline_round_seconds"]) == (2.0, 1.0)


def test_all_rejected():
    found = metrics.compute(log((2, 0, 1), (2, 0, 1)), plain(2), k=2)
    assert (found["acceptance_rate"], found["tokens_per_pass"], found["speedup"]) == (0.0, 1.0, 1.0)
    assert found["acceptance_by_position"] == {"joint": [0.0, 0.0], "conditional": [0.0, None]}


def test_all_accepted():
    found = metrics.compute(log((2, 2, 3), (2, 2, 3)), plain(6), k=2)
    assert (found["acceptance_rate"], found["tokens_per_pass"], found["speedup"]) == (1.0, 3.0, 3.0)
    assert found["acceptance_by_position"] == {"joint": [1.0, 1.0], "conditional": [1.0, 1.0]}


def test_positions_count_only_rounds_that_reached_them():
    found = metrics.compute(log((1, 1, 2), (3, 1, 2), (0, 0, 1)), plain(5), k=3)
    assert found["acceptance_by_position"]["joint"] == [1.0, 0.0, 0.0]
    assert found["acceptance_by_position"]["conditional"] == [1.0, 0.0, None]
    assert found["accepted_length_histogram"] == [1, 2, 0, 0]


def test_plain_decoding_makes_one_token_a_pass():
    found = metrics.compute(plain(7), plain(7), k=0)
    assert (found["tokens_per_pass"], found["acceptance_rate"], found["speedup"]) == (1.0, None, 1.0)
    assert found["acceptance_by_position"] == {"joint": [], "conditional": []}


def test_rows_of_a_batch_share_the_seconds_of_their_round():
    ours = pd.concat([log((2, 2, 3), (2, 0, 1), uid="a"), log((2, 1, 2), uid="b")])  # b has ended after round 1
    found = metrics.compute(ours, pd.concat([plain(4, uid="a"), plain(2, uid="b")]), k=2)
    assert found["decode_tokens_per_s"] == 6 / 2
    assert found["tokens_per_pass"] == 6 / 3
    assert found["baseline_decode_tokens_per_s"] == 6 / 4
    assert found["speedup"] == 2.0


def test_pooled_not_averaged():
    ours = pd.concat([log((1, 1, 2), batch=0, uid="a"), log(*[(1, 0, 1)] * 8, batch=1, uid="b")])
    theirs = pd.concat([plain(2, batch=0, uid="a"), plain(8, batch=1, uid="b")])
    found = metrics.compute(ours, theirs, k=1)
    assert found["acceptance_rate"] == 1 / 9
    assert found["tokens_per_pass"] == 10 / 9
    assert found["speedup"] == (10 / 9) / (10 / 10)


def test_a_reply_that_ends_with_prefill_has_no_pass_to_count():
    found = metrics.compute(log(), log(), k=3)
    for name in ("acceptance_rate", "tokens_per_pass", "decode_tokens_per_s", "speedup"):
        assert found[name] is None
    assert found["end_to_end_speedup"] == 1.0


def many(count, speedups, tokens=20):
    ours = [log(*[(0, 0, 1)] * tokens, batch=i, uid=f"p{i}", seconds=1 / s) for i, s in enumerate(speedups[:count])]
    theirs = [plain(tokens, batch=i, uid=f"p{i}") for i in range(count)]
    return pd.concat(ours), pd.concat(theirs)


def test_interval_of_a_constant_ratio_has_no_width():
    found = metrics.compute(*many(8, [1.5] * 8), k=0)
    assert found["speedup_ci95"] == pytest.approx([1.5, 1.5])


def test_interval_agrees_with_the_normal_approximation():
    rng = np.random.default_rng(0)
    seconds = rng.uniform(0.8, 1.2, 200)
    found = metrics.compute(*many(200, (1 / seconds).tolist()), k=0)
    error = seconds.std(ddof=1) / np.sqrt(200) / seconds.mean() ** 2  # delta method for 1 / mean(seconds)
    low, high = found["speedup_ci95"]
    assert low == pytest.approx(found["speedup"] - 1.96 * error, abs=0.3 * error)
    assert high == pytest.approx(found["speedup"] + 1.96 * error, abs=0.3 * error)


@pytest.mark.parametrize("units", [8, 16])
def test_interval_covers_what_it_says_at_few_prompts(units):
    """Of 300 samples of a normal variable. Bare percentiles would cover 89 % at 8 units and 92 % at 16."""
    rng = np.random.default_rng(1)
    samples = rng.normal(10.0, 1.0, (300, units))
    ends = [metrics.mean_interval(pd.Series(sample)) for sample in samples]
    covered = np.mean([low <= 10.0 <= high for low, high in ends])
    assert 0.92 <= covered <= 0.98
    bare = [np.percentile(rng.choice(sample, (2000, units)).mean(axis=1), [2.5, 97.5]) for sample in samples]
    assert np.mean([low <= 10.0 <= high for low, high in bare]) < covered - 0.01


def test_too_few_prompts_have_no_interval():
    few = metrics.MIN_UNITS - 1
    assert metrics.compute(*many(few, [1.0, 1.2] * few), k=0)["speedup_ci95"] is None


def test_clock_spread_is_that_of_plain_decodings_rounds():
    steady = plain(40, seconds=0.5)
    assert metrics.compute(steady, steady, k=0)["clock_spread"] == 1.0
    half = pd.concat([plain(40, batch=0, seconds=1.0), plain(40, batch=1, seconds=3.0)])
    assert metrics.compute(half, half, k=0)["clock_spread"] == 3.0
    assert metrics.compute(plain(19), plain(19), k=0)["clock_spread"] is None


def test_repeats_show_how_steady_the_machine_is_and_change_nothing_else():
    """Three repeats of two prompts: the same decoding took up to 1.5 and 2 times as long."""
    ours = [plain(4, batch=unit, seconds=1.0).assign(unit=unit) for unit in (0, 1)]
    times = {0: (1.0, 1.2, 1.5), 1: (2.0, 4.0, 3.0)}
    repeated = [
        plain(4, batch=2 * repeat + unit, seconds=seconds).assign(unit=unit, repeat=repeat)
        for unit, each in times.items()
        for repeat, seconds in enumerate(each)
    ]
    theirs = pd.concat(repeated)
    found = metrics.compute(theirs, theirs, k=0)
    assert found["repeat_spread"] == pytest.approx((1.5 + 2.0) / 2)
    assert found["units"] == 2
    assert found["tokens_per_pass"] == 1.0
    assert found["baseline_decode_tokens_per_s"] == pytest.approx(24 / (4 * (1.0 + 1.2 + 1.5 + 2.0 + 4.0 + 3.0)))
    assert metrics.compute(pd.concat(ours), pd.concat(ours), k=0)["repeat_spread"] is None


def test_turns_of_one_conversation_are_one_unit():
    """Eight conversations of two turns resample as eight, not sixteen: copies add no information."""
    ours, theirs = many(8, [0.5, 2.0] * 4)
    again = [frame.assign(batch=frame["batch"] + 8, uid=frame["uid"] + "/2") for frame in (ours, theirs)]
    twice = metrics.compute(pd.concat([ours, again[0]]), pd.concat([theirs, again[1]]), k=0)
    assert twice["units"] == 8
    assert twice["speedup_ci95"] == pytest.approx(metrics.compute(ours, theirs, k=0)["speedup_ci95"])


def test_arms_measured_on_different_batches_are_refused():
    with pytest.raises(ValueError, match="same batches"):
        metrics.compute(plain(3, batch=0), plain(3, batch=1), k=0)


def test_categories_are_computed_apart():
    ours, theirs = many(2, [2.0, 0.5])
    found = metrics.by_category(ours, theirs, {"p0": "code", "p1": "chat"}, k=0)
    assert found["code"]["speedup"] == pytest.approx(2.0)
    assert found["chat"]["speedup"] == pytest.approx(0.5)


def test_a_batch_of_mixed_categories_has_no_time_of_its_own():
    ours = pd.concat([log((2, 2, 3), uid="a"), log((2, 0, 1), uid="b")])
    theirs = pd.concat([plain(3, uid="a"), plain(1, uid="b")])
    found = metrics.by_category(ours, theirs, {"a": "code", "b": "chat"}, k=2)
    assert found["code"]["tokens_per_pass"] == 3.0
    of_time = ("speedup", "decode_tokens_per_s", "ttft_s", "round_seconds", "baseline_round_seconds")
    assert [found["code"][name] for name in of_time] == [None] * len(of_time)


def steps_of(lm, drafter, requests, stop, k):
    replies, steps = run(lm, drafter, requests, k=k, stop=stop)
    rows = [
        {
            "unit": 0,
            "batch": 0,
            "repeat": 0,
            "round": s.round,
            "uid": requests[row].uid,
            "proposed": s.proposed[i],
            "accepted": s.accepted[i],
            "committed": len(s.committed[i]),
            "seconds": s.seconds,
        }
        for s in steps
        for i, row in enumerate(s.rows)
    ]
    return replies, pd.DataFrame(rows)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_scripted_drafter_gives_the_metrics_its_script_says(llama, batch):
    requests = [Request(f"p{i}", p) for i, p in enumerate(prompts(llama, batch))]
    stop = StopRule(1 + 2 * (5 + 1 + 3) + 2)  # prefill, twice the script, and two tokens into the third
    replies, theirs = steps_of(llama, NoDrafter(), requests, stop, 0)
    known = [Request(r.uid, r.tokens, reply) for r, reply in zip(requests, replies, strict=True)]
    _, ours = steps_of(llama, Scripted([(4, 4), (4, 0), (4, 2)]), known, stop, 4)
    found = metrics.compute(ours, theirs, k=4)
    # each row: (4,4) (4,0) (4,2) twice, then a round cut by the limit after 2 of its 4 right drafts
    assert found["acceptance_rate"] == (2 * (4 + 0 + 2) + 2) / (2 * 12 + 2)
    assert found["tokens_per_pass"] == 20 / 7
    assert found["acceptance_by_position"]["joint"] == [5 / 7, 5 / 7, 2 / 6, 2 / 6]
    assert found["acceptance_by_position"]["conditional"] == [5 / 7, 1.0, 2 / 4, 1.0]
    assert found["accepted_length_histogram"] == [2 * batch, 0, 3 * batch, 0, 2 * batch]


def test_every_metric_has_its_definition():
    found = metrics.compute(plain(3), plain(3), k=0)
    assert {name.split(".")[0] for name in metrics.DEFINITIONS} >= found.keys()
