import importlib.util
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specbench.targets import byte_tokenizer, load_hf

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "bench_engine.py"


def load_script():
    spec = importlib.util.spec_from_file_location("bench_engine", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_engine"] = module
    spec.loader.exec_module(module)
    return module


bench = load_script()

# the tables


@pytest.mark.parametrize(
    ("value", "at_most", "verdict"),
    [
        (2.0, False, "reached"), (1.99, False, "short"), (3.0, False, "reached"),
        (2.0, True, "reached"), (2.01, True, "short"), (0.0, True, "reached"),
        (None, False, "not measured"), (None, True, "not measured"), (0.0, False, "short"),
    ],
)  # fmt: skip
def test_verdict_is_by_at_least_or_at_most(value, at_most, verdict):
    assert bench.Row("what", value, 2.0, at_most=at_most).verdict == verdict


OURS, THEIRS, VLLM = "specbench bfloat16", "transformers bfloat16", "vLLM CPU bfloat16"

# the medians of the seconds are 2 and 6, but that of the ratios 2, 4, 6 within an alternation is 4
COMPARED = {
    "plain": {
        "ours": OURS,
        "seconds": {OURS: [1.0, 2.0, 3.0], THEIRS: [6.0, 8.0, 6.0], VLLM: [1.0, 3.0, 6.0]},
    },
    "plain, float32": {
        "ours": "specbench float32",
        "seconds": {"specbench float32": [1.0], "transformers float32": [1.6]},
    },
    "n-gram": {"ours": OURS, "seconds": {OURS: [1.0, 1.0, 2.0], THEIRS: [1.0, 5.0, 6.0]}},
    "small": {"ours": OURS, "seconds": {OURS: [1.0], THEIRS: [2.5]}},
}


def rounds(tokens, seconds, inside):
    return [{"tokens": tokens, "seconds": s, "inside": i} for s, i in zip(seconds, inside, strict=True)]


FOUND = {
    "passes": [[1.0, 1.1], [2.0, 2.6], [1.0, 1.2]],
    "rounds": {
        "none batch 1": rounds(60, [1.0, 2.0, 3.0], [0.9, 1.92, 2.94]),  # outside 10 %, 4 %, 2 %
        f"none batch {bench.BATCH}": rounds(240, [1.0, 1.0, 4.0], [1.0, 0.9, 3.2]),  # 0 %, 10 %, 20 %
    },
    "traffic": [{"achieved": 6, "bandwidth": 10}, {"achieved": 8, "bandwidth": 10}, {"achieved": 7, "bandwidth": 5}],
    "load_seconds": 2.5,
    "memory_gained": 130,
    "memory_held": 100,
}


def by_name():
    return {row.what: row for row in bench.rows(COMPARED, FOUND)}


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("plain, bfloat16, over transformers", 4.0),
        ("plain, bfloat16, over vLLM CPU", 1.5),
        ("plain, float32, over transformers", 1.6),
        (f"n-gram k={bench.K}, over transformers prompt lookup", 3.0),
        (f"n-gram k={bench.K}, over vLLM CPU n-gram", None),
        (f"small model k={bench.K}, over transformers assisted", 2.5),
        (f"a pass of {bench.K + 1} tokens / of 1", 1.2),
        ("round outside of the models' passes, none batch 1", 4.0),
        (f"round outside of the models' passes, none batch {bench.BATCH}", 10.0),
        (f"plain, batch {bench.BATCH} over batch 1", 4.0),  # 60 to 240; 30 to 240; 20 to 60: 4, 8, 3
        ("memory traffic / read bandwidth, batch 1", 0.8),
        ("load of the default model from cache", 2.5),
        ("memory gained / weights and cache", 1.3),
    ],
)
def test_row_is_the_median_of_the_ratios_within_an_alternation(what, value):
    assert by_name()[what].value == (None if value is None else pytest.approx(value))


def test_every_row_has_its_verdict():
    verdicts = [row.verdict for row in by_name().values()]
    assert verdicts == [
        "reached", "reached", "short", "reached", "not measured", "reached", "short",
        "reached", "short", "reached", "reached", "reached", "reached",
    ]  # fmt: skip


def test_our_ratio_is_not_measured_where_we_are_left_out():
    seconds = {name: times for name, times in COMPARED["plain"]["seconds"].items() if name != OURS}
    (row, *_) = bench.rows({**COMPARED, "plain": {"ours": OURS, "seconds": seconds, "failed": {OURS: "died"}}}, FOUND)
    assert row.verdict == "not measured"


