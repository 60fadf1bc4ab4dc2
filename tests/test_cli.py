import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import CommandLine, put_outside

from specbench import __main__, record
from specbench.targets import load_tiny

ROOT = Path(__file__).parent.parent

METRICS = {
    "acceptance_rate",
    "tokens_per_pass",
    "acceptance_by_position",
    "accepted_length_histogram",
    "decode_tokens_per_s",
    "baseline_decode_tokens_per_s",
    "speedup",
    "speedup_ci95",
    "end_to_end_speedup",
    "ttft_s",
    "lossless",
    "peak_memory_bytes",
}

# what a user keeps outside of the project: a module of their own, and YAMLs that name what is in it
OUTSIDE = {
    "outside_specbench.py": """
        import torch

        from drafters.ngram import NGram
        from specbench.model import Output
        from specbench.targets import load_tiny


        class AtMostTwo(NGram):
            max_k = 2


        class Breaks(NGram):
            def propose(self, batch, k):
                raise ArithmeticError("the weights are made of cheese")


        class BreaksInBind(NGram):
            def bind(self, target):
                raise ArithmeticError("the weights are made of cheese")


        def nan_beyond(length, dtype, device):
            target = load_tiny(dtype=dtype, device=device)
            forward = target.forward

            def broken(tokens, cache, **how):
                output = forward(tokens, cache, **how)
                if cache.lengths.max() <= length:
                    return output
                return Output(torch.full_like(output.logits, float("nan")), output.taps)

            target.forward = broken
            return target
    """,
    "conf/drafter/at_most_two.yaml": "_target_: outside_specbench.AtMostTwo",
    "conf/drafter/breaks.yaml": "_target_: outside_specbench.Breaks",
    "conf/drafter/breaks_in_bind.yaml": "_target_: outside_specbench.BreaksInBind",
    "conf/target/nan_beyond.yaml": """
        _target_: outside_specbench.nan_beyond
        length: ???
        dtype: ${dtype}
        device: ${device}
    """,
    "conf/dataset/outside.yaml": """
        _target_: specbench.prompts.load_jsonl
        path: ???
        limit: null
        seed: ${seed}
    """,
}


@pytest.fixture(autouse=True)
def command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with CommandLine():
        yield


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results"


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path, {"turns": ["One two one two.", "Three?"]}, {"turns": "Say hi to the baker."})


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """Options that add a folder of configurations from outside, whose code can be imported."""
    return put_outside(OUTSIDE, tmp_path / "outside", monkeypatch)


def write_prompts(tmp_path, *records):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def asked(prompts, results):
    """A small run; what is added after it wins."""
    return [
        "target=tiny",
        "dtype=float32",
        "device=cpu",
        "k=3",
        "max_new_tokens=8",
        "dataset=jsonl",
        f"dataset.path={prompts}",
        f"results_dir={results}",
    ]


def records(results):
    return [record.read(folder) for folder in record.find([results])]


# runs that end well


def test_sweep_writes_a_record_for_each_choice(asked, results):
    assert __main__.main(["-m", *asked, "drafter=none,ngram"]) == 0
    assert sorted(run["drafter"]["name"] for run in records(results)) == ["ngram", "none"]


def test_drafter_and_dataset_from_outside_run(outside, asked, results):
    assert __main__.main([*outside, *asked, "drafter=at_most_two", "k=2", "dataset=outside"]) == 0
    (run,) = records(results)
    assert (run["drafter"]["name"], run["config"]["drafter"]) == (
        "at_most_two",
        {"_target_": "outside_specbench.AtMostTwo"},
    )
    assert run["prompts"]["turns"] == 3


def test_prompt_longer_than_the_context_is_left_out_and_counted(tmp_path, asked, results, capsys):
    write_prompts(
        tmp_path,
        {"id": "short", "turns": ["One?"]},
        {"id": "long", "turns": ["x" * 600, "Two?"]},
        {"id": "grows", "turns": ["x" * 300, "y" * 300]},
    )
    assert __main__.main(asked) == 0
    (run,) = records(results)
    assert run["prompts"]["turns"] == 2
    assert sorted(run["prompts"]["too_long"]) == ["grows/2", "long/1", "long/2"]
    assert "prompts left out as they do not fit the context: 3 (" in capsys.readouterr().out


def test_context_shorter_than_the_warm_up_runs(asked, results, tmp_path):
    write_prompts(tmp_path, {"turns": "One?"})
    assert __main__.main([*asked, "target.context=64"]) == 0


def test_drafter_asked_for_runs_beside_one_of_the_same_name_in_compare(asked, results):
    assert __main__.main([*asked, "drafter=ngram", "drafter.max_n=2", "+drafter@compare.ngram=ngram"]) == 0
    assert sorted(run["config"]["drafter"]["max_n"] for run in records(results)) == [2, 4]


