import copy
import io
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conftest import baseline, tiny
from rich.console import Console

from drafters.ngram import NGram
from specbench import progress, record, settings, tables
from specbench.comparison import Arm, Settings
from specbench.decoding import Step
from specbench.memory import CLEAR, PeakMemory
from specbench.prompts import Conversation, PromptSet
from specbench.runner import Cell, Plan, run
from specbench.sampling import Sampling
from specbench.stopping import StopRule

ROOT = Path(__file__).parent.parent

NUMBERS = {
    "tokens_per_pass": 1.52,
    "tokens_per_pass_ci95": [1.4, 1.66],
    "acceptance_rate": 0.34,
    "decode_tokens_per_s": 43.2,
    "baseline_decode_tokens_per_s": 30.1,
    "speedup": 1.44,
    "speedup_ci95": [1.21, 1.71],
    "acceptance_by_position": {"joint": [0.3, 0.15, None, 0.0]},
}
MODEL = {
    "shares": {"draft": 0.104, "verify": 0.85, "accept": 0.03, "bookkeeping": 0.016},
    "predicted_speedup": 1.5,
    "residual": -0.04,
    "bound": 4.2,
    "break_even": 0.061,
    "best_k": 3,
    "plain_seconds": 0.02,
    "by_k": [
        {"k": 0, "seconds": 0.02, "tokens_per_pass": 1.0, "speedup": 1.0},
        {"k": 4, "seconds": 0.025, "tokens_per_pass": 1.52, "speedup": 1.5},
    ],
}
EQUAL = {"verdict": "equal", "prompts": 16, "equal": 16, "near_ties": 0, "mismatches": 0}
SAMPLING = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def put(run_json, path, value):
    *above, last = path.split(".")
    for key in above:
        run_json = run_json[key]
    run_json[last] = value


def made(name="ngram", changes=(), **options):
    """A run as tables and plots read it, with ``changes`` by dotted path."""
    run_json = {
        "id": f"id-of-{name}",
        "status": "ok",
        "error": None,
        "config": {
            "sampling": SAMPLING,
            "max_new_tokens": 64,
            "batch_size": 1,
            "seed": 0,
            "stop": {"token_ids": [], "strings": []},
            "drafter": {"_target_": f"drafters.{name}", **options},
        },
        "target": {"name": "tiny", "dtype": "float32", "device": "cpu", "files": {"weights": "a"}},
        "drafter": {"name": name, "k": 4},
        "dataset": {"name": "builtin", "sha256": "a"},
        "prompts": {"turns": 16},
        "flags": [],
        "model": MODEL,
        "metrics": {**NUMBERS, "lossless": EQUAL},
        "by_category": {"chat": NUMBERS, "code": NUMBERS},
        "provenance": {
            "specbench": "0.1",
            "code_sha256": "a",
            "git": {"commit": "0123456789abcdef"},
            "started": "2026-01-02T03:04:05+00:00",
            "packages": {"torch": "2.11"},
            "machine": {"cpu": "A Processor", "threads": 2},
        },
    }
    run_json = copy.deepcopy(run_json)
    for path, value in dict(changes).items():
        put(run_json, path, value)
    return run_json