def test_markdown_holds_both_tables():
    text = bench.markdown(bench.rows(COMPARED, FOUND), COMPARED)
    lines = text.splitlines()
    assert "| plain, bfloat16, over transformers | 4.00x | ≥ 1.7x | reached |" in lines
    assert f"| n-gram k={bench.K}, over vLLM CPU n-gram | – | ≥ 1.3x | not measured |" in lines
    assert "| load of the default model from cache | 2.50 s | ≤ 3 s | reached |" in lines
    assert "| round outside of the models' passes, none batch 1 | 4.00% | ≤ 5% | reached |" in lines
    assert f"| plain | {OURS} | {bench.NEW_TOKENS / 2:.1f} | 1.00x |" in lines
    assert f"| plain | {THEIRS} | {bench.NEW_TOKENS / 6:.1f} | 4.00x |" in lines
    assert len({line.count("|") for line in lines if line}) == 1
    assert text.endswith("|\n")


def test_what_is_printed_is_what_is_written(capsys):
    bench.show(bench.rows(COMPARED, FOUND), COMPARED)
    said = capsys.readouterr().out
    assert [part for part in ("4.00x", "not measured", "1.00x", "tokens/s") if part not in said] == []


# engines, in processes of their own

ENGINE = """
    import os
    import sys

    from protocol import serve

    name, seconds, breaks, turns = sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4]
    calls = 0


    def generate(tokens, new, add=0):
        global calls
        calls += 1
        with open(turns, "a") as file:
            file.write(f"{name} {tokens[0]} {new}\\n")
        print("generating: this is no reply")
        if breaks == str(calls):
            raise MemoryError("the pantry is empty")
        return {"seconds": seconds + calls, "tokens": [tokens[0] + add], "counters": {"calls": calls}}


    def start():
        print("loading: this is no reply")
        os.system("echo a child says this")
        if breaks == "start":
            raise OSError("there is no oven")
        return {"generate": generate}, {name: "1.0"}


    serve(start)
    """

QUITS = """
    import sys

    print('{"versions": {}}', flush=True)
    sys.exit("the cat sat on the cable")
    """


@pytest.fixture
def peers(tmp_path, monkeypatch):
    shutil.copy(ROOT / "scripts" / "peers" / "protocol.py", tmp_path)
    (tmp_path / "engine.py").write_text(textwrap.dedent(ENGINE))
    (tmp_path / "quits.py").write_text(textwrap.dedent(QUITS))
    monkeypatch.setattr(bench, "PEERS", tmp_path)
    return tmp_path


@pytest.fixture
def engine(peers):
    def make(name, seconds=0.0, breaks="-", script="engine.py", python=sys.executable, **job):
        arguments = (name, str(seconds), breaks, str(peers / "turns"))
        return bench.Engine(name, python, script, arguments, {"job": "generate", **job})

    return make


@pytest.fixture
def turns(peers):
    return lambda: [line.split()[:2] for line in (peers / "turns").read_text().splitlines()]


PROMPTS = [[1], [2], [3], [4]]
WARM = bench.WARM_UPS


def compare(engines, logs):
    said = []
    return bench.compare(engines, PROMPTS, logs, said.append), said


def test_order_rotates_and_warm_ups_come_first(engine, turns, peers):
    compare([engine("a"), engine("b"), engine("c")], peers)
    done = turns()
    assert done[: 3 * WARM] == [[name, "4"] for name in "abc" for _ in range(WARM)]
    orders = ["".join(name for name, prompt in done[3 * WARM :] if prompt == str(i)) for i in (1, 2, 3, 4)]
    assert orders == ["abc", "bca", "cab", "abc"]


def test_seconds_are_those_reported_for_the_prompts_alone(engine, peers):
    result, said = compare([engine("a", 10), engine("b", 20)], peers)
    calls = [WARM + 1 + turn for turn in range(4)]
    assert result["seconds"] == {"a": [10 + c for c in calls], "b": [20 + c for c in calls]}
    assert result["versions"] == {"a": {"a": "1.0"}, "b": {"b": "1.0"}}
    assert result["counters"] == {"a": {"calls": WARM + 4}, "b": {"calls": WARM + 4}}
    assert result["failed"] == {}
    assert (said[0], said[-1]) == ("starting a", "a, alternation 4 of 4")


def test_engines_are_asked_for_the_new_tokens_of_the_table(engine, peers):
    compare([engine("a")], peers)
    assert {line.split()[2] for line in (peers / "turns").read_text().splitlines()} == {str(bench.NEW_TOKENS)}


