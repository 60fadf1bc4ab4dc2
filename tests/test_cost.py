import importlib.util
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import mutated
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from specbench import cli, cost, memory
from specbench.cost import Shape
from specbench.model import CausalLM
from specbench.targets import byte_tokenizer, load_tiny

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def lm():
    return load_tiny()


@pytest.fixture(scope="module")
def tied():
    config = LlamaConfig(
        vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    return CausalLM(LlamaForCausalLM(config), byte_tokenizer(), name="tied")


# the arithmetic of drafting


@pytest.mark.parametrize(
    ("alpha", "k", "tokens"),
    [(0, 4, 1), (1, 4, 5), (0.5, 0, 1), (0.5, 1, 1.5), (0.5, 3, 1.875), (0.8, 2, 2.44)],
)
def test_expected_tokens_by_hand(alpha, k, tokens):
    assert cost.expected_tokens(alpha, k) == pytest.approx(tokens)


def test_expected_tokens_are_those_that_chance_gives():
    chance, k, alpha, rounds = random.Random(0), 4, 0.7, 20_000
    total = 0
    for _ in range(rounds):
        right = [chance.random() < alpha for _ in range(k)]
        total += 1 + (right.index(False) if False in right else k)
    assert cost.expected_tokens(alpha, k) == pytest.approx(total / rounds, abs=0.05)


def test_break_even_of_the_textbook():
    # plain 20 ms; 4 drafts at 2 ms and a verify pass of 25 ms: a round is 33 ms, 1.65 plain steps
    alpha = cost.break_even(25 / 20, 2 / 20, 4)
    assert cost.expected_tokens(alpha, 4) == pytest.approx(1.65)
    assert cost.expected_tokens(alpha + 0.01, 4) > 1.65 > cost.expected_tokens(alpha - 0.01, 4)


def test_break_even_of_one_draft_is_what_the_round_costs_beyond_a_step():
    assert cost.break_even(1.1, 0.2, 1) == pytest.approx(0.3)  # 1 + alpha = 1.3


@pytest.mark.parametrize(
    ("pass_cost", "draft_cost", "k", "alpha"),
    [(5, 0, 4, None), (1, 1, 4, None), (9, 0, 1, None), (1, 0, 4, 0.0), (0.9, 0.02, 4, 0.0)],
    ids=["pass of k+1", "drafts as dear as steps", "far too dear", "all for nothing", "less than a step"],
)
def test_break_even_where_nothing_or_everything_wins(pass_cost, draft_cost, k, alpha):
    assert cost.break_even(pass_cost, draft_cost, k) == alpha


def test_break_even_that_forgets_the_drafts_would_be_found():
    broken = mutated(cost.break_even, ("k * draft_cost", "draft_cost"))
    assert cost.expected_tokens(broken(1.25, 0.1, 4), 4) != pytest.approx(1.65)


# what a pass must do


def test_bytes_of_an_untied_model_are_its_weights_without_the_table_and_its_cache(lm):
    # 48 wide: q and o 48x48, k and v 48x24, three of 48x64, two norms; three blocks, a norm, a head of 259
    block = 2 * 48 * 48 + 2 * 48 * 24 + 3 * 48 * 64 + 2 * 48
    weights = 3 * block + 48 + 259 * 48
    slot = 3 * 2 * 2 * 12  # blocks, keys and values, heads, width
    rotary = 2 * 6  # frequencies, in buffers
    assert cost.bytes_read(lm, Shape(2, 5, 100)) == 4 * (weights + rotary + 2 * 128 * slot)
    assert cost.operations(lm, Shape(2, 5, 100)) == 2 * weights * 2 * 5


def test_bytes_of_a_tied_model_count_the_table_once_as_the_head(tied):
    weights = (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32 + 259 * 32
    assert cost.bytes_read(tied, Shape(1, 1, 10)) == 4 * (weights + 2 * 8 + 64 * 2 * 16)
    assert cost.operations(tied, Shape(1, 3, 10)) == 2 * weights * 3


@pytest.mark.parametrize(("cached", "tokens", "slots"), [(0, 1, 64), (63, 1, 64), (63, 2, 128), (64, 1, 128)])
def test_cache_is_read_by_buckets_of_64(lm, cached, tokens, slots):
    assert cost.bytes_read(lm, Shape(3, tokens, cached)) - lm.pass_bytes == 3 * slots * lm.bytes_per_slot


# passes timed


@pytest.fixture
def timed(monkeypatch):
    """A target whose passes take 1, 2, 3, … seconds of a clock of its own; which passes ran, in order."""
    lm = load_tiny(layers=1)
    forward, ran, now = lm.forward, [], [0]

    def passes(tokens, cache):
        before = cache.lengths.clone()
        forward(tokens, cache)
        assert torch.equal(cache.lengths, before)
        ran.append((*tokens.shape, *set(cache.lengths.tolist())))
        now[0] += len(ran)

    monkeypatch.setattr(lm, "forward", passes)
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return lm, ran


def test_shapes_take_turns_and_rehearsals_do_not_count(timed):
    lm, ran = timed
    shapes, turns = [Shape(1, 1, 5), Shape(2, 3, 7)], []
    seconds = cost.time_passes(lm, shapes, 2, progress=lambda: turns.append(len(ran)))
    assert ran == [(1, 1, 5)] * 2 + [(2, 3, 7)] * 2 + [(1, 1, 5), (2, 3, 7)] * 2
    assert seconds == {shapes[0]: [5, 7], shapes[1]: [6, 8]}
    assert turns == [6, 8]


def test_passes_without_rehearsals_would_be_found(timed, monkeypatch):
    monkeypatch.setattr(cost, "REHEARSALS", 0)
    assert cost.time_passes(timed[0], [Shape(1, 1, 5)], 1) == {Shape(1, 1, 5): [1]}


def test_real_passes_take_time(lm):
    seconds = cost.time_passes(lm, [Shape(1, 2, 8)], 3)[Shape(1, 2, 8)]
    assert len(seconds) == 3
    assert all(0 < s < 5 for s in seconds)


def test_probes_find_the_speed_of_a_machine(monkeypatch):
    monkeypatch.setattr(cost, "PROBE_BYTES", 1 << 22)
    monkeypatch.setattr(cost, "PROBE_WIDTH", 256)
    assert 1e7 < cost.read_bandwidth(CPU) < 1e13
    assert 1e7 < cost.arithmetic_speed(CPU, torch.float32) < 1e14


def test_probes_divide_their_work_by_the_median_try(monkeypatch):
    monkeypatch.setattr(cost, "PROBE_BYTES", 4000)
    monkeypatch.setattr(cost, "PROBE_WIDTH", 10)
    for probe, work in ((lambda: cost.read_bandwidth(CPU), 4000), (lambda: cost.arithmetic_speed(CPU, None), 2000)):
        ticks = iter([0, 9, 10, 12, 20, 25, 30, 38, 40, 41])
        monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda ticks=ticks: next(ticks)))
        assert probe() == work / 5


