"""Many records at once: the frame of runs, all their steps, and the commands that list, show and export them."""

import io
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from test_output import failed, made

from specbench import metrics, record, results
from specbench.errors import ConfigError
from specbench.results import __main__ as results_main
from specbench.results import columns
from specbench.results.__main__ import main

REFERENCE = Path(__file__).parent.parent / "results/reference/quick"
STEPS = pd.DataFrame(
    {
        "unit": [0, 0, 1],
        "round": [0, 1, 0],
        "uid": ["a", "a", "b"],
        "tokens": [[1], [2, 3], [4]],
        "finish": [None, "length", None],
        "seconds": [0.5, 0.25, 0.125],
        "arm": ["method", "baseline", "method"],
    }
)


@pytest.fixture(autouse=True)
def said_by_the_log():
    """Lines of warning, wherever the command line has them sent."""
    logger, lines = logging.getLogger("specbench"), []
    before = logger.handlers, logger.level, logger.propagate
    catch = logging.Handler()
    catch.emit = lambda line: lines.append(line.getMessage())
    results.log.addHandler(catch)
    yield lines
    results.log.removeHandler(catch)
    logger.handlers, logger.level, logger.propagate = before


def put(folder, run_json, steps=STEPS):
    return record.write(folder, run_json, steps if run_json["status"] == "ok" else None)


def day(number):
    return {"provenance.started": f"2026-01-{number:02d}T00:00:00+00:00"}


@pytest.fixture
def home(tmp_path):
    """Three runs, of which one failed, at two depths."""
    home = tmp_path / "home"
    put(home, made("ngram", day(2)))
    put(home / "deep" / "er", made("suffix", {"drafter.k": 8, "metrics.speedup": 2.5, **day(3)}))
    put(home, failed("broken", changes=day(1)))
    return home


def rewrite(folder, **changes):
    path = folder / record.RUN
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# the frame of runs


def test_frame_has_a_row_for_every_run_with_what_its_record_says(home):
    found = results.frame([home]).set_index("id")
    assert sorted(found.index) == ["id-of-broken", "id-of-ngram", "id-of-suffix"]
    row = found.loc["id-of-suffix"]
    assert (row["drafter"], row["k"], row["speedup"], row["batch_size"]) == ("suffix", 8, 2.5, 1)
    assert (row["speedup_low"], row["speedup_high"]) == (1.21, 1.71)
    assert (row["tokens_per_pass_low"], row["tokens_per_pass_high"]) == (1.4, 1.66)
    assert (row["lossless"], row["lossless_equal"], row["lossless_prompts"]) == ("equal", 16, 16)
    assert (row["share_verify"], row["best_k"], row["break_even"]) == (0.85, 3, 0.061)
    assert row["started"] == pd.Timestamp("2026-01-03", tz="UTC")
    assert json.loads(row["drafter_options"]) == {"_target_": "drafters.suffix"}
    assert row["folder"] == str(home / "deep" / "er" / "id-of-suffix")


def test_failed_run_is_a_row_with_its_reason_and_no_numbers(home):
    row = results.frame([home]).set_index("id").loc["id-of-broken"]
    assert (row["status"], row["error"], row["k"]) == ("failed", "ArithmeticError: made of cheese", 4)
    for name in ("speedup", "speedup_low", "tokens_per_pass", "lossless", "rounds"):
        assert pd.isna(row[name])


def test_columns_have_their_types_even_where_nothing_has_a_value(home):
    for paths in ([home], [home / "id-of-broken"]):
        found = results.frame(paths)
        assert list(found.columns) == list(columns.COLUMNS)
        for name, (_, kind) in columns.COLUMNS.items():
            assert found[name].dtype == pd.Series(dtype=kind).dtype, name


def test_every_metric_of_one_number_is_a_column():
    lists = (
        "acceptance_by_position.joint",
        "acceptance_by_position.conditional",
        "accepted_length_histogram",
        "shares",
    )
    for name in (defined.removeprefix("model.") for defined in metrics.DEFINITIONS):
        if name.endswith("_ci95"):
            assert {name.replace("_ci95", "_low"), name.replace("_ci95", "_high")} <= set(columns.COLUMNS)
        else:
            assert (name in columns.COLUMNS) != (name in lists)


