"""Sweeps: what is said before, between and after; what is left out, shared, skipped, and kept when all is killed."""

import errno
import importlib
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import CommandLine, put_outside
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf
from rich.console import Console

from drafters.ngram import NGram
from specbench import __main__, cli, configured, record, results, sweeping
from specbench.sweeping import Point, Sweep

OUTSIDE = {
    "outside_sweeps.py": """
        from drafters.ngram import NGram
        from specbench.targets import load_tiny

        loads = []


        class AtMostTwo(NGram):
            max_k = 2


        class AtMostThree(NGram):
            def bind(self, target):
                super().bind(target)
                self.max_k = 3


        class Breaks(NGram):
            def propose(self, batch, k):
                raise ArithmeticError("the weights are made of cheese")


        def counted(family, dtype, device):
            loads.append(family)
            return load_tiny(family, dtype=dtype, device=device)
    """,
    "conf/drafter/at_most_two.yaml": "_target_: outside_sweeps.AtMostTwo",
    "conf/drafter/at_most_three.yaml": "_target_: outside_sweeps.AtMostThree",
    "conf/drafter/breaks.yaml": "_target_: outside_sweeps.Breaks",
    "conf/target/counted.yaml": """
        _target_: outside_sweeps.counted
        family: llama
        dtype: ${dtype}
        device: ${device}
    """,
}


GRID = [("ngram", "1"), ("ngram", "2"), ("suffix", "1"), ("suffix", "2")]


@pytest.fixture(autouse=True)
def command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with CommandLine(width=100):
        yield


@pytest.fixture
def outside(tmp_path, monkeypatch):
    return put_outside(OUTSIDE, tmp_path / "outside", monkeypatch)


@pytest.fixture
def asked(tmp_path):
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"turns": text}) + "\n" for text in ("One two one two.", "Say hi to the baker.", "abc abc"))
    )
    return [
        *("-m", "target=tiny", "dtype=float32", "device=cpu", "max_new_tokens=6", "dataset=jsonl", "profile=1"),
        *(f"dataset.path={tmp_path / 'prompts.jsonl'}", "results_dir=results"),
    ]


def ran(results_dir="results"):
    return sorted((run["drafter"]["name"], run["drafter"]["k"]) for run in results.runs([Path(results_dir)]))