# what is made of the times


def point(batch, tokens, seconds, cached=16):
    return {"batch": batch, "tokens": tokens, "cached": cached, "seconds": seconds}


POINTS = [point(1, 1, 20), point(1, 5, 25), point(8, 1, 40), point(8, 5, 240), point(1, 1, 99, cached=64)]


def test_curves_hold_the_points_of_one_length():
    assert cost.curves(POINTS, 16) == {1: {1: 20, 5: 25}, 8: {1: 40, 5: 240}}
    assert cost.curves(POINTS, 64) == {1: {1: 99}}
    assert cost.curves(POINTS, 17) == {}


def test_break_evens_compare_each_batch_with_its_own_plain_step():
    found = cost.break_evens(POINTS, 16, [0, 0.1])
    assert [(e["batch"], e["draft_cost"], e["k"]) for e in found] == [(1, 0, 4), (1, 0.1, 4), (8, 0, 4), (8, 0.1, 4)]
    acceptances = [e["acceptance"] for e in found]
    assert acceptances == [cost.break_even(1.25, 0, 4), cost.break_even(1.25, 0.1, 4), None, None]


def test_summary_is_the_median_and_the_quartiles():
    assert cost.summary([9, 1, 8, 2, 7, 3, 6, 4, 5]) == {"seconds": 5, "quartiles": [3, 7], "repeats": 9}
    assert cost.summary([2]) == {"seconds": 2, "quartiles": [2, 2], "repeats": 1}