def test_every_path_of_a_column_is_in_a_real_record():
    seen = {name for run in results.runs([REFERENCE]) for name, (path, _) in columns.COLUMNS.items() if has(run, path)}
    assert set(columns.COLUMNS) - seen == {"lossless_p_value", "gpu"}  # of sampled text, and of other machines


def has(run, path):
    for key in path.split("."):
        if isinstance(run, list):
            return int(key) < len(run)
        if not isinstance(run, dict) or key not in run:
            return False
        run = run[key]
    return True


def test_flags_are_named_once_each():
    flags = [{"flag": name, "message": str(i)} for i, name in enumerate(["few-rounds", "untrained", "few-rounds"])]
    found = columns.flatten([made(changes={"flags": flags}), made()])
    assert found["flags"].tolist() == ["few-rounds, untrained", ""]


def test_run_that_is_named_twice_is_one_row(home):
    assert len(results.frame([home, home / "deep", home / "id-of-ngram", home / "deep" / ".."])) == 3


# what cannot be read


def test_what_cannot_be_read_is_left_out_by_name(home, tmp_path, said_by_the_log):
    put(tmp_path / "bad", made("old"))
    rewrite(tmp_path / "bad" / "id-of-old", schema_version=1)
    half = put(tmp_path / "bad", made("half"))
    (half / record.RUN).unlink()
    cut = put(tmp_path / "bad", made("cut"))
    (cut / record.RUN).write_text((cut / record.RUN).read_text()[:100])
    (tmp_path / "empty").mkdir()
    found = results.frame([home, tmp_path / "bad", tmp_path / "empty"])
    assert len(found) == 3
    assert len(said_by_the_log) == 4
    for line, *words in zip(
        sorted(said_by_the_log),
        (
            f"{tmp_path / 'bad' / 'id-of-cut' / record.RUN} is not JSON",
            f"{tmp_path / 'bad' / 'id-of-half'} holds no run.json",
            f"{tmp_path / 'bad' / 'id-of-old'} has schema version 1; this code reads 2",
            f"no records of runs in {tmp_path / 'empty'}",
        ),
        strict=True,
    ):
        assert line.startswith("left out: ")
        assert all(word in line for word in words)


def test_nothing_that_can_be_read_is_an_error_that_counts(tmp_path):
    for number in range(5):
        put(tmp_path, made(str(number)))
        rewrite(tmp_path / f"id-of-{number}", schema_version=1)
    with pytest.raises(ConfigError, match=r"no record can be read: .*id-of-0 has schema version 1.*; and 2 more$"):
        results.runs([tmp_path])
    with pytest.raises(ConfigError, match=r"^\S*id-of-0 has schema version 1; this code reads 2$"):
        results.runs([tmp_path / "id-of-0"])
    with pytest.raises(ConfigError, match=r"^no records of runs in \S*nowhere; run python -m specbench first$"):
        results.frame([tmp_path / "nowhere"])


# all raw steps


def test_steps_are_those_of_every_finished_run_under_its_id(home):
    found = results.steps([home])
    assert list(found.columns) == ["id", "folder", "unit", "round", "uid", "finish", "seconds", "arm"]  # no lists
    assert found["id"].value_counts().to_dict() == {"id-of-ngram": 3, "id-of-suffix": 3}
    for id_, rows in found.groupby("id", observed=True):
        assert Path(rows["folder"].iloc[0]).name == id_
        plain = rows.drop(columns=["id", "folder"]).reset_index(drop=True).astype({"uid": object, "arm": object})
        for name in ("unit", "round", "uid", "seconds", "arm"):
            assert plain[name].tolist() == STEPS[name].tolist()
        assert plain["finish"].astype(object).where(plain["finish"].notna(), None).tolist() == [None, "length", None]


def test_lists_are_read_when_asked_for(home):
    found = results.steps([home], columns=["tokens", "seconds"])
    assert list(found.columns) == ["id", "folder", "tokens", "seconds"]
    assert [list(tokens) for tokens in found["tokens"][:3]] == [[1], [2, 3], [4]]