def test_the_grid_and_its_time_are_said_before_it_starts(asked, capsys):
    assert __main__.main([*asked, "drafter=ngram,suffix", "k=1,2", "batch_size=1,2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["drafter: ngram, suffix", "k: 1, 2", "batch_size: 1, 2"]
    assert lines[3] == "8 cells in 8 runs"
    assert lines[4] == "about 1 min, were every drafter as fast as plain decoding"
    assert lines[5].startswith("ngram k=1 batch_size=1: ")
    assert lines[6] == "7 runs to go, about 1 min"
    assert len(ran()) == 8


def test_at_the_end_stands_one_table_for_each_setting(asked, capsys):
    assert __main__.main([*asked, "drafter=ngram,suffix", "k=1,2", "sampling=greedy,t1"]) == 0
    end = capsys.readouterr().out.split("0 runs to go")[-1]
    end = end[end.index("tiny-llama ·") :]
    assert end.count("drafter k tokens/pass") == 2
    greedy, sampled = end.split("temperature 1")
    assert sorted(re.findall(r"^ *(ngram|suffix) +(\d)", greedy, re.MULTILINE)) == GRID
    assert sorted(re.findall(r"^ *(ngram|suffix) +(\d)", sampled, re.MULTILINE)) == GRID


def test_data_sets_can_be_swept_over_with_spec_bench_among_them(asked, tmp_path, monkeypatch):
    question = {"question_id": 81, "category": "writing", "turns": ["One two one two.", "And three?"]}
    (tmp_path / "question.jsonl").write_text(json.dumps(question) + "\n")
    monkeypatch.setenv("SPEC_BENCH", str(tmp_path / "question.jsonl"))
    shared = [word for word in asked if "dataset" not in word]
    assert __main__.main([*shared, "drafter=ngram", "dataset=builtin,spec_bench", "dataset.limit=1", "k=2"]) == 0
    assert {run["dataset"]["name"] for run in results.runs([Path("results")])} == {"builtin", "spec_bench"}


def test_cells_that_cannot_be_are_left_out_with_a_line(outside, asked, capsys):
    drafters = "drafter=none,at_most_two,at_most_three"
    assert __main__.main([*asked[:1], *outside, *asked[1:], drafters, "k=2,3,4"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    assert said == [
        "left out: at_most_two k=3: it drafts 2 at most",
        "left out: at_most_two k=4: it drafts 2 at most",
        "left out: drafter=none k=3: the same as none k=0",
        "left out: drafter=none k=4: the same as none k=0",
        "left out: at_most_three k=4: it drafts 3 at most",
    ]
    assert ran() == [("at_most_three", 2), ("at_most_three", 3), ("at_most_two", 2), ("none", 0)]


def test_a_single_run_that_cannot_be_is_refused_all_the_same(outside, asked, capsys):
    assert __main__.main([*outside, *asked[1:], "drafter=at_most_two", "k=3"]) == 2
    assert "k=3 is above what drafter at_most_two can draft; use k=2 or less" in capsys.readouterr().err


def test_a_cell_that_fails_is_a_row_with_its_reason_and_the_rest_is_run(outside, asked, capsys):
    assert __main__.main([*asked[:1], *outside, *asked[1:], "drafter=breaks,ngram", "k=1,2"]) == 1
    said = capsys.readouterr().out
    assert "breaks k=1: failed: ArithmeticError: the weights are made of cheese" in said
    assert said.count("failed") == 2 + 2  # two lines, two rows
    assert ran() == [("breaks", 1), ("breaks", 2), ("ngram", 1), ("ngram", 2)]


def test_what_is_wrong_is_said_and_the_rest_is_run(asked, capsys):
    assert __main__.main([*asked, "drafter=ngram", "k=-1,2", "batch_size=1,65"]) == 2
    said = capsys.readouterr()
    assert said.err.count("k=-1 is negative") == 2 - 1
    assert "batch_size=65 is not in 1..64" in said.err
    assert ran() == [("ngram", 2)]


def test_finished_cells_are_counted_and_not_run_again(asked, capsys):
    assert __main__.main([*asked, "drafter=ngram", "k=1,2"]) == 0
    written = {path: path.stat().st_mtime_ns for path in Path("results").glob("*/run.json")}
    capsys.readouterr()
    assert __main__.main([*asked, "drafter=ngram", "k=1,2,3"]) == 0
    said = capsys.readouterr()
    assert "3 cells in 3 runs, 2 of them finished already" in said.out
    assert said.err.count("is already finished") == 2
    assert said.out.count("tokens per pass") == 1  # a line for the one that was run
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert __main__.main([*asked, "drafter=ngram", "k=1,2,3"]) == 0
    assert "about" not in capsys.readouterr().out


def test_a_failed_cell_is_run_again(outside, asked, tmp_path, capsys):
    asked = [*asked[:1], *outside, *asked[1:], "drafter=breaks", "k=1,2"]
    assert __main__.main(asked) == 1
    assert __main__.main(asked) == 1
    assert "finished already" not in capsys.readouterr().out


def test_a_target_is_loaded_once_for_all_its_cells(outside, asked):
    families = "target.family=llama,qwen3"
    asked = [*asked[:1], *outside, "target=counted", *asked[2:]]
    assert __main__.main([*asked, "drafter=ngram,suffix", "k=1,2", families]) == 0
    assert sys.modules["outside_sweeps"].loads == ["llama", "qwen3"]  # though the family varies fastest
    assert len(ran()) == 8
    assert configured.target_of._made is None  # nothing is kept once the command is done


def test_other_targets_time_is_not_guessed(outside, asked, capsys):
    asked = [*asked[:1], *outside, "target=counted", *asked[2:]]
    assert __main__.main([*asked, "drafter=ngram", "k=1,2", "target.family=llama,qwen3"]) == 0
    assert "about 1 min for tiny-llama; 2 runs are of other targets, were every" in capsys.readouterr().out


def test_an_estimate_that_cannot_be_made_stops_nothing(asked, monkeypatch, capsys):
    monkeypatch.setattr(sweeping, "_pace", lambda *_: 1 / 0)
    assert __main__.main([*asked, "drafter=ngram", "k=1,2"]) == 0
    assert "how long they take is told after the first" in capsys.readouterr().out


def test_interrupted_in_a_cell_it_keeps_what_is_finished_and_goes_on_from_there(asked, monkeypatch, capsys):
    propose, calls = NGram.propose, itertools.count()

    def interrupted(self, batch, k):
        if k == 2 and next(calls) == 5:
            raise KeyboardInterrupt
        return propose(self, batch, k)

    asked = [*asked, "drafter=ngram", "k=1,2,3"]
    with monkeypatch.context() as patch:
        patch.setattr(NGram, "propose", interrupted)
        assert __main__.main(asked) == 1
    assert next(calls) == 6
    assert "interrupted; finished cells are kept" in capsys.readouterr().err
    assert ran() == [("ngram", 1)]
    assert __main__.main(asked) == 0
    assert "3 cells in 3 runs, 1 of them finished already" in capsys.readouterr().out
    assert ran() == [("ngram", 1), ("ngram", 2), ("ngram", 3)]


def test_a_full_disk_stops_nothing_that_is_finished_and_is_gone_on_from(asked, monkeypatch, capsys):
    to_parquet, written = pd.DataFrame.to_parquet, []

    def full_after_the_first_record(self, path, **how):
        written.append(Path(path).name)
        if written.count(record.STEPS) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return to_parquet(self, path, **how)

    asked = [*asked, "drafter=ngram", "k=1,2,3"]
    with monkeypatch.context() as patch:
        patch.setattr(pd.DataFrame, "to_parquet", full_after_the_first_record)
        assert __main__.main(asked) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert ran() == [("ngram", 1)]
    assert len(list(Path("results").glob("*/*"))) == len(list(Path("results").glob("*/run.json"))) * 4  # nothing half
    assert __main__.main(asked) == 0
    assert ran() == [("ngram", 1), ("ngram", 2), ("ngram", 3)]


# killed


def sweep(folder: str, arguments: list[str]) -> None:
    """In a process of its own."""
    os.chdir(folder)
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nothing:
        cli.out, cli.err = Console(file=nothing), Console(file=nothing)
        sys.exit(__main__.main(arguments))


def table(folder: Path):
    """What runs say, but for time."""
    told = ("tokens_per_pass", "acceptance_rate", "accepted_length_histogram", "lossless", "committed_tokens")
    return {
        run["id"]: [run["drafter"]["name"], run["drafter"]["k"], run["status"], run["error"]]
        + [run.get("metrics", {}).get(name) for name in told]
        for run in results.runs([folder])
    }


def test_killed_ten_times_it_ends_in_the_same_table(asked, tmp_path):
    """At random moments, and each time it goes on from what was finished."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["specbench.__main__", "drafters.ngram", "drafters.suffix", "specbench.targets"])
    asked = [*asked, "drafter=ngram,suffix", "k=1,2,3,4,5,6,7", "profile=0"]
    chance = random.Random(0)

    def begin():
        process = processes.Process(target=sweep, args=(str(tmp_path), asked))
        process.start()
        return process

    for number in range(10):
        process, before = begin(), finished(tmp_path)
        while number % 2 and finished(tmp_path) == before and process.is_alive():
            time.sleep(0.01)  # every other time it gets further first
        time.sleep(chance.uniform(0, 0.3 if number % 2 else 2))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert 5 <= finished(tmp_path) < 14
    process = begin()
    process.join()
    assert process.exitcode == 0
    assert __main__.main([*asked, "results_dir=undisturbed"]) == 0
    assert table(tmp_path / "results") == table(tmp_path / "undisturbed")
    assert len(table(tmp_path / "results")) == 14


def finished(home: Path) -> int:
    return len(list(home.glob("results/[!.]*/run.json")))


def test_several_processes_finish_the_same_grid(outside, asked, monkeypatch, capsys):
    """With the launcher that runs cells at once; the failed one counts there too."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    grid = [*asked[:1], *outside, *asked[1:], "drafter=breaks,none,ngram,at_most_three", "k=2,3,4"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path("outside").resolve()), *sys.path]))
    assert __main__.main([*grid, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]) == 1
    said = capsys.readouterr().out
    assert "left out: at_most_three k=4: it drafts 3 at most" in said
    assert "breaks k=2: failed: ArithmeticError" in said
    assert __main__.main([*grid, "results_dir=one_by_one"]) == 1
    assert table(Path("results")) == table(Path("one_by_one"))


def test_a_launcher_that_is_killed_costs_only_what_it_had_not_finished(asked, monkeypatch, capsys):
    Plugins.instance()  # which loads its modules anew
    launcher = importlib.import_module("hydra._internal.core_plugins.basic_launcher").BasicLauncher
    launch = launcher.launch

    def killed(self, overrides, initial_job_idx):
        if initial_job_idx == 1:
            raise RuntimeError("a process was killed [1]")
        returned = launch(self, overrides, initial_job_idx)
        if initial_job_idx == 2:  # what it ran is stored
            raise RuntimeError("a process was killed [2]")
        return returned

    monkeypatch.setattr(launcher, "launch", killed)
    assert __main__.main([*asked, "drafter=ngram", "k=1,2,3,4"]) == 1
    told = capsys.readouterr()
    for number in (1, 2):
        why = f"RuntimeError: a process was killed [{number}]"
        assert f"the launcher failed, and with it what it had not finished: {why}" in told.err
    assert ran() == [("ngram", 1), ("ngram", 3), ("ngram", 4)]
    end = told.out[told.out.index("tiny-llama ·") :]
    assert sorted(re.findall(r"^ *ngram +(\d)", end, re.MULTILINE)) == ["1", "3", "4"]
    assert [line for line in end.splitlines() if "could not be run" in line] == [
        "could not be run, for the reason above: k=2"
    ]


def test_points_that_share_an_unfinished_cell_are_not_launched_at_once(tmp_path):
    def point(k, *cells, **more):
        cfg = OmegaConf.create({"target": {}, "results_dir": str(tmp_path), "force": False, **more})
        return Point((f"k={k}",), cfg, dict.fromkeys(cells, ""), ())

    def waves(*points):
        return [[found.overrides[0] for found in wave] for wave in Sweep(points).waves()]

    assert waves(point(1, "none", "a"), point(2, "none", "b"), point(3, "c"), point(4, "none", "d")) == [
        ["k=1", "k=3"],
        ["k=2", "k=4"],
    ]
    always = [point(k, "none", str(k), force=True) for k in (1, 2)]
    assert waves(*always) == [["k=1"], ["k=2"]]


def test_a_folder_that_cannot_be_made_is_named(asked, tmp_path, capsys):
    (tmp_path / "results").write_text("no folder")
    assert __main__.main([*asked, "drafter=ngram", "k=1,2"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "Not a directory" in line] == ["specbench: results/.sweep: Not a directory"]


def test_a_choice_of_prompts_that_cannot_be_had_costs_the_others_nothing(asked, tmp_path, capsys):
    paths = f"dataset.path={tmp_path / 'missing.jsonl'},{tmp_path / 'prompts.jsonl'}"
    asked = [word for word in asked if not word.startswith("dataset.path")]
    assert __main__.main([*asked, "drafter=ngram", "k=2", paths]) == 2
    said = capsys.readouterr()
    assert "missing.jsonl" in said.err
    assert f"could not be run, for the reason above: dataset.path={tmp_path / 'missing.jsonl'}" in said.out
    assert ran() == [("ngram", 2)]


def test_precisions_are_cells_of_their_own(asked, capsys):
    asked = [word for word in asked if word != "dtype=float32"]
    assert __main__.main([*asked, "drafter=ngram", "k=2", "dtype=float32,bfloat16"]) == 0
    assert "2 cells in 2 runs" in capsys.readouterr().out
    assert len(ran()) == 2
    assert __main__.main([*asked, "drafter=ngram", "k=2", "dtype=float32,bfloat16,auto"]) == 0
    assert "3 cells in 3 runs, 3 of them finished already" in capsys.readouterr().out


def test_a_record_that_is_cut_short_hides_no_other(asked, capsys):
    assert __main__.main([*asked, "drafter=ngram", "k=2,3"]) == 0
    (Path("results/halfway")).mkdir()
    (Path("results/halfway/run.json")).write_text("{")
    capsys.readouterr()
    assert __main__.main([*asked, "drafter=ngram", "k=2,3"]) == 0
    assert "2 of them finished already" in capsys.readouterr().out


def test_a_drafter_that_does_not_fit_a_target_is_a_failed_row_and_stops_no_other(asked, capsys):
    assert __main__.main([*asked, "drafter=eagle", "k=2", "batch_size=1,2", "+drafter@compare.ngram=ngram"]) == 1
    said = capsys.readouterr().out
    assert said.count("eagle k=2") >= 2
    assert "failed: ConfigError" in said
    assert ran() == [("eagle", 2), ("eagle", 2), ("ngram", 2), ("ngram", 2)]