# scripts/verify_cost.py


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Call the script with options; returns the exit code and the folder."""
    spec = importlib.util.spec_from_file_location("verify_cost", ROOT / "scripts" / "verify_cost.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(cli, "out", Console(width=120))
    monkeypatch.setattr(cli, "err", Console(width=120, stderr=True))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(cost, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(cost, "PROBE_WIDTH", 64)
    small = ["target=tiny", "dtype=float32", "device=cpu", "tokens=[1,2,3]", "batch_sizes=[1,2]", "lengths=[32]"]
    small += ["cached=16", "repeats=2", f"out={tmp_path / 'out'}"]

    def call(*options):
        monkeypatch.setattr(sys, "argv", ["verify_cost.py"])
        return cli.run_command("verify_cost", module.work, arguments=[*small, *options])

    call.folder = tmp_path / "out"
    call.read = lambda: json.loads((call.folder / "verify_cost.json").read_text())
    return call


def test_script_writes_what_it_found_and_prints_its_tables(script, capsys):
    assert script() == 0
    found = script.read()
    assert set(found) == {
        "schema_version", "target", "cached", "points", "left_out", "bandwidth_bytes_per_s", "arithmetic_per_s",
        "break_even", "machine_load", "provenance",
    }  # fmt: skip
    assert set(found["target"]) == {"name", "dtype", "quant", "device", "engine", "parameters", "files"}
    asked = [(b, s, 16) for b in (1, 2) for s in (1, 2, 3)] + [(1, 1, 32), (1, 3, 32)]
    assert [(p["batch"], p["tokens"], p["cached"]) for p in found["points"]] == asked
    fields = {"batch", "tokens", "cached", "seconds", "quartiles", "repeats", "bytes", "operations"}
    assert all(set(p) == fields and p["repeats"] == 2 and p["seconds"] > 0 for p in found["points"])
    assert len(found["break_even"]) == 2 * 3 * 2  # batch sizes, draft costs, k
    assert found["left_out"] == {}
    for form in ("png", "pdf"):
        assert (script.folder / f"verify_cost.{form}").stat().st_size > 1000
    said = " ".join(capsys.readouterr().out.split())  # lines may be broken anywhere
    assert [p for p in ("over a plain step", "breaks even", "k=1", "k=2", "draft cost", " ms") if p not in said] == []
    assert said.split()[-1].endswith("out")


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("tokens=[2,3]", "tokens=[2, 3] must hold 1"),
        ("tokens=[3,1]", "tokens=[3, 1] is no rising list"),
        ("tokens=[0,1]", "tokens=[0, 1] is no rising list"),
        ("tokens=[1,2.5]", "tokens=[1, 2.5] is no rising list"),
        ("repeats=0", "repeats=0 is no whole number from 1 on"),
        ("batch_sizes=[]", "batch_sizes=[] is no rising list"),
        ("lengths=[]", "lengths=[] is no rising list"),
        ("cached=510", "cached=510 and 3 tokens do not fit the context of 512"),
        ("target.family=lama", "target.family=lama is unknown"),
    ],
)
def test_script_refuses_by_name(script, capsys, bad, said):
    assert script(bad) == 2
    assert said in capsys.readouterr().err
    assert not script.folder.exists()


def test_batch_without_memory_is_left_out_and_the_others_stand(script, monkeypatch, capsys):
    monkeypatch.setattr(memory, "available", lambda device: 60_000)  # a row takes some 40 000
    assert script() == 0
    found = script.read()
    assert {p["batch"] for p in found["points"]} == {1}
    assert list(found["left_out"]) == ["batch 2"]
    assert "the largest batch that fits is 1" in found["left_out"]["batch 2"]
    assert "batch 2 left out: batch_size=2 with texts of up to" in capsys.readouterr().out


def test_script_without_memory_for_anything_fails_with_the_reason(script, monkeypatch, capsys):
    monkeypatch.setattr(memory, "available", lambda device: 10_000)
    assert script() == 1
    assert "nothing could be measured: batch_size=" in capsys.readouterr().err


def test_lengths_that_are_all_past_the_context_are_left_out(script):
    assert script("lengths=[8000]") == 0
    assert {p["cached"] for p in script.read()["points"]} == {16}


@pytest.mark.parametrize("option", ["tokens=[1]", "draft_costs=[]", "cached=-1", "repeats=many"])
def test_script_either_runs_or_refuses_and_never_breaks(script, capsys, option):
    code = script(option)
    assert code == 0 or (code == 2 and option.split("=")[0] in capsys.readouterr().err)
