"""The same acceptance on another machine."""

import json
from pathlib import Path

import pytest

from specbench import record, what_if
from specbench.prediction import tokens_per_pass

HERE = {
    "plain_seconds": 0.020,
    "rest_seconds": 0.0,
    "pass_seconds": {"1": 0.020, "2": 0.021, "5": 0.025},
    "draft_seconds": {"1": 0.002, "4": 0.008},
}


@pytest.fixture
def run(tmp_path) -> Path:
    """Each of 16 rounds drafted 4 tokens, of which 3 were kept on average: 4 tokens a round."""
    histogram = [2, 0, 2, 4, 8]
    assert tokens_per_pass(what_if.survival(histogram), 4) == 4
    made = {
        "id": "one",
        "status": "ok",
        "model": HERE,
        "target": {"name": "tiny", "dtype": "bfloat16"},
        "drafter": {"name": "eagle", "k": 4},
        "flags": [{"flag": "busy-machine", "message": "it was busy"}],
        "config": {"batch_size": 1, "drafter": {}},
        "metrics": {"accepted_length_histogram": histogram, "lossless": {"verdict": "mismatch"}},
    }
    return record.write(tmp_path, made)


@pytest.fixture
def curve(tmp_path) -> Path:
    """A machine ten times as fast, on which a pass of five tokens costs what one of one does."""
    points = [{"batch": 1, "tokens": n, "cached": 8, "seconds": 0.002} for n in (1, 2, 5)]
    points += [{"batch": 8, "tokens": n, "cached": 8, "seconds": 0.002 * n} for n in (1, 5)]
    path = tmp_path / "curve.json"
    target = {"name": "tiny", "dtype": "bfloat16", "device": "cuda"}
    path.write_text(json.dumps({"schema_version": 1, "target": target, "cached": 8, "points": points}))
    return path


def said(capsys) -> str:
    found = capsys.readouterr()
    return " ".join((found.out + found.err).split())


def test_the_textbook_case_on_this_machine_and_the_next(run, curve, capsys):
    """2.4x here, by 20 ms a plain token, 2 ms a draft and 25 ms a pass of five; there the pass is free as well."""
    here = what_if.costs_of(record.read(run))
    assert 4 * here.plain / here.round(4) == pytest.approx(2.42, abs=0.01)
    assert what_if.main([str(run), str(curve)]) == 0
    text = said(capsys)
    assert "eagle for tiny · bfloat16 on cuda · batch 1" in text
    assert f"4 4.00 {4 * 0.002 / (0.0008 + 0.002):.2f}x" in text
    assert "Best draft length of these: 4." in text
    assert "k=2 cannot be told: the curve has no pass over 3 tokens" in text
    assert "busy-machine: it was busy" in text
    assert "not shown to be lossless" in text


def test_every_batch_size_of_the_curve_stands_beside_it(run, curve, capsys):
    assert what_if.main([str(run), str(curve)]) == 0
    text = said(capsys)
    one, eight = 4 * 0.002 / (0.0008 + 0.002), 4 * 0.002 / (0.0008 + 0.010)
    assert "k batch 1 batch 8" in text
    assert f"4 {one:.2f}x {eight:.2f}x" in text
    assert "– 4" in text  # of one draft at batch 8, whose pass over two tokens was not measured


def test_at_a_batch_that_fills_the_machine_it_does_not_pay(run, curve, capsys):
    assert what_if.main([str(run), str(curve), "--batch-size=8"]) == 0
    text = said(capsys)
    assert f"4 4.00 {4 * 0.002 / (0.0008 + 0.010):.2f}x" in text
    assert "Best draft length of these: 0." in text


def test_the_price_of_a_draft_there_can_be_said(run, curve, capsys):
    assert what_if.main([str(run), str(curve), "--draft-cost=0.5"]) == 0
    assert f"4 4.00 {4 * 0.002 / (4 * 0.001 + 0.002):.2f}x" in said(capsys)


def test_a_curve_in_another_precision_is_said_to_be_of_one(run, curve, capsys):
    assert what_if.main([str(run), str(curve)]) == 0
    assert "acceptance may differ" not in said(capsys)
    curve.write_text(curve.read_text().replace("bfloat16", "float16"))
    assert what_if.main([str(run), str(curve)]) == 0
    assert "Note: the run was in bfloat16; acceptance may differ." in said(capsys)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--batch-size=3"], "batch_size=3 was not measured on the other machine; it has 1, 8"),
        (["--draft-cost=-1"], "--draft-cost=-1.0 is no time"),
    ],
)
def test_what_cannot_be_told_is_refused(run, curve, arguments, named, capsys):
    assert what_if.main([str(run), str(curve), *arguments]) == 2
    assert named in said(capsys)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "is no verify-cost curve"),
        ("[]", "is no verify-cost curve"),
        ('{"schema_version": 1}', "is no verify-cost curve"),
        ('{"schema_version": 0, "points": [1], "cached": 1, "target": {"name": "tiny"}}', "another schema version"),
        (
            '{"schema_version": 1, "points": [1], "cached": 1, "target": {"name": "other"}}',
            "the curve is of other, and the run of tiny",
        ),
    ],
)
def test_a_file_that_is_no_curve_of_the_target_is_refused(run, tmp_path, text, named, capsys):
    (tmp_path / "wrong.json").write_text(text)
    assert what_if.main([str(run), str(tmp_path / "wrong.json")]) == 2
    assert named in said(capsys)


def test_a_curve_that_is_not_there_is_refused(run, tmp_path, capsys):
    assert what_if.main([str(run), str(tmp_path / "none.json")]) == 2
    assert "is no verify-cost curve" in said(capsys)


def test_a_run_without_a_profile_says_how_to_get_one(run, curve, capsys):
    path = run / record.RUN
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": None}))
    assert what_if.main([str(run), str(curve)]) == 2
    assert "run it again with profile=8" in said(capsys)
