"""Tables for documents: what stands in them, which is bold, and how it is written."""

import re
import shutil
import subprocess

import pandas as pd
import pytest
from test_output import EQUAL, NUMBERS, ROOT, failed, made, script

from specbench import record, sheets, tables, typeset

LOSSY = {**EQUAL, "verdict": "mismatch", "equal": 14, "mismatches": 2}
UNTESTED = {"verdict": "untested", "prompts": 16, "equal": 3, "p_value": None, "ruled_out": 0}


def measured(speedup, limits=None, **more):
    """Changes that make a run of this speedup."""
    return {"metrics.speedup": speedup, "metrics.speedup_ci95": limits, **more}


def document(name, runs):
    return {found.name: found for found in sheets.documents(runs)}[name]


def column(sheet, head):
    """Cells by the name of the row."""
    place = sheet.columns.index(head)
    return {row[0].text: row[place] for row in sheet.rows}


def text(cells):
    return {name: cell.text for name, cell in cells.items()}


def bold(cells):
    return {name for name, cell in cells.items() if cell.bold}


# which are the best


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ([(1.0, [0.9, 1.1]), (2.0, [1.9, 2.1])], [False, True]),
        ([(1.0, [0.9, 1.1]), (2.0, [1.1, 2.9])], [True, True]),  # they touch
        ([(1.0, [0.9, 1.1]), (2.0, [1.11, 2.9])], [False, True]),
        ([(1.0, None), (2.0, [1.5, 2.5])], [False, True]),
        ([(1.0, [0.5, 3.5]), (2.0, None)], [False, False]),
        ([(None, None), (1.0, [0.9, 1.1])], [False, True]),
        ([(None, None)], [False]),
        ([], []),
        ([(2.0, [1.9, 2.1]), (1.5, [2.2, 2.3])], [True, False]),  # an interval beside its value does not overlap
    ],
)
def test_best_are_the_highest_and_what_cannot_be_told_from_it(found, chosen):
    assert sheets.best(found) == chosen


def test_bold_are_the_best_of_the_lossless_methods():
    runs = [
        made("a", measured(1.2, [1.1, 1.3])),
        made("b", measured(1.4, [1.3, 1.6])),
        made("c", measured(1.5, [1.35, 1.7])),
        made("law", measured(1.5, [1.35, 1.7], **{"metrics.lossless": {**UNTESTED, "verdict": "law", "p_value": 0.5}})),
        made("lossy", measured(3.0, [2.9, 3.1], **{"metrics.lossless": LOSSY})),
        made("hasty", measured(3.0, [2.9, 3.1], **{"metrics.lossless": UNTESTED})),
        made("oracle", measured(4.0, [3.9, 4.1], needs_reference=True)),
        failed(),
    ]
    (sheet,) = document("comparison", runs).sheets
    assert bold(column(sheet, "speedup (×)")) == {"b", "c", "law"}
    assert text(column(sheet, "speedup (×)"))["c"] == "1.50"
    assert column(sheet, "speedup (×)")["c"].limits == "1.35–1.70"
    assert set(column(sheet, "k")) == {"a", "b", "c", "law", "lossy†", "hasty†", "oracle‡", "broken"}


def test_lossy_bound_and_failed_runs_are_explained_below():
    runs = [
        made("lossy", {"metrics.lossless": LOSSY}),
        made("hasty", {"metrics.lossless": UNTESTED}),
        made("oracle", {"needs_reference": True}),
        failed(),
    ]
    for name in ("comparison", "categories"):
        for sheet in document(name, runs).sheets:
            assert "† lossy k=4 is not shown to be lossless: MISMATCH 2/16." in sheet.notes
            assert "† hasty k=4 is not shown to be lossless: untested." in sheet.notes
            (bound,) = [note for note in sheet.notes if note.startswith("‡")]
            assert bound.startswith("‡ oracle: a bound and no method")
            assert "broken k=4 failed: ArithmeticError: made of cheese" in sheet.notes
            assert sheets.NO_BOLD in sheet.notes
            assert sheets.BOLD_IS not in sheet.notes


def test_flags_are_named_with_whom_they_are_about():
    busy, odd = {"flag": "busy-machine", "message": "x"}, {"flag": "unpredicted", "message": "y"}
    runs = [made("a", {"flags": [busy, odd]}), made("b", {"flags": [busy]})]
    (sheet,) = document("comparison", runs).sheets
    assert "Flags: busy-machine; unpredicted (a k=4)." in sheet.notes