def test_replies_like_the_first_engines_are_counted(engine, peers):
    result, _ = compare([engine("a"), engine("b", add=1), engine("c")], peers)
    assert result["same_text"] == {"a": 4, "b": 0, "c": 4}


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"breaks": "start"}, "b died: .*there is no oven"),
        ({"breaks": "2"}, "b died: .*the pantry is empty"),
        ({"script": "missing.py"}, "b died: .*missing.py"),
        ({"python": "/no/such/python"}, "/no/such/python"),
        ({"script": "quits.py"}, "b died|Broken pipe"),
    ],
    ids=["at start", "in a warm-up", "no script", "no python", "between jobs"],
)
def test_engine_that_dies_before_the_turns_is_left_out_with_its_last_words(engine, peers, capsys, broken, reason):
    result, _ = compare([engine("a"), engine("b", **broken), engine("c")], peers)
    assert list(result["seconds"]) == list(result["same_text"]) == ["a", "c"]
    assert list(result["failed"]) == ["b"]
    assert re.search(reason, result["failed"]["b"])
    assert "left out: " in capsys.readouterr().err


@pytest.mark.parametrize("call", [WARM + 1, WARM + 3])
def test_engine_that_dies_in_its_turn_is_left_out_and_the_others_go_on(engine, peers, call):
    result, _ = compare([engine("a"), engine("b", breaks=str(call)), engine("c")], peers)
    assert [len(result["seconds"][name]) for name in "ac"] == [4, 4]
    assert list(result["failed"]) == ["b"]
    assert "the pantry is empty" in result["failed"]["b"]
    assert list(result["same_text"]) == list(result["seconds"]) == ["a", "c"]


def test_nothing_that_starts_is_said_with_a_reason(engine, peers):
    result, _ = compare([engine("a", breaks="start")], peers)
    assert result["seconds"] == result["same_text"] == {}
    assert "there is no oven" in result["failed"]["a"]


def test_process_quotes_the_end_of_its_log(engine, peers):
    with pytest.raises(RuntimeError, match=r"a/b c died: .*OSError: there is no oven$"):
        bench.Process(engine("a/b c", breaks="start"), peers)
    assert (peers / "a_b_c.log").exists()


def test_what_an_engine_prints_goes_to_its_log_and_not_to_its_replies(engine, peers):
    process = bench.Process(engine("a"), peers)
    assert process.versions == {"a": "1.0"}
    assert process.ask(job="generate", tokens=[7], new=1)["tokens"] == [7]
    process.close()
    log = (peers / "a.log").read_text()
    said = ("loading: this is no reply", "generating: this is no reply", "a child says this")
    assert [part for part in said if part not in log] == []


def test_process_that_died_between_jobs_is_quoted_and_can_be_closed(engine, peers):
    process = bench.Process(engine("a", script="quits.py"), peers)
    process._process.wait()
    with pytest.raises(RuntimeError, match=r"a died: .*the cat sat on the cable"):
        process.ask(job="generate", tokens=[1], new=1)
    process.close()


def test_closed_process_has_ended(engine, peers):
    process = bench.Process(engine("a"), peers)
    process.close()
    assert process._process.returncode == 0


# the command


@pytest.mark.parametrize("count", ["0", "-1"])
def test_no_alternations_are_refused(monkeypatch, count):
    monkeypatch.setattr(sys, "argv", ["bench_engine.py", f"--alternations={count}"])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    assert f"--alternations={count}: nothing would be measured" in str(stop.value.code)


def test_peers_need_nothing_of_ours():
    source = "import sys; sys.path.insert(0, sys.argv[1]); import protocol; print(sorted(sys.modules))"
    bare = [sys.executable, "-I", "-c", source, str(ROOT / "scripts" / "peers")]
    loaded = subprocess.run(bare, capture_output=True, text=True, check=True).stdout
    assert "'torch'" not in loaded
    assert "'specbench'" not in loaded


def test_small_model_is_the_first_blocks_of_the_model(tmp_path):
    config = LlamaConfig(
        vocab_size=259, hidden_size=32, intermediate_size=32, num_hidden_layers=bench.SMALL_BLOCKS + 2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "whole")
    byte_tokenizer().save_pretrained(tmp_path / "whole")
    folder = bench.small_model(tmp_path / "whole", tmp_path / "small")
    small = AutoModelForCausalLM.from_pretrained(folder)
    assert small.config.num_hidden_layers == len(small.model.layers) == bench.SMALL_BLOCKS
    whole, cut = model.state_dict(), small.state_dict()
    assert cut.keys() == {key for key in whole if not key.startswith(("model.layers.6.", "model.layers.7."))}
    assert all(torch.equal(cut[key], whole[key]) for key in cut)
    assert len(load_hf(folder, dtype="float32", device="cpu").blocks) == bench.SMALL_BLOCKS
