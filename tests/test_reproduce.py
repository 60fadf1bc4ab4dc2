"""The check at the end of a reproduction, and what is done on the way to it; no model is run."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_output import made

from specbench import record

PROJECT = Path(__file__).parent.parent


@pytest.fixture
def reproduce(tmp_path, monkeypatch):
    """The script, with two studies of which only one is stored; its commands are noted and not run."""
    spec = importlib.util.spec_from_file_location("reproduce", PROJECT / "scripts" / "reproduce.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "reproduce", module)
    spec.loader.exec_module(module)
    first = module.STUDIES[0]
    studies = (
        replace(first, name="quick", stored=tmp_path / "stored"),
        replace(first, name="batch", arguments=("experiment=batch",), stored=tmp_path / "nowhere"),
    )
    monkeypatch.setattr(module, "STUDIES", studies)
    module.asked = []

    def do(*command):
        module.asked.append(command)
        return not any("batch" in word for word in command[:3])

    monkeypatch.setattr(module, "do", do)
    return module


def store(folder, name, k=4, **metrics):
    run = made(name, {"drafter.k": k, **{f"metrics.{metric}": value for metric, value in metrics.items()}})
    run["id"] = f"{name}-{k}"
    record.write(folder, run)


@pytest.fixture
def out(tmp_path, reproduce):
    """Stored: three cells. Here: two of them, one inside its intervals and one outside."""
    for name in ("ngram", "eagle", "mtp"):
        store(tmp_path / "stored", name)
    store(tmp_path / "out/quick/runs", "ngram", speedup=1.22, tokens_per_pass=1.65)
    store(tmp_path / "out/quick/runs", "eagle", speedup=1.19, tokens_per_pass=1.67)
    store(tmp_path / "out/quick/runs", "mtp", k=2)
    return tmp_path / "out"


def test_each_stored_number_stands_beside_the_one_measured_here(reproduce, out):
    found = {number.what: number for number in reproduce.headlines(out)}
    assert {what: number.verdict for what, number in found.items()} == {
        "quick: ngram k=4, greedy, batch 1: tokens per pass": "inside",
        "quick: ngram k=4, greedy, batch 1: speedup": "inside",
        "quick: eagle k=4, greedy, batch 1: tokens per pass": "outside",
        "quick: eagle k=4, greedy, batch 1: speedup": "outside",
        "quick: mtp k=4, greedy, batch 1: tokens per pass": "not measured",
        "quick: mtp k=4, greedy, batch 1: speedup": "not measured",
    }
    number = found["quick: ngram k=4, greedy, batch 1: speedup"]
    assert (number.stored, number.interval, number.here) == (1.44, [1.21, 1.71], 1.22)


def test_a_run_of_another_precision_is_no_twin(reproduce, tmp_path):
    store(tmp_path / "stored", "ngram")
    other = made("ngram", {"target.dtype": "bfloat16"})
    record.write(tmp_path / "out/quick/runs", other)
    assert {number.verdict for number in reproduce.headlines(tmp_path / "out")} == {"not measured"}


def test_a_number_without_an_interval_is_not_judged(reproduce):
    assert reproduce.Number("x", 1.0, None, 3.0).verdict == "no interval"
    assert reproduce.Number("x", 1.0, (0.9, 1.1), 1.1).verdict == "inside"


def test_what_is_done_and_what_is_said(reproduce, out, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "--out", str(out.parent / "out2"), "--quick"])
    (out.parent / "out2").mkdir()
    out.rename(out.parent / "out2/quick")
    with pytest.raises(SystemExit, match=r"reproduce: .*batch could not be shown"):
        reproduce.main()
    studies = [command for command in reproduce.asked if command[:2] == ("-m", "specbench")]
    assert [command[2] for command in studies] == ["experiment=quick", "experiment=batch"]
    assert all("max_new_tokens=16" in command for command in studies)
    (cost,) = [command for command in reproduce.asked if command[0].endswith("verify_cost.py")]
    assert "repeats=3" in cost


def test_the_check_is_written_with_where_the_numbers_are_from(reproduce, out, capsys, monkeypatch):
    monkeypatch.setattr(reproduce, "do", lambda *command: True)
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "--out", str(out.parent)])
    out.rename(out.parent / "full")
    with pytest.raises(SystemExit) as ended:
        reproduce.main()
    assert ended.value.code == 0
    text = (out.parent / "full/check.md").read_text()
    assert "| quick: eagle k=4, greedy, batch 1: speedup | 1.44 | 1.21–1.71 | 1.19 | outside |" in text
    assert "speedup: 1 of 2 inside the stored interval; 3 are stored." in text
    assert "- quick, here: A Processor, 2 threads; torch 2.11; commit 0123456789; 2026-01-02." in text
    said = capsys.readouterr()
    assert "nowhere" in said.err
    assert "quick: eagle k=4, greedy, batch 1: speedup: 1.19, outside the stored 1.21–1.71 (1.44)\n" in said.out
    assert said.out.count(": speedup: ") == 1
