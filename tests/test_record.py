import errno
import json
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from specbench import record
from specbench.errors import ConfigError, RunError

ID = "0123456789ab"
STEPS = pd.DataFrame({"round": [0, 1], "tokens": [[1], [2, 3]], "seconds": [0.5, 0.25]})
PROMPTS = pd.DataFrame({"uid": ["a/1"], "prompt": ["Grüße?"]})


def ok(**more):
    return {"id": ID, "status": "ok", "error": None, **more}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ids


def test_id_is_twelve_hexadecimal_digits():
    assert len(record.run_id({"k": 4})) == 12
    assert int(record.run_id({"k": 4}), 16) >= 0


def test_id_is_stable_under_key_order():
    assert record.run_id({"k": 4, "config": {"a": 1, "b": 2}}) == record.run_id({"config": {"b": 2, "a": 1}, "k": 4})


@pytest.mark.parametrize(
    "other",
    [
        {"k": 5, "config": {"seed": 0, "match": None}},
        {"k": 4, "config": {"seed": 1, "match": None}},
        {"k": 4, "config": {"seed": 0, "match": "latest"}},
        {"k": 4, "config": {"seed": 0}},
        {"k": 4, "config": {"seed": 0, "match": None, "n": 1}},
        {"k": "4", "config": {"seed": 0, "match": None}},
    ],
)
def test_id_changes_with_any_value(other):
    assert record.run_id(other) != record.run_id({"k": 4, "config": {"seed": 0, "match": None}})


def test_id_changes_with_the_schema(monkeypatch):
    before = record.run_id({"k": 4})
    monkeypatch.setattr(record, "SCHEMA_VERSION", record.SCHEMA_VERSION + 1)
    assert record.run_id({"k": 4}) != before


# write and read


def test_what_is_written_is_read(tmp_path):
    folder = record.write(tmp_path, ok(metrics={"speedup": 1.5, "text": "Grüße"}), STEPS, PROMPTS)
    assert folder == tmp_path / ID
    expected = {"schema_version": record.SCHEMA_VERSION, **ok(metrics={"speedup": 1.5, "text": "Grüße"})}
    assert record.read(folder) == record.finished(tmp_path, ID) == expected
    steps = pd.read_parquet(folder / record.STEPS)
    assert steps.assign(tokens=steps["tokens"].map(list)).to_dict() == STEPS.to_dict()
    pd.testing.assert_frame_equal(pd.read_parquet(folder / record.PROMPTS), PROMPTS)


def test_write_leaves_nothing_else(tmp_path):
    record.write(tmp_path, ok(), STEPS, PROMPTS)
    assert names(tmp_path) == [ID]
    assert names(tmp_path / ID) == sorted([record.RUN, record.STEPS, record.PROMPTS])


def test_write_replaces_an_earlier_record_whole(tmp_path):
    record.write(tmp_path, ok(n=1), STEPS, PROMPTS)
    record.write(tmp_path, {**ok(n=2), "status": "failed"})
    assert record.read(tmp_path / ID)["n"] == 2
    assert names(tmp_path) == [ID]
    assert names(tmp_path / ID) == [record.RUN]


def test_failing_parquet_write_raises_and_keeps_the_earlier_record(tmp_path, monkeypatch):
    def no_space(self, path, **kwargs):
        Path(path).write_bytes(b"PAR1")
        raise OSError(errno.ENOSPC, "No space left on device")

    record.write(tmp_path, ok(n=1), STEPS)
    monkeypatch.setattr(pd.DataFrame, "to_parquet", no_space)
    with pytest.raises(RunError, match=f"could not write the record to .*{ID}: No space left on device"):
        record.write(tmp_path, ok(n=2), STEPS)
    assert names(tmp_path) == [ID]
    assert record.read(tmp_path / ID)["n"] == 1
    assert (tmp_path / ID / record.STEPS).exists()


def test_results_dir_that_is_a_file_raises(tmp_path):
    (tmp_path / "results").write_text("")
    with pytest.raises(RunError, match="could not write the record"):
        record.write(tmp_path / "results", ok())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_number_that_json_cannot_say_is_refused(tmp_path, value):
    with pytest.raises(RunError, match="not JSON compliant"):
        record.write(tmp_path, ok(metrics={"speedup": value}), STEPS)
    assert record.finished(tmp_path, ID) is None


def test_refused_record_leaves_nothing_behind(tmp_path):
    with pytest.raises(RunError, match="not JSON compliant"):
        record.write(tmp_path, ok(metrics={"speedup": float("nan")}), STEPS)
    assert names(tmp_path) == []


# killed in the middle: the driver stops where it is told to, says so, and waits for the signal

DRIVER = """
import sys, time
from pathlib import Path
import pandas as pd
from specbench import record

def stop(*args, **kwargs):
    print("stopped", flush=True)
    time.sleep(60)

def stop_after_some_bytes(self, path, **kwargs):
    Path(path).write_bytes(b"PAR1")
    stop()

where, results_dir, id_ = sys.argv[1:]
if where == "steps":
    pd.DataFrame.to_parquet = stop_after_some_bytes
elif where == "sync":
    record._sync = stop
elif where == "rename":
    Path.rename = stop
else:
    rename, aside = Path.rename, []

    def watched(self, to):
        if str(to).endswith(".old"):
            aside.append(to)
            if where == "moving the old one aside":
                stop()
        elif aside:
            stop()  # moving the new one in
        return rename(self, to)

    Path.rename = watched
record.write(Path(results_dir), {"id": id_, "status": "ok", "n": 2}, pd.DataFrame({"round": [0]}))
"""


def kill_in_the_middle(tmp_path, where):
    command = [sys.executable, "-c", DRIVER, where, str(tmp_path), ID]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "stopped\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def found(results_dir):
    try:
        return [record.read(folder) for folder in record.find([results_dir])]
    except ConfigError:
        return []