# what stands where


def test_comparison_holds_each_number_under_its_column():
    (sheet,) = document("comparison", [made(), failed()]).sheets
    row, broken = sheet.rows
    assert dict(zip(sheet.columns, (cell.text for cell in row), strict=True)) == {
        "drafter": "ngram",
        "k": "4",
        "tokens/pass": "1.52",
        "acceptance": "34%",
        "tokens/s": "43.2",
        "plain": "30.1",
        "speedup (×)": "1.44",
        "predicted (×)": "1.50",
        "bound (×)": "4.20",
        "lossless": "equal 16/16",
    }
    assert [cell.text for cell in broken] == ["broken", "4", *["–"] * 7, "failed"]
    assert sheet.ids == ("id-of-ngram", "id-of-broken")
    assert sheet.setting == "tiny · float32 on cpu · 16 prompts of builtin · greedy · 64 new tokens · batch 1"


def test_run_that_was_not_profiled_has_no_prediction():
    (sheet,) = document("comparison", [made(changes={"model": None})]).sheets
    assert column(sheet, "predicted (×)")["ngram"].text == column(sheet, "bound (×)")["ngram"].text == "–"


def test_categories_have_a_column_each_and_one_for_all():
    chat = {**NUMBERS, "speedup": 1.9, "speedup_ci95": None, "tokens_per_pass": 3.0}
    mixed = {**NUMBERS, "speedup": None, "speedup_ci95": None}
    runs = [
        made("a", {"by_category.chat": chat}),
        made("b", {"by_category": {"code": mixed, "maths": NUMBERS}}),
        failed(),
    ]
    speedup, tokens = document("categories", runs).sheets
    assert speedup.columns == tokens.columns == ("drafter", "chat", "code", "maths", "all prompts")
    assert text(column(speedup, "chat")) == {"a k=4": "1.90", "b k=4": "–", "broken k=4": "–"}
    assert text(column(speedup, "code")) == {"a k=4": "1.44", "b k=4": "–", "broken k=4": "–"}
    assert text(column(speedup, "all prompts")) == {"a k=4": "1.44", "b k=4": "1.44", "broken k=4": "failed"}
    assert text(column(tokens, "chat"))["a k=4"] == "3.00"
    assert bold(column(speedup, "chat")) == set()  # no interval
    assert bold(column(speedup, "code")) == {"a k=4"}
    assert bold(column(speedup, "maths")) == {"b k=4"}


def run_of(name, k=4, batch=1, speedup=1.0, **options):
    changes = {
        "id": f"{name}-{k}-{batch}-{'-'.join(map(str, options.values()))}",
        "drafter.k": k,
        "config.batch_size": batch,
        **measured(speedup, [speedup - 0.05, speedup + 0.05]),
    }
    return made(name, changes, **options)


def test_by_k_has_a_row_per_drafter_and_a_column_per_k():
    runs = [
        *(run_of("ngram", k, speedup=speedup) for k, speedup in ((2, 1.2), (4, 1.5), (7, 1.3))),
        *(run_of("suffix", k, speedup=speedup) for k, speedup in ((2, 1.22), (4, 1.4))),
        run_of("oracle", 4, speedup=4.0),  # at one k alone
        failed("suffix", changes={"drafter.k": 7, "id": "lost"}),
    ]
    speedup, tokens = document("by_k", runs).sheets
    assert speedup.columns == tokens.columns == ("drafter", "k=2", "k=4", "k=7")
    assert text(column(speedup, "k=2")) == {"ngram": "1.20", "suffix": "1.22"}
    assert text(column(speedup, "k=4")) == {"ngram": "1.50", "suffix": "1.40"}
    assert text(column(speedup, "k=7")) == {"ngram": "1.30", "suffix": "failed"}
    assert bold(column(speedup, "k=2")) == {"ngram", "suffix"}
    assert bold(column(speedup, "k=4")) == {"ngram", "suffix"}  # they touch
    assert "suffix k=7 failed: ArithmeticError: made of cheese" in speedup.notes
    assert set(speedup.ids) == {run["id"] for run in runs} - {"oracle-4-1-"}