# runs that fail


def test_drafter_that_raises_fails_with_its_reason_and_the_other_arm_gets_its_record(outside, asked, results, capsys):
    assert __main__.main([*outside, *asked, "drafter=breaks", "+drafter@compare.ngram=ngram"]) == 1
    runs = {run["drafter"]["name"]: run for run in records(results)}
    assert (runs["breaks"]["status"], runs["ngram"]["status"]) == ("failed", "ok")
    assert runs["breaks"]["error"] == "ArithmeticError: the weights are made of cheese"
    assert "metrics" not in runs["breaks"]
    assert METRICS - set(runs["ngram"]["metrics"]) == set()


def test_failed_run_prints_its_whole_reason(outside, asked, capsys):
    assert __main__.main([*outside, *asked, "drafter=breaks"]) == 1
    captured = capsys.readouterr()
    assert "the weights are made of cheese" in " ".join((captured.out + captured.err).split())


def test_failed_run_is_run_again(outside, asked, results):
    assert __main__.main([*outside, *asked, "drafter=breaks"]) == 1
    (folder,) = record.find([results])
    written = (folder / record.RUN).stat().st_mtime_ns
    assert __main__.main([*outside, *asked, "drafter=breaks"]) == 1
    assert (folder / record.RUN).stat().st_mtime_ns > written


def test_drafter_that_raises_in_bind_fails_and_the_other_arm_gets_its_record(outside, asked, results):
    assert __main__.main([*outside, *asked, "drafter=breaks_in_bind", "+drafter@compare.ngram=ngram"]) == 1
    assert {run["drafter"]["name"]: run["status"] for run in records(results)} == {
        "breaks_in_bind": "failed",
        "ngram": "ok",
    }


def test_logits_that_turn_nan_fail_the_run_and_name_the_round(outside, asked, results, tmp_path):
    write_prompts(tmp_path, {"id": "p", "turns": "x" * 300})
    prompt = len(load_tiny().encode([{"role": "user", "content": "x" * 300}]))
    # plain decoding: round r begins with prompt + r - 1 tokens in the cache
    assert __main__.main([*outside, *asked, "target=nan_beyond", f"target.length={prompt + 1}"]) == 1
    (run,) = records(results)
    assert run["status"] == "failed"
    assert "the target's logits are NaN or infinite in round 3 of prompt p/1" in run["error"]


# what cannot be run: exit code 2, and a message that names the value and says what to type

REFUSED = {
    "drafter=ngramm": ("drafter=ngramm is unknown", "Did you mean 'ngram'?", "oracle", "suffix"),
    "target=tinny": ("target=tinny is unknown", "Did you mean 'tiny'?", "hf", "smollm2"),
    "dataset=gsm9k": ("dataset=gsm9k is unknown", "Did you mean 'gsm8k'?", "builtin", "jsonl"),
    "sampling=gredy": ("sampling=gredy is unknown", "Did you mean 'greedy'?", "nucleus"),
    "k=-1": ("k=-1", "0 for none"),
    "k=abc": ("k=abc", "whole number"),
    "k=2.5": ("k=2.5", "whole number"),
    "kk=4": ("kk",),
    "batch_size=0": ("batch_size=0", "1..64"),
    "batch_size=65": ("batch_size=65", "1..64"),
    "max_new_tokens=0": ("max_new_tokens=0", "1 or more"),
    "dataset.limit=0": ("dataset.limit=0", "1 or more"),
    "dataset.path=null": ("dataset=jsonl dataset.path=FILE",),
    "dataset.path=nowhere.jsonl": ("dataset.path=nowhere.jsonl does not exist", "dataset.path=FILE"),
    "dtype=float99": ("dtype=float99", "Did you mean 'float", "auto", "bfloat16", "float16", "float32"),
    "device=gpu": ("device=gpu", "auto, cpu or cuda"),
    "target=hf": ("target.path=VALUE",),
    "target=hf target.path=./nowhere": ("model folder ./nowhere does not exist", "a folder or a hub id"),
    "drafter=small_lm": ("no small_lm comes with specbench for tiny-llama", "drafter.model=FOLDER"),
    "drafter=small_lm drafter.model=null": ("drafter=small_lm", "drafter.model=FOLDER_OR_HUB_ID"),
    "drafter=eagle": ("no eagle comes with specbench for tiny-llama", "python -m drafters.training drafter=eagle"),
}


@pytest.mark.parametrize("bad", REFUSED)
def test_what_cannot_be_run_is_refused_by_name(asked, results, capsys, bad):
    assert __main__.main([*asked, *bad.split()]) == 2
    said = capsys.readouterr().err
    assert [part for part in REFUSED[bad] if part not in said] == []
    assert not results.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none_is_refused(asked, capsys):
    assert __main__.main([*asked, "device=cuda"]) == 2
    assert "device=cuda was asked for and there is no CUDA device; use device=cpu" in capsys.readouterr().err