def failed(name="broken", **more):
    run_json = made(name, **more) | {"status": "failed", "error": "ArithmeticError: made of cheese"}
    return {key: value for key, value in run_json.items() if key not in ("metrics", "by_category", "prompts")}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Results of one real run beside a failed one."""

    class Breaks(NGram):
        def propose(self, batch, k):
            raise ArithmeticError("made of cheese")

    results = tmp_path_factory.mktemp("results")
    lm = tiny("llama")
    shared = {"sampling": SAMPLING, "max_new_tokens": 6, "batch_size": 1, "stop": {}, "seed": 0}
    drafters = {"ngram": NGram(), "breaks": Breaks()}
    cells = [Cell(Arm(name, drafter, 2), {**shared, "drafter": {"name": name}}) for name, drafter in drafters.items()]
    conversations = tuple(Conversation(str(i), "chat", (f"count {i} {i} {i}",)) for i in range(3))
    plan = Plan(lm, PromptSet("counts", conversations), Settings(1, Sampling(), 0, StopRule(6)), cells, results)
    run(plan, baseline(lm), lambda arms, turns: nullcontext(lambda arm, step: None))
    return results


@pytest.fixture
def real_runs(real):
    return tables.in_order([record.read(folder) for folder in record.find([real])])


# which runs may stand in one table


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("provenance.machine", {"cpu": "Another Processor", "threads": 2}),
        ("provenance.machine.threads", 8),
        ("provenance.code_sha256", "b"),
        ("provenance.packages", {"torch": "2.12"}),
        ("config.seed", 1),
        ("config.stop.strings", ["###"]),
        ("config.sampling.temperature", 1.0),
        ("config.sampling.top_p", 0.9),
        ("config.max_new_tokens", 65),
        ("config.batch_size", 2),
        ("target.files", {"weights": "b"}),
        ("target.dtype", "bfloat16"),
        ("target.device", "cuda"),
        ("dataset.sha256", "b"),
    ],
)
def test_runs_that_differ_in_this_stand_apart(path, value):
    runs = [made("ngram"), made("suffix", {path: value}), made("none")]
    groups = settings.groups(runs)
    assert [[run["id"] for run in group] for group in groups] == [["id-of-ngram", "id-of-none"], ["id-of-suffix"]]
    assert len({settings.title(group) for group in groups}) == 2  # not called alike


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("drafter.k", 8),
        ("drafter.name", "other"),
        ("config.drafter", {"_target_": "elsewhere"}),
        ("provenance.started", "2027-01-01T00:00:00+00:00"),
        ("provenance.git", None),
        ("metrics.speedup", 9.0),
    ],
)
def test_runs_that_differ_in_this_stand_together(path, value):
    assert len(settings.groups([made(), made("suffix", {path: value})])) == 1


def test_failed_run_stands_with_those_it_was_run_beside(real_runs):
    assert [len(group) for group in settings.groups(real_runs)] == [2]
    assert [len(group) for group in settings.groups([made(), failed()])] == [2]


def test_runs_are_ordered_by_speedup_and_failed_ones_come_last():
    runs = [failed(), made("b", {"metrics.speedup": 2.0}), made("none", {"metrics.speedup": None}), made("a")]
    assert [run_json["drafter"]["name"] for run_json in tables.in_order(runs)] == ["none", "a", "b", "broken"]


# what a run is called


def trained(weights, **options):
    return made(changes={"drafter.files": {"model.safetensors": weights}}, **options)


@pytest.mark.parametrize(
    ("runs", "called"),
    [
        ([made(max_n=2)], ["ngram"]),
        ([made(max_n=2), made("suffix", depth=8)], ["ngram", "suffix"]),
        ([made(max_n=2, min_n=1), made(max_n=4, min_n=1)], ["ngram max_n=2", "ngram max_n=4"]),
        ([made(max_n=2), made(max_n=2, changes={"drafter.k": 8})], ["ngram", "ngram"]),
        ([made(max_n=2), made(max_n=4, changes={"drafter.k": 8})], ["ngram max_n=2", "ngram max_n=4"]),
        ([made(), made(match="first")], ["ngram", "ngram match=first"]),
        ([trained("a"), trained("b"), trained("a")], [f"ngram files {end}" for end in ("b2990b", "877a5a", "b2990b")]),
        ([trained("a"), made(changes={"drafter.files": None}), made()], ["ngram", "ngram", "ngram"]),
        ([trained("a", max_n=2), trained("b", max_n=4)], ["ngram max_n=2", "ngram max_n=4"]),
    ],
    ids=[
        *("alone", "other names", "other options", "other k", "other k and options", "more options"),
        *("trained anew", "no files", "other files and options"),
    ],
)
def test_runs_are_called_by_name_and_by_what_tells_them_apart(runs, called):
    assert tables.labels(runs) == called


def test_every_sampling_option_that_is_not_neutral_is_in_the_title():
    law = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}
    said = settings.of(made(changes={"config.sampling": law}))
    assert "temperature 0.7, top_k 40, top_p 0.9, min_p 0.05, repetition_penalty 1.1" in said
    assert "greedy" in settings.of(made())


def test_title_counts_the_prompts_even_if_the_first_run_failed():
    assert "16 prompts of builtin" in settings.title([failed(), made()])
    assert "builtin" in settings.title([failed()])


# the cells of a row


@pytest.mark.parametrize(
    ("lossless", "said"),
    [
        (EQUAL, "equal 16/16"),
        ({**EQUAL, "verdict": "near-tie", "equal": 13, "near_ties": 3}, "near-tie 3/16"),
        ({**EQUAL, "verdict": "mismatch", "equal": 13, "near_ties": 1, "mismatches": 2}, "MISMATCH 2/16"),
        ({"verdict": "law", "prompts": 16, "equal": 3, "p_value": 0.4321, "ruled_out": 0}, "by law, p=0.43"),
        ({"verdict": "mismatch", "prompts": 16, "equal": 3, "p_value": 2e-8, "ruled_out": 0}, "MISMATCH, p=2e-08"),
        (
            {"verdict": "mismatch", "prompts": 16, "equal": 3, "p_value": 0.5, "ruled_out": 2},
            "MISMATCH, impossible tokens",
        ),
        ({"verdict": "untested", "prompts": 16, "equal": 3, "p_value": None, "ruled_out": 0}, "untested"),
    ],
)
def test_verdict_is_said_with_its_count(lossless, said):
    assert tables.row(made(changes={"metrics.lossless": lossless}), "ngram")[-1] == said


def test_row_holds_each_number_under_its_column():
    row = dict(zip(tables.COLUMNS, tables.row(made(), "ngram"), strict=True))
    assert row == {
        "drafter": "ngram",
        "k": "4",
        "tokens/pass": "1.52",
        "acceptance": "34%",
        "tokens/s": "43.2",
        "plain": "30.1",
        "speedup": "1.44x",
        "95 % CI": "1.21–1.71",
        "lossless": "equal 16/16",
    }


def test_number_that_there_is_not_is_a_dash():
    nothing = {**dict.fromkeys(NUMBERS), "lossless": EQUAL}
    assert tables.row(made(changes={"metrics": nothing}), "none") == ["none", "4", *["–"] * 6, "equal 16/16"]


def test_zero_is_no_dash():
    assert tables.row(made(changes={"metrics.acceptance_rate": 0.0, "metrics.speedup": 0.0}), "x")[3:7:3] == [
        "0%",
        "0.00x",
    ]


def test_failed_run_has_a_row_of_dashes():
    assert tables.row(failed(), "broken") == ["broken", "4", *["–"] * 6, "failed"]


# for documents


def cells(line):
    return re.split(r"(?<!\\)\|", line)[1:-1]


def test_markdown_rows_have_a_cell_for_every_column(real_runs):
    for runs in ([made("a|b"), made(max_n=1), made(max_n=2), failed("bro|ken")], real_runs):
        lines = [line for line in tables.markdown(runs).splitlines() if line.startswith("|")]
        assert len(lines) == 2 * (2 + len(runs))  # numbers, and details
        first, second = lines[: len(lines) // 2], lines[len(lines) // 2 :]
        assert {len(cells(line)) for line in first} == {len(tables.COLUMNS)}
        assert {len(cells(line)) for line in second} == {len(tables.DETAILS)}


def test_markdown_escapes_a_bar_in_a_name():
    assert r"| a\|b |" in tables.markdown([made("a|b")])


def test_markdown_says_where_its_numbers_come_from():
    text = tables.markdown([made("ngram"), made("suffix", {"provenance.started": "2026-02-03T00:00:00+00:00"})])
    assert "A Processor, 2 threads; torch 2.11; commit 0123456789; 2026-01-02 to 2026-02-03" in text
    assert "runs id-of-ngram, id-of-suffix." in text
    assert text.startswith("tiny · float32 on cpu · 16 prompts of builtin · greedy · 64 new tokens · batch 1\n")


def test_markdown_names_the_gpu_where_there_is_one():
    text = tables.markdown([made(changes={"provenance.machine.gpu": "A GPU", "provenance.git": None})])
    assert "A GPU; torch 2.11; specbench 0.1" in text


def test_markdown_gives_the_reason_of_a_failed_run_below_the_table(real_runs):
    for runs, name in (([made(), failed()], "broken"), (real_runs, "breaks")):
        lines = tables.markdown(runs).splitlines()
        reason = lines.index(f"{name} failed: ArithmeticError: made of cheese")
        assert lines[reason - 1] == ""  # or it would be a row
        assert reason > max(i for i, line in enumerate(lines) if line.startswith("|"))


# for the terminal


def printed(renderable, width=80):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(renderable)
    return console.file.getvalue()


LARGE = {"decode_tokens_per_s": 12345.6, "baseline_decode_tokens_per_s": 10234.5, "acceptance_rate": 1.0}
WIDE = {**NUMBERS, **LARGE, "tokens_per_pass": 17.00, "speedup": 12.34, "speedup_ci95": [10.12, 14.56]}
WIDE_VERDICT = {**EQUAL, "verdict": "near-tie", "near_ties": 480, "prompts": 480}


@pytest.mark.parametrize(
    "runs",
    [
        [made()],
        [made(min_n=1, max_n=8, match="first"), made(min_n=2, max_n=4, match="most_frequent"), failed()],
        [made("a_drafter_of_some_length", {"metrics": {**WIDE, "lossless": WIDE_VERDICT}, "drafter.k": 16})],
    ],
    ids=["one", "options", "wide"],
)
def test_terminal_table_fits_80_columns_with_its_numbers_whole(runs):
    text = printed(tables.terminal(runs))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for run_json, label in zip(runs, tables.labels(runs), strict=True):
        for cell in tables.row(run_json, label)[1:-1]:
            assert cell in text


def test_terminal_table_of_a_fast_run_breaks_no_word():
    text = printed(tables.terminal([made("small_lm", {"metrics": {**WIDE, "lossless": EQUAL}, "drafter.k": 16})]))
    assert [word for word in ("small_lm", *tables.COLUMNS) if word not in text] == []


def test_terminal_table_of_categories_fits_80_columns(real_runs):
    for run_json in (made(), made(changes={"by_category": {"question_answering": WIDE}}), real_runs[0]):
        text = printed(tables.terminal_by_category(run_json))
        assert "…" not in text
        assert all(category in text for category in run_json["by_category"])


# scripts


def script(name, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)


TABLES = ["table.md", *(f"{name}.{form}" for name in ("comparison", "categories") for form in ("md", "csv", "tex"))]
FIGURES = [
    f"{kind}.{form}" for kind in ("speedup", "acceptance_by_position", "accepted_lengths") for form in ("png", "pdf")
]


@pytest.mark.parametrize(("name", "files"), [("make_tables.py", TABLES), ("make_figures.py", FIGURES)])
def test_script_writes_its_files_and_prints_their_paths(real, tmp_path, name, files):
    done = script(name, real, "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [str(tmp_path / "out" / file) for file in files]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(files)
    assert min((tmp_path / "out" / file).stat().st_size for file in files) > 200


@pytest.mark.parametrize("name", ["make_tables.py", "make_figures.py"])
def test_script_says_what_is_wrong_with_an_empty_folder(tmp_path, name):
    done = script(name, tmp_path, "--out", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr == f"{name[:-3]}: no records of runs in {tmp_path}; run python -m specbench first\n"
    assert not (tmp_path / "out").exists()


# progress and memory


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_shown_on_a_terminal_alone(terminal):
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal)
    arm = Arm("ngram", NGram(), 2)
    with progress.show(console, arms=2, turns=3) as advance:
        for number, reason in enumerate([None, "length"]):
            advance(arm, Step(number, 0.5, False, [0], [[]], [0], [0], [[7]], [reason]))
    said = console.file.getvalue()
    assert ("1/6" in said and "ngram" in said) if terminal else said == ""


def can_be_reset():
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return True


needs_reset = pytest.mark.skipif(not can_be_reset(), reason="the peak of the process cannot be reset here")
SIZE = 200 * 10**6


def peak(size):
    with PeakMemory(torch.device("cpu")) as memory:
        torch.ones(size, dtype=torch.uint8)  # dropped at once
    return memory.peak_bytes


@needs_reset
def test_peak_memory_sees_what_was_allocated_and_dropped_inside():
    before = peak(1)
    assert 0.95 * SIZE < peak(SIZE) - before < 1.5 * SIZE


@needs_reset
def test_peak_memory_does_not_see_what_was_dropped_before():
    before = peak(1)
    torch.ones(SIZE, dtype=torch.uint8)
    assert peak(1) - before < 0.5 * SIZE


def test_peak_memory_is_known_even_after_an_error():
    memory = PeakMemory(torch.device("cpu"))
    with pytest.raises(ArithmeticError), memory:
        raise ArithmeticError
    assert memory.peak_bytes > 0


# what is to be doubted, and why a speedup is what it is


def test_flags_name_the_drafters_they_are_about_unless_that_is_all():
    busy = {"flag": "busy-machine", "message": "others were at work"}
    odd = {"flag": "unpredicted", "message": "measured +20%"}
    one, other = made("ngram"), made("eagle")
    one["flags"], other["flags"] = [busy, odd], [busy]
    assert tables.flags([one, other]) == [
        "busy-machine: others were at work",
        "unpredicted (ngram k=4): measured +20%",
    ]
    assert "- unpredicted (ngram k=4): measured +20%.\n" in tables.markdown([one, other])


def test_details_hold_each_number_under_its_column():
    cells = dict(zip(tables.DETAILS, tables.detail(made(), "ngram"), strict=True))
    assert cells == {
        "drafter": "ngram",
        "k": "4",
        "tokens/pass 95 % CI": "1.40–1.66",
        "accepted up to position": ".30 .15 – .00",
        "draft / verify / accept / rest": "10 / 85 / 3 / 2 %",
        "predicted": "1.50x",
        "measured": "1.44x (-4%)",
        "bound": "4.20x",
        "pays from": "6%",
        "best k": "3",
    }


def test_details_of_what_was_not_profiled_or_failed_are_dashes():
    bare = made(changes={"model": None})
    assert tables.detail(bare, "ngram")[4:] == ["–", "–", "1.44x", "–", "–", "–"]
    failed = made()
    failed |= {"status": "failed", "error": "RunError: no"}
    for name in ("metrics", "model"):
        del failed[name]
    assert tables.detail(failed, "ngram")[2:] == ["–"] * 8


def test_markdown_has_the_details_below_the_table():
    text = tables.markdown([made()])
    assert text.index("| drafter | k | tokens/pass |") < text.index("| drafter | k | tokens/pass 95 % CI |")
    assert "| ngram | 4 | 1.40–1.66 | .30 .15 – .00 |" in text