def test_by_k_keeps_options_apart():
    runs = [run_of("ngram", k, max_n=n, speedup=k + n / 10) for k in (2, 4) for n in (1, 3)]
    runs.append(run_of("ngram", 7, max_n=5))
    speedup, _ = document("by_k", runs).sheets
    assert text(column(speedup, "k=2")) == {"ngram max_n=1": "2.10", "ngram max_n=3": "2.30"}
    assert text(column(speedup, "k=4")) == {"ngram max_n=1": "4.10", "ngram max_n=3": "4.30"}
    assert "k=7" not in speedup.columns  # that one was run at no other k


def test_options_are_named_even_where_they_were_run_at_different_k():
    runs = [run_of("ngram", k, max_n=n) for k, n in ((2, 1), (4, 1), (4, 3), (7, 3))]
    speedup, _ = document("by_k", sorted(runs, key=lambda run: run["drafter"]["k"])).sheets
    assert [[cell.text for cell in row] for row in speedup.rows] == [
        ["ngram max_n=1", "1.00", "1.00", "–"],
        ["ngram max_n=3", "–", "1.00", "1.00"],
    ]


def test_lossy_cell_is_marked_where_it_stands():
    runs = [run_of("eagle", 2), run_of("eagle", 4)]
    runs[1]["metrics"]["lossless"] = LOSSY
    speedup, _ = document("by_k", runs).sheets
    assert column(speedup, "k=2")["eagle"].text == "1.00"
    assert column(speedup, "k=4")["eagle"].text == "1.00†"
    assert not column(speedup, "k=4")["eagle"].bold
    assert "† eagle k=4 is not shown to be lossless: MISMATCH 2/16." in speedup.notes


def test_run_that_is_there_twice_is_shown_twice():
    runs = [run_of("ngram", 2), run_of("ngram", 4), run_of("ngram", 4, speedup=1.7)]
    speedup, _ = document("by_k", runs).sheets
    assert [[cell.text for cell in row] for row in speedup.rows] == [["ngram", "1.00", "1.00"], ["ngram", "–", "1.70"]]
    assert len(document("by_k", runs).numbers) == 3


def test_by_batch_has_a_row_per_drafter_and_k():
    runs = [run_of("ngram", k, batch, k / batch) for k in (2, 4) for batch in (1, 8)]
    runs.append(run_of("suffix", 4, 1))
    speedup, _ = document("by_batch", runs).sheets
    assert speedup.columns == ("drafter", "batch 1", "batch 8")
    assert text(column(speedup, "batch 8")) == {"ngram k=2": "0.25", "ngram k=4": "0.50"}
    assert speedup.setting == "tiny · float32 on cpu · 16 prompts of builtin · greedy · 64 new tokens"
    assert [found.name for found in sheets.documents(runs)] == ["comparison", "categories", "by_k", "by_batch"]


def test_there_is_no_table_by_what_does_not_differ():
    assert [found.name for found in sheets.documents([made(), made("suffix", {"drafter.k": 8})])] == [
        "comparison",
        "categories",
    ]
    assert [found.name for found in sheets.documents([failed()])] == ["comparison"]


@pytest.mark.parametrize("path", ["target.dtype", "dataset.sha256", "provenance.code_sha256", "config.seed"])
def test_runs_of_two_settings_never_share_a_table(path):
    runs = [run_of("ngram", k, batch) for k in (2, 4) for batch in (1, 8)]
    others = [run_of("suffix", k, batch) for k in (2, 4) for batch in (1, 8)]
    for other in others:
        *above, last = path.split(".")
        place = other
        for key in above:
            place = place[key]
        place[last] = 1
    for found in sheets.documents([*runs, *others]):
        for sheet in found.sheets:
            assert len({id_.split("-")[0] for id_ in sheet.ids}) == 1
        assert (found.numbers.groupby("group")["drafter"].nunique() == 1).all()
        assert found.numbers["group"].nunique() == (2 if found.name == "by_batch" else 4)


# the numbers


def test_numbers_are_as_the_record_has_them():
    exact = made(changes=measured(1.5199666708917614, [1.2011713, 2.0248685]))
    found = document("comparison", [exact, failed()]).numbers
    assert found["id"].tolist() == ["id-of-ngram", "id-of-broken"]
    assert found["speedup"][0] == 1.5199666708917614
    assert (found["speedup_low"][0], found["speedup_high"][0]) == (1.2011713, 2.0248685)
    assert found["predicted_speedup"][0] == 1.5
    assert (found["status"][1], found["error"][1]) == ("failed", "ArithmeticError: made of cheese")
    assert found["speedup"].isna().tolist() == [False, True]