def test_k_above_what_the_drafter_can_draft_is_refused(outside, asked, capsys):
    assert __main__.main([*outside, *asked, "drafter=at_most_two", "k=3"]) == 2
    assert "k=3 is above what drafter at_most_two can draft; use k=2 or less" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"turns": "One?"}\n{"turns"\n', "line 2: not JSON"),
        ("{}\n", 'line 1: needs "turns"'),
        ("", "prompts is empty"),
    ],
)
def test_prompts_that_cannot_be_used_are_refused(asked, prompts, capsys, content, said):
    prompts.write_text(content)
    assert __main__.main(asked) == 2
    assert said in capsys.readouterr().err


def test_prompts_that_are_all_too_long_are_refused(asked, prompts, results, tmp_path, capsys):
    write_prompts(tmp_path, {"turns": "x" * 600}, {"turns": ["y" * 600, "More?"]})
    assert __main__.main(asked) == 2
    assert "every prompt is longer than the context of tiny-llama (512 tokens)" in capsys.readouterr().err
    assert not results.exists()


def test_refusal_is_all_that_is_said(asked, capsys):
    assert __main__.main([*asked, "batch_size=0"]) == 2
    captured = capsys.readouterr()
    assert captured.out + captured.err == "specbench: batch_size=0 is not in 1..64\n"


def test_sweep_goes_on_after_a_choice_that_is_refused(asked, results):
    assert __main__.main(["-m", *asked, "k=-1,2"]) == 2
    assert [run["drafter"]["k"] for run in records(results)] == [2]


def test_sweep_leaves_nothing_where_it_was_started(asked, prompts, results, tmp_path):
    assert __main__.main(["-m", *asked, "k=-1,-2"]) == 2
    assert set(tmp_path.iterdir()) <= {prompts, results}


# through the real entry point


@pytest.fixture(scope="module", autouse=True)
def begun(tmp_path_factory):
    """A run in a process of its own, begun before the other tests because it takes seconds to import everything."""
    folder = tmp_path_factory.mktemp("first")
    prompts = write_prompts(folder, *({"id": str(i), "turns": f"Count: {i}, {i}, {i}."} for i in range(8)))
    arguments = ["target=tiny", "drafter=ngram", "k=3", "dataset=jsonl", "max_new_tokens=16", "dtype=float32"]
    arguments += [f"dataset.path={prompts}", f"results_dir={folder / 'results'}"]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "HYDRA_FULL_ERROR")}
    with subprocess.Popen(
        [sys.executable, "-m", "specbench", *arguments],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield arguments, process
        process.kill()


@pytest.fixture(scope="module")
def first(begun):
    """What was asked, and how it ended."""
    arguments, process = begun
    out, err = process.communicate()
    return arguments, subprocess.CompletedProcess(arguments, process.returncode, out, err)


def folder_of(done):
    return Path(done.stdout.splitlines()[-1])


def test_run_ends_well_and_prints_the_folder_of_its_record_last(first):
    _, done = first
    assert done.returncode == 0, done.stderr
    assert record.read(folder_of(done))["status"] == "ok"


def test_run_prints_a_table_that_80_columns_hold(first):
    assert "…" not in first[1].stdout


def test_record_has_every_metric(first):
    metrics = record.read(folder_of(first[1]))["metrics"]
    assert METRICS - set(metrics) == set()
    assert set(metrics["acceptance_by_position"]) == {"joint", "conditional"}
    assert metrics["lossless"]["verdict"] == "equal"
    assert len(metrics["speedup_ci95"]) == 2
    assert len(metrics["accepted_length_histogram"]) == 4


def test_same_run_again_is_skipped_with_a_line(first, capsys):
    arguments, done = first
    written = (folder_of(done) / record.RUN).stat().st_mtime_ns
    assert __main__.main(arguments) == 0
    captured = capsys.readouterr()
    assert f"specbench: ngram k=3 is already finished ({folder_of(done)}" in captured.err
    assert captured.out.splitlines()[-1] == str(folder_of(done))
    assert (folder_of(done) / record.RUN).stat().st_mtime_ns == written


def test_force_runs_it_again(first, capsys):
    arguments, done = first
    written = (folder_of(done) / record.RUN).stat().st_mtime_ns
    assert __main__.main([*arguments, "force=true"]) == 0
    captured = capsys.readouterr()
    assert "already finished" not in captured.err
    assert captured.out.splitlines()[-1] == str(folder_of(done))
    assert (folder_of(done) / record.RUN).stat().st_mtime_ns > written