def test_words_are_joined_even_where_a_run_has_none_or_others(home):
    put(home, made("third"), STEPS.assign(finish=None, uid=["z", "a", "y"]))
    found = results.steps([home])
    third = found[found["id"] == "id-of-third"]
    assert third["uid"].tolist() == ["z", "a", "y"]
    assert third["finish"].isna().all()
    assert found[found["id"] == "id-of-ngram"]["uid"].tolist() == ["a", "a", "b"]


def test_runs_of_one_id_in_two_folders_keep_their_own_steps(home, tmp_path):
    put(tmp_path / "again", made("ngram"), STEPS.assign(seconds=7.0))
    found = results.steps([home, tmp_path / "again"])
    again = found[found["folder"] == str(tmp_path / "again" / "id-of-ngram")]
    assert set(again["id"]) == {"id-of-ngram"}
    assert again["seconds"].tolist() == [7.0] * 3
    assert found["id"].value_counts()["id-of-ngram"] == 6


def test_reference_steps_are_read_as_pandas_reads_them():
    found = results.steps([REFERENCE])
    for folder in record.find([REFERENCE]):
        rows = found[found["folder"] == str(folder)].drop(columns=["id", "folder"]).reset_index(drop=True)
        expected = pd.read_parquet(folder / record.STEPS)[list(rows.columns)]
        pd.testing.assert_frame_equal(rows.astype(expected.dtypes.to_dict()), expected, check_dtype=False)


@pytest.mark.parametrize("harm", ["gone", "cut short"])
def test_steps_that_cannot_be_read_are_left_out_by_name(home, harm, said_by_the_log):
    path = home / "id-of-ngram" / record.STEPS
    content = path.read_bytes()
    path.unlink()
    if harm == "cut short":
        path.write_bytes(content[: len(content) // 2])
    assert set(results.steps([home])["id"]) == {"id-of-suffix"}
    assert [line for line in said_by_the_log if f"{path} cannot be read" in line] == said_by_the_log != []
    with pytest.raises(ConfigError, match=r"steps\.parquet cannot be read"):
        results.steps([home / "id-of-ngram"])


def test_steps_of_failed_runs_alone_are_refused(home):
    with pytest.raises(ConfigError, match=r"no run in \S*id-of-broken is finished"):
        results.steps([home / "id-of-broken"])


def test_column_that_there_is_not_is_refused_by_name(home):
    with pytest.raises(ConfigError, match=r"steps have no column secnds\. Did you mean 'seconds'\?"):
        results.steps([home], columns=["unit", "secnds"])


# the commands


def out_of(capsys):
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def refused(capsys, *arguments):
    """The one line of an error."""
    assert main(list(map(str, arguments))) == 2
    found = capsys.readouterr()
    assert found.out == ""
    (line,) = found.err.splitlines()
    return line


def listed(lines):
    return [line.split()[0] for line in lines if line.startswith("id-of-")]


def test_ls_has_a_line_for_each_run_newest_last(home, capsys):
    assert main(["ls", str(home)]) == 0
    lines = out_of(capsys)
    assert listed(lines) == ["id-of-broken", "id-of-ngram", "id-of-suffix"]
    assert "target tiny · dtype float32" in lines[0]
    assert lines[-3].split() == [
        *("id-of-ngram", "2026-01-02", "00:00", "ngram", "4", "1.52", "1.44x", "1.21–1.71", "equal")
    ]
    (reason,) = [line for line in lines if line.startswith("id-of-broken")]
    assert reason.rstrip().endswith("failed: ArithmeticError: made of cheese")


def test_ls_makes_a_column_of_what_differs(home, capsys):
    put(home, made("ngram", {"id": "id-of-batch", "config.batch_size": 8, **day(9)}))
    main(["ls", str(home)])
    lines = out_of(capsys)
    assert "batch_size" not in lines[0]
    assert "batch_size" in next(line for line in lines if "tokens/pass" in line)
    assert lines[-2].split()[5] == "8"


def test_reason_is_listed_whatever_is_in_it(tmp_path, capsys):
    put(tmp_path, failed() | {"error": "KeyError: [/red] [bold]x\nof 3"})
    assert main(["ls", str(tmp_path)]) == 0
    assert out_of(capsys)[-2].endswith("failed: KeyError: [/red] [bold]x of 3")


def test_ls_on_a_narrow_terminal_keeps_every_number_whole(home, monkeypatch):
    put(home, made("ngram", {"id": "id-of-other", "config.batch_size": 8, "config.seed": 123456, **day(9)}))
    narrow = Console(width=40, force_terminal=True, color_system=None, file=io.StringIO())
    monkeypatch.setattr(results_main.cli, "out", narrow)
    monkeypatch.setattr(results_main, "Console", lambda **how: Console(file=narrow.file, color_system=None, **how))
    assert main(["ls", str(home)]) == 0
    lines = {line.split()[0]: line.split()[3:] for line in narrow.file.getvalue().splitlines() if "id-of-" in line}
    assert lines["id-of-other"] == ["ngram", "4", "8", "123456", "1.52", "1.44x", "1.21–1.71", "equal"]
    assert lines["id-of-broken"] == ["broken", "4", "1", "0", "–", "–", "–", "failed:…"]


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        (["--drafter", "suffix"], ["id-of-suffix"]),
        (["--drafter", "suffix,ngram"], ["id-of-ngram", "id-of-suffix"]),
        (["--status", "failed"], ["id-of-broken"]),
        (["--k", "8"], ["id-of-suffix"]),
        (["--k", "4", "--status", "ok"], ["id-of-ngram"]),
        (["--temperature", "0", "--lossless", "equal"], ["id-of-ngram", "id-of-suffix"]),
    ],
)
def test_ls_filters(home, filters, left, capsys):
    assert main(["ls", str(home), *filters]) == 0
    assert listed(out_of(capsys)) == left