@pytest.mark.parametrize("where", ["steps", "sync", "rename"])
def test_killed_first_write_leaves_nothing_that_looks_finished(tmp_path, where):
    kill_in_the_middle(tmp_path, where)
    assert record.finished(tmp_path, ID) is None
    assert found(tmp_path) == []


@pytest.mark.parametrize(
    ("where", "kept"), [("sync", [1]), ("rename", [1]), ("moving the old one aside", []), ("moving the new one in", [])]
)
def test_killed_replacement_leaves_the_earlier_record_or_none(tmp_path, where, kept):
    record.write(tmp_path, ok(n=1), STEPS)
    kill_in_the_middle(tmp_path, where)
    assert [run["n"] for run in found(tmp_path)] == kept
    assert (record.finished(tmp_path, ID) is not None) == bool(kept)


def test_write_after_a_killed_one_succeeds(tmp_path):
    record.write(tmp_path, ok(n=1), STEPS)
    kill_in_the_middle(tmp_path, "first rename")
    record.write(tmp_path, ok(n=3), STEPS)
    assert [run["n"] for run in found(tmp_path)] == [3]


# read, finished, find


def test_other_schema_version_is_refused_by_name(tmp_path):
    folder = record.write(tmp_path, ok())
    run = json.loads((folder / record.RUN).read_text())
    (folder / record.RUN).write_text(json.dumps({**run, "schema_version": 99}))
    with pytest.raises(ConfigError, match=f"schema version 99; this code reads {record.SCHEMA_VERSION}"):
        record.read(folder)
    assert record.finished(tmp_path, ID) is None


def test_folder_without_a_record_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no run\.json"):
        record.read(tmp_path)


@pytest.mark.parametrize("content", [b"", b'{"status": "ok"', b"\xff\xfe", b"[]", b"null"])
def test_unreadable_record_is_refused_and_not_finished(tmp_path, content):
    folder = record.write(tmp_path, ok())
    (folder / record.RUN).write_bytes(content)
    with pytest.raises(ConfigError, match=ID):
        record.read(folder)
    assert record.finished(tmp_path, ID) is None


def test_failed_record_is_not_finished(tmp_path):
    record.write(tmp_path, {**ok(), "status": "failed"})
    assert record.finished(tmp_path, ID) is None


def test_find_takes_records_and_folders_of_records(tmp_path):
    for place, id_ in (("one", "b"), ("one", "a"), ("two", "c")):
        record.write(tmp_path / place, {**ok(), "id": id_})
    assert record.find([tmp_path / "two" / "c", tmp_path / "one"]) == [
        tmp_path / "two" / "c",
        tmp_path / "one" / "a",
        tmp_path / "one" / "b",
    ]


def test_find_ignores_hidden_folders(tmp_path):
    record.write(tmp_path, ok())
    record.write(tmp_path, {**ok(), "id": "x"}).rename(tmp_path / ".x.1")
    assert record.find([tmp_path]) == [tmp_path / ID]


def test_find_looks_at_any_depth_but_not_into_records(tmp_path):
    deep = record.write(tmp_path / "a" / "b" / "c", ok())
    record.write(deep / "inside", {**ok(), "id": "x"})
    record.write(tmp_path / ".hidden" / "b", ok())
    other = record.write(tmp_path / "z", ok())
    assert record.find([tmp_path]) == [deep, other]


def test_find_finds_the_half_of_a_record_for_its_reader_to_name(tmp_path):
    folder = record.write(tmp_path, ok(), STEPS)
    (folder / record.RUN).unlink()
    assert record.find([tmp_path]) == [folder]
    with pytest.raises(ConfigError, match=rf"{ID} holds no run\.json"):
        record.read(folder)


@pytest.mark.parametrize("place", [".", "missing"])
def test_find_without_records_says_what_to_run(tmp_path, place):
    with pytest.raises(ConfigError, match=r"no records of runs in .*; run python -m specbench first"):
        record.find([tmp_path / place])


# single files


def test_file_is_written_with_its_folder(tmp_path):
    record.write_file(tmp_path / "new" / "folder" / "a.json", "Grüße\n")
    assert (tmp_path / "new" / "folder" / "a.json").read_bytes() == "Grüße\n".encode()
    assert names(tmp_path / "new" / "folder") == ["a.json"]


def test_file_of_bytes_is_written_as_it_is(tmp_path):
    record.write_file(tmp_path / "a.parquet", b"PAR1\r\n\xff")
    assert (tmp_path / "a.parquet").read_bytes() == b"PAR1\r\n\xff"


def test_file_replaces_the_old_one_whole(tmp_path):
    path = tmp_path / "a.json"
    record.write_file(path, "long" * 1000)
    with path.open() as old:
        record.write_file(path, "short")
        assert len(old.read()) == 4000  # who reads the old one reads it to its end
    assert path.read_text() == "short"
    assert names(tmp_path) == ["a.json"]


def test_file_that_the_disk_does_not_take_leaves_nothing_and_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    record.write_file(path, "old")

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(record.os, "replace", refuse)
    with pytest.raises(RunError, match=r"could not write .*a\.json: No space left on device"):
        record.write_file(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.json"]


def test_file_under_a_file_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match=r"could not write .*file/a\.json"):
        record.write_file(tmp_path / "file" / "a.json", "x")
    assert (tmp_path / "file").read_text() == "in the way"
    assert names(tmp_path) == ["file"]


def test_file_whose_place_a_folder_holds_is_refused_by_name(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(RunError, match=r"could not write .*a\.json"):
        record.write_file(tmp_path / "a.json", "x")
    assert names(tmp_path) == ["a.json"]