def test_numbers_of_a_category_are_its_own():
    chat = {**NUMBERS, "speedup": 1.9, "speedup_ci95": None}
    found = document("categories", [made(changes={"by_category.chat": chat})]).numbers.set_index("category")
    assert found.index.tolist() == ["chat", "code", "all prompts"]
    assert found["speedup"].tolist() == [1.9, 1.44, 1.44]
    assert found["speedup_low"].isna().tolist() == [True, False, False]
    assert set(found["id"]) == {"id-of-ngram"}
    assert "predicted_speedup" not in found  # it is of all prompts


# how it is written


NASTY = "a_b|c & 50% <x> {y} $z #1 ~^\\"


def test_markdown_is_a_table_with_bold_and_small_type():
    runs = [run_of("ngram", 2, speedup=1.2), run_of("ngram", 4, speedup=1.5), run_of("suffix", 4, speedup=1.1)]
    said = typeset.markdown(document("comparison", runs))
    assert "| ngram | 4 | **1.52** <small>1.40–1.66</small> | 34% | 43.2 | 30.1 | **1.50** <small>" in said
    by_k = typeset.markdown(document("by_k", runs)).splitlines()
    assert by_k[0].startswith("Speedup over plain decoding (×) by draft length: tiny · float32 on cpu")
    assert by_k[2:5] == [
        "| drafter | k=2 | k=4 |",
        "|---|---:|---:|",
        "| ngram | **1.20** <small>1.15–1.25</small> | **1.50** <small>1.45–1.55</small> |",
    ]
    assert "- Runs ngram-2-1-, ngram-4-1-." in by_k
    assert "- A Processor, 2 threads; torch 2.11; commit 0123456789; 2026-01-02." in by_k


def test_markdown_takes_no_name_for_markup():
    bad = failed(NASTY, changes={"error": "not to be used"})
    bad["error"] = "ValueError: <class 'int'>\nis *bad*"
    said = typeset.markdown(document("comparison", [made(NASTY), bad]))
    for line in (line for line in said.splitlines() if line.startswith("|")):
        assert len(re.split(r"(?<!\\)\|", line)) == len(sheets.COMPARED) + 2
    assert r"failed: ValueError: \<class 'int'> is \*bad\*" in said
    assert r"a_b\|c & 50% \<x>" in said


def test_latex_is_a_booktabs_table_with_bold_and_small_type():
    runs = [run_of("small_lm", 2, speedup=1.2), run_of("small_lm", 4, speedup=1.5)]
    said = typeset.latex(document("by_k", runs))
    assert said.startswith("% \\usepackage{booktabs,graphicx} in the preamble.")
    assert said.count(r"\begin{table}") == said.count(r"\end{table}") == 2
    assert "% runs small_lm-2-1- small_lm-4-1-\n" in said
    assert (
        "\\begin{tabular}{lrr}\n\\toprule\ndrafter & k=2 & k=4 \\\\\n\\midrule\n"
        "small\\_lm & \\textbf{1.20} {\\tiny 1.15\\textendash{}1.25} & "
        "\\textbf{1.50} {\\tiny 1.45\\textendash{}1.55} \\\\\n\\bottomrule\n"
    ) in said
    assert "\\caption{Speedup over plain decoding ($\\times$) by draft length: tiny $\\cdot$ float32 on cpu" in said
    assert "\\label{tab:by_k-1}" in said
    assert "\\label{tab:by_k-2}" in said


@pytest.mark.parametrize(
    ("plain", "written"),
    [
        ("small_lm", r"small\_lm"),
        ("34%", r"34\%"),
        ("a & b # $1 {c}", r"a \& b \# \$1 \{c\}"),
        ("~^\\", r"\textasciitilde{}\textasciicircum{}\textbackslash{}"),
        ("<a|b>", r"\textless{}a\textbar{}b\textgreater{}"),
        ("1 · 2 × 3–4 …", r"1 $\cdot$ 2 $\times$ 3\textendash{}4 \ldots{}"),
        ("lossy†", r"lossy\textsuperscript{\dag}"),
        ("--force ---x", r"-{}-force -{}-{}-x"),
        ("two\nlines", "two lines"),
    ],
)
def test_latex_takes_no_name_for_a_command(plain, written):
    assert typeset.tex(plain) == written


