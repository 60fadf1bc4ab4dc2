"""Each flag is raised where it is due, and not otherwise."""

import inspect
import math
import re

import pandas as pd
import pytest
import torch
from conftest import tiny

from specbench import guards, law
from specbench.guards import of_engine, of_prompts, of_results, repetition

CALM = {
    "metrics": {
        "clock_spread": 1.2,
        "repeat_spread": None,
        "units": 16,
        "rounds": 900,
        "lossless": {"verdict": "equal"},
    },
    "model": {"explanation": None},
    "prompts": {"changed_by_repeats": []},
}
SENSIBLE = list(range(60))
CIRCLES = [1, 2, 3, 4, 5, 6] * 10


def raised(*replies, **changes) -> dict[str, str]:
    found = {name: dict(part) for name, part in CALM.items()}
    for path, value in changes.items():
        part, name = path.split("__")
        found[part][name] = value
    prompts = pd.DataFrame({"baseline_tokens": list(replies) or [SENSIBLE] * 4})
    return {flag.flag: flag.message for flag in of_results(found, prompts)}


def test_a_calm_run_raises_none():
    assert raised() == {}


@pytest.mark.parametrize(
    ("change", "flag", "said"),
    [
        ({"metrics__clock_spread": 1.5}, "unsteady-clock", "vary 1.5-fold"),
        ({"metrics__repeat_spread": 1.31}, "uneven-repeats", "up to 1.31 times"),
        ({"metrics__units": 7}, "few-prompts", "7 conversations"),
        ({"metrics__rounds": 199}, "few-rounds", "199 verify passes"),
        ({"metrics__lossless": {"verdict": "mismatch"}}, "changed-text", "not that of a lossless method"),
        ({"metrics__lossless": {"verdict": "untested"}}, "untested-law", "too few tokens"),
        ({"model__explanation": "measured +20%"}, "unpredicted", "measured +20%"),
        ({"prompts__changed_by_repeats": ["a", "b"]}, "changing-text", "repeats of 2 prompts"),
    ],
)
def test_each_doubt_has_its_flag(change, flag, said):
    (found,) = raised(**change).items()
    assert found[0] == flag
    assert said in found[1]


@pytest.mark.parametrize(
    "change",
    [
        {"metrics__clock_spread": 1.49},
        {"metrics__clock_spread": None},
        {"metrics__repeat_spread": 1.19},
        {"metrics__units": 8},
        {"metrics__rounds": 200},
        {"metrics__lossless": {"verdict": "law"}},
        {"metrics__lossless": {"verdict": "near-tie"}},
    ],
)
def test_what_is_within_bounds_has_none(change):
    assert raised(**change) == {}


def test_what_was_not_profiled_is_not_unpredicted():
    found = {**CALM, "model": None}
    assert list(of_results(found, pd.DataFrame({"baseline_tokens": [SENSIBLE]}))) == []


def test_repetition_is_the_share_of_ngrams_said_before():
    assert repetition([]) == repetition([1, 2, 3]) == repetition(SENSIBLE) == 0
    assert repetition([7] * 13) == 0.9  # ten of one kind
    assert repetition(CIRCLES) == pytest.approx(51 / 57)


def test_text_that_runs_in_circles_is_flagged_where_it_is_much_of_all():
    assert "repetitive-text" not in raised(CIRCLES, SENSIBLE, SENSIBLE, SENSIBLE)
    assert raised(CIRCLES, CIRCLES, SENSIBLE)["repetitive-text"].startswith("2 of 3 replies")
    assert "repetitive-text" not in raised(CIRCLES[:31], CIRCLES[:31])  # too short to say


def flags_of(*arguments) -> list[str]:
    return [flag.flag for flag in of_prompts(*arguments)]


def test_prompts_of_random_tokens_and_those_of_the_training_are_flagged():
    limit = guards.NONSENSE * math.log(50_000)
    assert flags_of(limit + 0.1, 50_000, []) == ["synthetic-prompts"]
    assert flags_of(limit - 0.1, 50_000, []) == flags_of(None, 50_000, []) == []
    (flag,) = of_prompts(2.0, 50_000, ["a", "b", "c", "d"])
    assert flag.flag == "seen-in-training"
    assert "4 prompts share" in flag.message
    assert "(a, b, c, …)" in flag.message


def test_a_slow_engine_is_an_unfair_baseline():
    (flag,) = of_engine("plain", "cpu")
    assert flag.flag == "slow-baseline"
    assert list(of_engine("auto", "cpu")) == list(of_engine(None, "cpu")) == []


