"""What README shows works as it stands there."""

import re
import sys
from pathlib import Path

import pytest

from specbench import metrics
from specbench.__main__ import main

PROJECT = Path(__file__).parent.parent
README = (PROJECT / "README.md").read_text(encoding="utf-8")
MEASURING = (PROJECT / "docs/measuring.md").read_text(encoding="utf-8")


def block(language, number=0):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)[number]


def test_the_example_drafter_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "mydrafters.py").write_text(block("python"))
    (tmp_path / "conf/drafter").mkdir(parents=True)
    (tmp_path / "conf/drafter/again.yaml").write_text(block("yaml"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["--config-dir", "conf", "drafter=again", "k=2", "target=tiny", "dtype=float32", "dataset.limit=4"]
    monkeypatch.setattr("sys.argv", ["specbench"])
    assert main([*command, "max_new_tokens=8"]) == 0
    assert "again" in capsys.readouterr().out


def test_the_example_drafter_passes_the_kit_as_shown(tmp_path, monkeypatch):
    (tmp_path / "mydrafters.py").write_text(block("python"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mydrafters", raising=False)
    shown = {}
    exec(block("python", 1), shown)
    shown["test_again"]()


@pytest.mark.parametrize("name", metrics.DEFINITIONS)
def test_every_metric_is_explained(name):
    assert f"`{name}`" in MEASURING


def test_every_flag_is_explained():
    raised = re.findall(
        r'Flag\(\s*"([\w-]+)"', "".join(path.read_text() for path in (PROJECT / "specbench").glob("*.py"))
    )
    assert len(raised) > 10
    for name in raised:
        assert f"`{name}`" in MEASURING


@pytest.mark.parametrize(("folder", "page"), [("quick", "README.md"), ("engine", "docs/engine.md")])
def test_the_table_is_that_of_the_reference_results(folder, page):
    table = (PROJECT / f"results/reference/{folder}/table.md").read_text(encoding="utf-8")
    first = table.split("plain: tokens/s")[0]  # what is below it explains it
    rows = [line for line in first.splitlines() if line.startswith("|")]
    assert len(rows) > 3
    text = (PROJECT / page).read_text(encoding="utf-8")
    assert all(row in text for row in rows)


def test_the_engine_is_as_fast_as_it_says():
    table = (PROJECT / "results/reference/engine/table.md").read_text(encoding="utf-8")
    for row, words in (
        ("plain, bfloat16, over transformers", "times as fast as transformers"),
        ("plain, bfloat16, over vLLM CPU", "times as fast as vLLM"),
    ):
        (measured,) = re.findall(rf"^\| {row} \| ([\d.]+)x", table, re.MULTILINE)
        assert f"{measured} {words}" in " ".join(README.split())


def test_speedups_of_short_drafts_are_those_of_the_reference_results():
    by_k = (PROJECT / "results/reference/draft_length/by_k.md").read_text(encoding="utf-8")
    speedups = by_k.split("Tokens per verify pass")[0]
    quoted = re.findall(r"(?:MTP|EAGLE-3)\s\w+(?:\s\w+)? (?:reaches )?(\d\.\d+)x \((\d\.\d+–\d\.\d+)\)", README)
    assert len(quoted) == 2
    for (speedup, interval), drafter in zip(quoted, ("mtp", "eagle"), strict=True):
        (row,) = re.findall(rf"^\| {drafter} \|.*$", speedups, re.MULTILINE)
        cell = row.split("|")[3]  # k=1, then k=2
        assert (speedup, interval) == (cell.split()[0].strip("*"), re.search(r">(.*)<", cell)[1])


@pytest.mark.parametrize(
    ("file", "page"),
    [
        ("training/table.md", "training"),
        ("training/scaling.md", "training"),
        ("reference/draft_length/by_k.md", "training"),
        ("reference/law_power/table.md", "checks"),
    ],
)
def test_the_tables_of_a_page_are_those_of_its_results(file, page):
    rows = [line for line in (PROJECT / "results" / file).read_text().splitlines() if line.startswith("|")]
    page = (PROJECT / f"docs/{page}.md").read_text(encoding="utf-8")
    assert len(rows) > 3
    assert all(row in page for row in rows)