def test_latex_has_as_many_cells_in_every_row():
    bad = failed(NASTY)
    for found in sheets.documents([made(NASTY), made("b", {"metrics.lossless": LOSSY}), bad]):
        rows = [line for line in typeset.latex(found).splitlines() if line.endswith(r"\\")]
        assert len({len(re.split(r"(?<!\\)&", row)) for row in rows}) == 1
        assert typeset.latex(found).isascii()


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX here")
def test_latex_compiles(tmp_path):
    runs = [run_of(NASTY, k, batch) for k in (2, 4) for batch in (1, 8)]
    runs += [made("b", {"metrics.lossless": LOSSY}), failed(NASTY)]
    body = "\n".join(map(typeset.latex, sheets.documents(runs)))
    whole = f"\\documentclass{{article}}\n{typeset.PACKAGES}\n\\begin{{document}}\n{body}\\end{{document}}\n"
    (tmp_path / "a.tex").write_text(whole)
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "a.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


# the script


def store(folder, runs):
    for run_json in runs:
        record.write(folder, run_json)
    return folder


def kinds(*names):
    return {"table.md"} | {f"{n}{s}" for n in ("comparison", *names) for s in (".md", ".csv", ".tex")}


def test_script_writes_what_there_are_runs_for_and_removes_its_stale_files(tmp_path):
    several = store(tmp_path / "several", [run_of("ngram", k, batch) for k in (2, 4) for batch in (1, 8)])
    one = store(tmp_path / "one", [made()])
    out = tmp_path / "out"
    assert script("make_tables.py", several, "--out", out).stderr == ""
    assert {path.name for path in out.iterdir()} == kinds("categories", "by_k", "by_batch")
    (out / "mine.md").write_text("kept")
    done = script("make_tables.py", one, "--out", out)
    assert done.returncode == 0
    assert {path.name for path in out.iterdir()} == kinds("categories") | {"mine.md"}
    assert {line.split("/")[-1] for line in done.stdout.splitlines()} == kinds("categories")
    removed = [line.split(" removed ")[1].split(",")[0] for line in done.stderr.splitlines()]
    assert removed == [
        str(out / f"{name}{suffix}") for name in ("by_k", "by_batch") for suffix in (".md", ".csv", ".tex")
    ]


def test_script_keeps_what_there_is_when_it_cannot_read_the_runs(tmp_path):
    out = tmp_path / "out"
    script("make_tables.py", store(tmp_path / "one", [made()]), "--out", out)
    (tmp_path / "empty").mkdir()
    assert script("make_tables.py", tmp_path / "empty", "--out", out).returncode == 1
    assert {path.name for path in out.iterdir()} == kinds("categories")


def test_csv_that_the_script_writes_reads_back(tmp_path):
    runs = store(tmp_path / "runs", [run_of("ngram", 2), run_of("ngram", 4), failed()])
    script("make_tables.py", runs, "--out", tmp_path)
    found = pd.read_csv(tmp_path / "comparison.csv")
    assert found["id"].tolist() == ["ngram-2-1-", "ngram-4-1-", "id-of-broken"]
    assert found["speedup"].tolist()[:2] == [1.0, 1.0]
    assert pd.read_csv(tmp_path / "by_k.csv")["k"].tolist() == [2, 4]


def test_reference_table_is_made_of_the_reference_runs(tmp_path):
    folder = ROOT / "results/reference/quick"
    script("make_tables.py", folder, "--out", tmp_path)
    assert (tmp_path / "table.md").read_text() == (folder / "table.md").read_text()


def test_what_is_about_all_drafters_of_a_batch_size_is_said_so():
    runs = [
        {"drafter": {"k": k}, "config": {"batch_size": size}} for size in (1, 4) for k in (0, 4, 7)
    ]  # plain decoding is spared
    assert tables.about([1, 2], runs, "abcdef") == " (all drafters at batch size 1)"
    assert tables.about([0, 1, 2, 4], runs, "abcdef") == " (all at batch size 1, e)"
    assert tables.about([1, 4, 5], runs, "abcdef") == " (all drafters at batch size 4, b)"
    alike = [runs[0], runs[1], runs[2], runs[2]]  # of one batch size
    assert tables.about([1, 2, 3], alike, "abcd") == " (all drafters)"
    assert tables.about([1, 2], alike, "abcd") == " (b, c)"
    assert tables.about([0, 1, 2], alike, "abcd") == " (a, b, c)"
    assert tables.about([1, 2], alike[:3], "abc") == " (b, c)"  # two are named as shortly