def test_surprise_is_the_mean_cross_entropy_of_the_texts():
    target = tiny("llama")
    texts = [target.tokenizer("one two one").input_ids, target.tokenizer("x y").input_ids, [5]]
    expected = []
    for text in texts[:2]:
        with torch.inference_mode():
            logits = target.model(input_ids=torch.tensor([text]), use_cache=False).logits[0].log_softmax(-1)
        expected += [-logits[i, token].item() for i, token in enumerate(text[1:])]
    assert law.surprise(target, texts) == pytest.approx(sum(expected) / len(expected), rel=1e-4)
    assert law.surprise(target, [[5]]) is None


def test_a_long_text_surprises_as_much_as_its_beginning():
    target = tiny("llama")
    text = target.tokenizer("one two three four " * 40).input_ids
    assert len(text) > 2 * law.AT_ONCE
    assert law.surprise(target, [text]) == pytest.approx(law.surprise(target, [text[: 1 + law.AT_ONCE]]))


def test_flags_that_a_record_is_asked_for_again_are_those_of_its_results():
    raised = re.findall(r'Flag\(\s*"([\w-]+)"', inspect.getsource(of_results))
    assert set(raised) == set(guards.MEASURED)


MACHINE = {"cpu": "Fast 9000", "threads": 2}


def benchmark(**seconds):
    times = {name.replace("_", " "): each for name, each in seconds.items()}
    return {"provenance": {"machine": MACHINE}, "compared": {"plain decoding": {"seconds": times}}}


@pytest.mark.parametrize(
    ("peer", "raised"),
    [([2.0, 2.0, 3.0], False), ([1.9, 1.9, 2.9], False), ([1.8, 1.0, 2.7], True), ([0.1, 2.0, 3.0], False)],
)
def test_a_baseline_that_another_engine_beats_is_flagged(peer, raised):
    """By the median over alternations, and by no more than a twentieth."""
    found = benchmark(specbench_bfloat16=[2.0, 2.0, 3.0], other_bfloat16=peer)
    flags = list(guards.of_peers(found, "bfloat16", MACHINE))
    assert [flag.flag for flag in flags] == ["slow-baseline"] * raised
    if raised:
        assert "has 0.90 times the speed of other bfloat16" in flags[0].message


def test_of_several_engines_the_fastest_counts():
    found = benchmark(specbench_bfloat16=[2.0], slow_bfloat16=[4.0], fast_bfloat16=[1.0], quick_bfloat16=[1.5])
    (flag,) = guards.of_peers(found, "bfloat16", MACHINE)
    assert "0.50 times the speed of fast bfloat16" in flag.message


def test_engines_of_other_weights_and_other_machines_say_nothing():
    found = benchmark(specbench_bfloat16=[2.0], other_float32=[1.0], other_4_bit=[1.0])
    assert not list(guards.of_peers(found, "bfloat16", MACHINE))
    found = benchmark(specbench_bfloat16=[2.0], other_bfloat16=[1.0])
    assert not list(guards.of_peers(found, "bfloat16", {**MACHINE, "cpu": "Slow 1"}))
    assert not list(guards.of_peers(found, "bfloat16", {**MACHINE, "threads": 32}))
    assert not list(guards.of_peers(found, "int8", MACHINE))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({}, {}, None),
        ({"cpu_mhz": 3000.0}, {"cpu_mhz": 2800.0}, None),
        ({"cpu_mhz": 3000.0}, {"cpu_mhz": 2000.0}, "the processor's clock fell from 3000 to 2000 MHz"),
        ({"cpu_throttled": 7}, {"cpu_throttled": 7}, None),
        ({"cpu_throttled": 7}, {"cpu_throttled": 8}, "the processor was too hot"),
        ({}, {"gpu_clocks_event_reasons.active": "0x0000000000000001"}, None),  # idle
        ({}, {"gpu_clocks_event_reasons.active": "0x0000000000000040"}, "held back (reasons 0x0000000000000040)"),
        ({}, {"gpu_clocks_event_reasons.active": "[N/A]"}, None),
    ],
)
def test_a_machine_that_slowed_down_is_flagged(before, after, said):
    flags = list(guards.of_clocks(before, after))
    assert [flag.flag for flag in flags] == ["throttled"] * (said is not None)
    assert all(said in flag.message for flag in flags)