def test_ls_of_what_there_is_not_says_what_there_is(home, capsys):
    assert refused(capsys, "ls", home, "--drafter", "sufix") == (
        "specbench: --drafter sufix: no such run. Did you mean 'suffix'? Choices: broken, ngram, suffix."
    )
    assert "--batch-size 3: no such run. Choices: 1." in refused(capsys, "ls", home, "--batch-size", "3")
    assert "no run has k 8 and status failed" in refused(capsys, "ls", home, "--k", "8", "--status", "failed")


@pytest.mark.parametrize("command", [["ls"], ["show"], ["export", "--out", "all.csv"]])
def test_empty_folder_is_refused_in_one_line(tmp_path, command, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    said = refused(capsys, *command, "empty")
    assert said == "specbench: no records of runs in empty; run python -m specbench first"
    assert not (tmp_path / "all.csv").exists()


def test_ls_looks_into_results_by_itself(home, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home.rename(tmp_path / "results")
    assert main(["ls"]) == 0
    assert len(listed(out_of(capsys))) == 3


def test_what_is_left_out_is_said_and_the_rest_listed(home, capsys):
    rewrite(home / "id-of-ngram", schema_version=1)
    assert main(["ls", str(home)]) == 0
    found = capsys.readouterr()
    assert listed(map(str.strip, found.out.splitlines())) == ["id-of-broken", "id-of-suffix"]
    assert found.err == f"specbench: left out: {home / 'id-of-ngram'} has schema version 1; this code reads 2\n"


def test_show_says_all_that_a_record_does(capsys):
    (folder,) = (f for f in record.find([REFERENCE]) if record.read(f)["drafter"]["name"] == "suffix")
    assert main(["show", str(folder)]) == 0
    text = capsys.readouterr().out
    run_json = record.read(folder)
    words = text.split()
    assert text.startswith(f"suffix k=4 · run {run_json['id']} · ok · {folder}\n")
    assert [name for name in run_json["metrics"] if name.removesuffix("_ci95") not in text] == [
        "acceptance_by_position",  # under other words
        "accepted_length_histogram",
        "lossless",
    ]
    assert f"{run_json['metrics']['speedup']:.4g}" in words
    assert all(category in text for category in run_json["by_category"])
    assert all(f"{count:,}" in words for count in run_json["metrics"]["accepted_length_histogram"])
    assert all(flag["message"].split()[-1] in text for flag in run_json["flags"])
    assert run_json["provenance"]["git"]["commit"] in text
    assert run_json["provenance"]["packages"]["torch"] in text
    assert run_json["dataset"]["sha256"] in text
    assert "sampling.temperature" in text
    assert f"{run_json['model']['predicted_speedup']:.4g}" in words


def test_show_finds_a_run_by_the_beginning_of_its_id(capsys):
    (id_,) = (run["id"] for run in results.runs([REFERENCE]) if run["drafter"]["name"] == "oracle")
    assert main(["show", id_[:6], "--in", str(REFERENCE.parent)]) == 0
    assert f"oracle k=4 · run {id_}" in capsys.readouterr().out


def test_show_of_a_failed_run_says_why(tmp_path, capsys):
    origin = record.read(record.find([REFERENCE])[0])
    kept = {name: origin[name] for name in ("provenance", "wall_seconds", "machine_load")}
    folder = put(tmp_path, failed("broken") | kept)
    assert main(["show", str(folder)]) == 0
    assert "Failed: ArithmeticError: made of cheese" in capsys.readouterr().out


def test_show_of_none_or_of_several_is_refused(home, capsys):
    assert refused(capsys, "show", "zzz", "--in", home) == (
        f"specbench: no run zzz in {home}; python -m specbench.results ls {home} lists those there are"
    )
    assert "id-of- is 3 runs; give one of" in refused(capsys, "show", "id-of-", "--in", home)
    assert f"{home} is 3 runs; give one of" in refused(capsys, "show", home)
    assert "there is no nowhere to look for it in" in refused(capsys, "show", "zzz", "--in", "nowhere")
    rewrite(home / "id-of-ngram", schema_version=1)
    assert "has schema version 1" in refused(capsys, "show", home / "id-of-ngram")


READ = {
    ".csv": pd.read_csv,
    ".parquet": pd.read_parquet,
    ".json": lambda path: pd.DataFrame(json.loads(path.read_text())),
}


@pytest.mark.parametrize("suffix", READ)
def test_export_writes_every_run_as_it_is(suffix, home, tmp_path, capsys):
    path = tmp_path / "new" / f"runs{suffix}"
    assert main(["export", str(home), "--out", str(path)]) == 0
    assert out_of(capsys) == [f"{path}: 3 runs"]
    found, expected = READ[suffix](path), results.frame([home])
    assert list(found.columns) == list(expected.columns)
    assert found["id"].tolist() == expected["id"].tolist()
    np.testing.assert_array_equal(found["speedup"].astype(float), expected["speedup"])
    assert pd.to_datetime(found["started"], utc=True).tolist() == expected["started"].tolist()


@pytest.mark.parametrize("suffix", READ)
def test_export_of_steps_writes_every_step(suffix, home, tmp_path, capsys):
    path = tmp_path / f"steps{suffix}"
    assert main(["export", str(home), "--out", str(path), "--steps"]) == 0
    assert out_of(capsys) == [f"{path}: 6 steps"]
    found = READ[suffix](path)
    assert found["seconds"].tolist() == [*STEPS["seconds"]] * 2
    assert found["id"].tolist() == results.steps([home])["id"].tolist()


def test_export_keeps_every_digit(tmp_path):
    put(tmp_path, made(changes={"metrics.speedup": 1.5199666708917614}))
    for suffix, read in READ.items():
        assert main(["export", str(tmp_path), "--out", str(tmp_path / f"a{suffix}")]) == 0
        assert read(tmp_path / f"a{suffix}")["speedup"][0] == 1.5199666708917614


def test_export_to_what_it_cannot_write_is_refused(home, tmp_path, capsys):
    assert refused(capsys, "export", home, "--out", tmp_path / "a.xlsx") == (
        f"specbench: --out {tmp_path / 'a.xlsx'}: its suffix says the format; give one of .csv, .parquet, .json"
    )
    (tmp_path / "file").write_text("in the way")
    assert main(["export", str(home), "--out", str(tmp_path / "file" / "a.csv")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "could not write" in line


def test_copy_of_a_record_is_shown_by_its_folder_where_the_id_is_not_enough(home, tmp_path, capsys):
    shutil.copytree(home / "id-of-ngram", home / "copy")
    assert "id-of-ngram is 2 runs" in refused(capsys, "show", "id-of-ngram", "--in", home)
