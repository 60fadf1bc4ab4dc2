import fnmatch
import gzip
import io
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from conftest import baseline, tiny
from test_training_data import command_line
from wandb.proto import wandb_internal_pb2 as wire

from drafters.ngram import NGram
from specbench import __main__, comparison, record, tracking, wandb_process
from specbench.comparison import Arm, Settings
from specbench.decoding import Step
from specbench.errors import RunError
from specbench.sampling import Sampling
from specbench.stopping import StopRule
from specbench.tracking import Ending, Guarded, Page, Pulse, Tracker
from specbench.wandb_tracker import Wandb

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "results" / "reference" / "quick"


class Recorder(Tracker):
    """Keeps what it is told; ``every``: as a tracker's."""

    made: ClassVar[list["Recorder"]] = []

    def __init__(self, every=None):
        self.every, self.told = every, []
        self.made.append(self)

    def begin(self, page):
        self.told.append(("begin", page))

    def log(self, row, step=None):
        self.told.append(("log", row))

    def end(self, ending):
        self.told.append(("end", ending))

    def of(self, kind):
        return [what for said, what in self.told if said == kind]


class Breaks(Recorder):
    """Fails whatever it is told."""

    every = 1e-9

    def begin(self, page):
        raise ArithmeticError("the tracker is made of cheese")

    log = end = begin


class BreaksInPropose(NGram):
    def propose(self, batch, k):
        raise ArithmeticError("the weights are made of cheese")


class apart:  # noqa: N801
    """No wandb of the user's, neither their login nor their files, and a command line that leaves nothing behind."""

    def __init__(self, folder):
        self._folder, self._command = folder, command_line()

    def __enter__(self):
        self._command.__enter__()
        self._patch = pytest.MonkeyPatch()
        self._patch.chdir(self._folder)
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            self._patch.delenv(name)
        for name in ("HOME", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
            self._patch.setenv(name, str(self._folder / "home"))
        self._patch.setenv("WANDB_ERROR_REPORTING", "false")
        self._patch.setattr(Recorder, "made", [])

    def __exit__(self, *_):
        self._patch.undo()
        self._command.__exit__()


@pytest.fixture(autouse=True)
def each_apart(tmp_path):
    with apart(tmp_path):
        yield


def asked(folder):
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(i), "turns": f"Count: {i}, {i}, {i}."}) + "\n" for i in range(8)))
    words = ["target=tiny", "dtype=float32", "device=cpu", "max_new_tokens=12", "dataset=jsonl", "k=2", "profile=2"]
    return [*words, f"dataset.path={prompts}", f"results_dir={folder / 'results'}"]


def recorded(kind="Recorder"):
    return ["tracker=none", f"tracker._target_=test_tracking.{kind}"]


def records(folder):
    return {path.name: record.read(path) for path in record.find([folder / "results"])}


# what wandb keeps of a run offline

BLOCK = 32768  # bytes; records are cut where a block ends


def entries(path):
    """The records of a .wandb file: behind 7 bytes of header, each piece has a checksum, a length, and whether it is
    the whole (1), the first (2), one of (3) or the last (4) of a record."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, whole = 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            entry = wire.Record()
            entry.ParseFromString(whole)
            yield entry
            whole = b""


def kept(folder):
    """What is kept offline in ``folder``, by the run's id."""
    found = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        run = SimpleNamespace(about=None, summary={}, rows=[], artifacts={}, code=None, updates={}, folder=path.parent)
        for entry in entries(path):
            kind = entry.WhichOneof("record_type")
            if kind == "run":
                run.about = entry.run
                run.config = {item.key: json.loads(item.value_json) for item in entry.run.config.update}
            elif kind == "summary":
                told = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in entry.summary.update}
                for name in [name for name in told if not name.startswith("_")]:  # what begins so is wandb's own
                    run.summary[name] = told[name]
                    run.updates[name] = run.updates.get(name, 0) + 1
            elif kind == "history":
                items = entry.history.item
                run.rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
            elif kind == "artifact":
                names = [file.path for file in entry.artifact.manifest.contents]
                run.artifacts.setdefault(entry.artifact.type, []).append((entry.artifact.name, sorted(names)))
            elif kind == "exit":
                run.code = entry.exit.exit_code
        if run.about is not None:  # of what is written but now there may be no more than the beginning
            assert run.about.run_id not in found
            found[run.about.run_id] = run
    return found


def table(run, name):
    """A table of a run as rows of names and values."""
    told = json.loads((run.folder / "files" / run.summary[name]["path"]).read_text())
    return [dict(zip(told["columns"], row, strict=True)) for row in told["data"]]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A sweep of two cells, tracked offline, as by a user who is not logged in."""
    folder = tmp_path_factory.mktemp("sweep")
    arguments = ["-m", *asked(folder), "drafter=ngram,none", "tracker=wandb", "tracker.every=0.001"]
    with apart(folder), redirect_stderr(io.StringIO()) as said:
        assert __main__.main([*arguments, "tracker.artifacts=true"]) == 0
    runs = kept(folder / "results")
    return SimpleNamespace(folder=folder, said=said.getvalue(), runs=runs, records=records(folder))


def test_each_record_has_a_run_of_its_id(sweep):
    assert set(sweep.runs) == set(sweep.records)
    assert len(sweep.runs) == 2


def test_every_number_of_the_record_is_kept_as_it_is(sweep):
    for id_, found in sweep.records.items():
        told = sweep.runs[id_].summary
        expected = {}
        for name, value in found["metrics"].items():
            if name.endswith("_ci95"):
                expected |= {f"{name}_low": value[0], f"{name}_high": value[1]}
            elif isinstance(value, int | float) and not isinstance(value, bool):
                expected[name] = value
        assert len(expected) > 15
        assert {name: told[name] for name in expected} == expected
        assert told["lossless/verdict"] == found["metrics"]["lossless"]["verdict"] == "equal"
        for name, share in found["model"]["shares"].items():
            assert told[f"model/shares/{name}"] == share
        assert told["model/bound"] == found["model"]["bound"]
        assert (told["status"], told["error"], told["prompts/turns"]) == ("ok", "", 8)
        assert told["flags"].split(", ") == list(dict.fromkeys(flag["flag"] for flag in found["flags"]))


def test_tables_hold_what_the_record_holds(sweep):
    (id_,) = [id_ for id_, found in sweep.records.items() if found["drafter"]["name"] == "ngram"]
    run, found = sweep.runs[id_], sweep.records[id_]
    by_position = found["metrics"]["acceptance_by_position"]
    assert table(run, "acceptance_by_position") == [
        {"position": i + 1, "joint": by_position["joint"][i], "conditional": by_position["conditional"][i]}
        for i in range(2)
    ]
    histogram = found["metrics"]["accepted_length_histogram"]
    assert [row["passes"] for row in table(run, "accepted_length_histogram")] == histogram
    (row,) = table(run, "by_category")
    (category,) = found["by_category"]
    assert row["category"] == category
    assert row["tokens_per_pass"] == found["by_category"][category]["tokens_per_pass"]
    assert [row["speedup"] for row in table(run, "prediction_by_k")] == [e["speedup"] for e in found["model"]["by_k"]]


def test_configuration_group_job_and_tags_are_kept(sweep):
    for id_, found in sweep.records.items():
        run, name = sweep.runs[id_], found["drafter"]["name"]
        assert {key: run.config[key] for key in found["config"]} == json.loads(json.dumps(found["config"]))
        commit = (found["provenance"]["git"] or {}).get("commit")
        assert (run.config["id"], run.config["git_commit"]) == (id_, commit)
        assert run.config["facts"]["target"]["name"] == "tiny-llama"
        assert (run.about.project, run.about.run_group, run.about.job_type) == ("specbench", "drafter=ngram,none", name)
        assert set(run.about.tags) >= {name, *([commit[:12]] if commit else [])}
        assert run.code == 0


def test_progress_is_kept_row_by_row(sweep):
    for run in sweep.runs.values():
        replies = [row["live/replies"] for row in run.rows]
        assert replies == sorted(replies)
        assert 10 < replies[-1] <= run.rows[-1]["live/replies_of"] == 16
        assert all(1 <= row["live/tokens_per_pass"] <= 3 for row in run.rows if "live/tokens_per_pass" in row)
        assert any(row.get("live/tokens_per_s", 0) > 0 for row in run.rows)
        assert not [name for name in run.summary if name.startswith("live/")]


def test_nothing_is_told_twice(sweep):
    for run in sweep.runs.values():
        assert {name: count for name, count in run.updates.items() if count > 1} == {}
        assert len(run.artifacts["run_table"]) == len({name for name, _ in run.artifacts["run_table"]})


def test_files_of_the_record_are_kept_when_asked(sweep):
    for id_, run in sweep.runs.items():
        files = sorted(path.name for path in (sweep.folder / "results" / id_).iterdir())
        assert run.artifacts["record"] == [(f"record-{id_}", files)]
        assert record.RUN in files


def test_who_is_not_logged_in_is_told_how_to_send_it_once_and_asked_nothing(sweep):
    why = "Weights & Biases is offline (No API key configured. Use `wandb login` to log in.)"
    how = f"to send what Weights & Biases keeps: wandb sync {sweep.folder / 'results' / 'wandb'}/offline-run-*"
    assert (sweep.said.count(why), sweep.said.count(how)) == (1, 1)
    assert [line for line in sweep.said.splitlines() if not line.startswith("specbench: ")] == []


def test_wandb_leaves_nothing_but_its_folder(sweep):
    assert {path.name for path in (sweep.folder / "results").iterdir()} - set(sweep.records) <= {"wandb", ".sweep"}


def test_finished_cells_are_not_sent_again_and_a_rerun_takes_the_place_of_what_was_kept(sweep):
    arguments = [*asked(sweep.folder), "drafter=ngram", "tracker=wandb", "tracker.every=null"]
    assert __main__.main(arguments) == 0
    assert {id_: run.folder for id_, run in kept(sweep.folder / "results").items()} == {
        id_: run.folder for id_, run in sweep.runs.items()
    }
    assert __main__.main([*arguments, "force=true"]) == 0
    again, found = kept(sweep.folder / "results"), records(sweep.folder)
    (id_,) = [id_ for id_ in again if again[id_].folder != sweep.runs[id_].folder]
    assert found[id_]["drafter"]["name"] == "ngram"
    assert again[id_].summary["speedup"] == found[id_]["metrics"]["speedup"] != sweep.runs[id_].summary["speedup"]
    assert again[id_].rows == []
    assert {name: count for name, count in again[id_].updates.items() if count > 1} == {}


def page(folder, **other):
    fields = {"id": "0123", "name": "a", "job": "ngram", "group": None, "config": {}, "tags": [], "folder": folder}
    return Page(**{**fields, **other})


def test_failed_run_ends_with_code_1_and_its_reason(tmp_path):
    tracker = Wandb(mode="offline", group="mine")
    tracker.begin(page(tmp_path, group="theirs"))
    tracker.end(Ending({"status": "failed"}, error="ArithmeticError: cheese"))
    run = kept(tmp_path)["0123"]
    assert (run.code, run.about.run_group) == (1, "mine")
    assert (run.summary["error"], run.summary["status"]) == ("ArithmeticError: cheese", "failed")


def test_run_of_a_process_that_is_gone_has_failed(tmp_path):
    code = """if True:
        import os, pathlib, signal, sys
        from specbench.tracking import Page
        from specbench.wandb_tracker import Wandb
        tracker = Wandb(mode="offline")
        tracker.begin(Page("0123", "a", "ngram", None, {}, [], pathlib.Path(sys.argv[1])))
        tracker.log({"loss": 1.0}, step=3)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    for _ in range(100):
        run = kept(tmp_path).get("0123")
        if run is not None and run.code is not None:
            break
        time.sleep(0.1)
    assert (run.code, run.summary["error"]) == (1, "the run was broken off")
    assert [(row["_step"], row["loss"]) for row in run.rows] == [(3, 1.0)]


def test_figures_are_kept_when_asked(tmp_path):
    some = next(path for path in record.find([REFERENCE]) if record.read(path)["drafter"]["name"] == "eagle")
    tracker = Wandb(mode="offline", figures=True)
    tracker.begin(page(tmp_path))
    tracker.end(tracking.ending(record.read(some), some))
    run = kept(tmp_path)["0123"]
    for name in ("figures/speedup", "figures/acceptance_by_position"):
        image = (run.folder / "files" / run.summary[name]["path"]).read_bytes()
        assert image.startswith(b"\x89PNG")
        assert len(image) > 10_000


# a server


class Server(BaseHTTPRequestHandler):
    """As much of W&B's server as a run needs. ``slow``: seconds before it takes what a run has logged."""

    slow, there, heard = 0.0, True, ()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"] or 0))
        said = {}
        if not self.there:
            self.send_error(404)
            return
        if self.path == "/graphql":
            asked = json.loads(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
            said = {"data": self.answer(asked["query"], asked["variables"])}
        elif "file_stream" in self.path:
            time.sleep(self.slow)
            self.heard.append(json.loads(body))
        answer = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PUT = do_POST  # noqa: N815

    def answer(self, query, given):
        project = {"id": "p", "name": "specbench", "entity": {"id": "e", "name": "me"}}
        if "RunResumeStatus" in query:
            return {"model": {**project, "bucket": None}}
        if "upsertBucket" in query:
            run = {"id": "b", "name": given["name"], "displayName": "d", "config": "{}", "project": project}
            return {"upsertBucket": {"bucket": {**run, "historyLineCount": 0}, "inserted": True}}
        if "CreateRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{os.environ['WANDB_BASE_URL']}/up"} for name in given["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {}

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """A server, and a user who is logged in there."""
    kind = type("Server", (Server,), {"heard": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as made:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{made.server_port}")
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield kind
        made.shutdown()
        thread.join()


def test_who_is_logged_in_has_it_sent(server, tmp_path, caplog):
    caplog.set_level("INFO")
    tracker = Wandb()
    tracker.begin(page(tmp_path))
    tracker.log({"live/seconds": 1.0})
    tracker.end(Ending({"speedup": 1.5}, error="ArithmeticError: cheese"))
    last = server.heard[-1]
    assert (last["complete"], last["exitcode"]) == (True, 1)
    told = json.loads(last["files"]["wandb-summary.json"]["content"][0])
    assert (told["speedup"], told["error"]) == (1.5, "ArithmeticError: cheese")
    assert caplog.messages == [f"shown at {os.environ['WANDB_BASE_URL']}/me/specbench"]


def test_what_a_slow_network_does_not_take_in_time_is_kept_with_a_line(server, tmp_path, caplog):
    caplog.set_level("INFO")
    server.slow = 5.0
    tracker = Wandb(wait=1)
    tracker.begin(page(tmp_path))
    tracker.end(Ending({"speedup": 1.5}))
    (folder,) = tmp_path.glob("wandb/run-*-0123")
    assert caplog.messages[-1] == f"not all was sent in 1 s; to send the rest: wandb sync {folder}"


def test_run_is_kept_offline_where_the_server_is_not_there(server, tmp_path, caplog):
    caplog.set_level("INFO")
    server.there = False
    tracker = Wandb()
    for id_ in ("0123", "4567"):
        tracker.begin(page(tmp_path, id=id_))
        tracker.end(Ending({"speedup": 1.5}))
    assert {id_: run.summary["speedup"] for id_, run in kept(tmp_path).items()} == {"0123": 1.5, "4567": 1.5}
    assert caplog.messages[0].startswith("Weights & Biases is offline (Failed to get resume status")
    assert [path.name for path in tmp_path.glob("wandb/run-*")] == []


# what goes wrong


def spoken_to(script):
    """A tracker whose process is a line of Python."""
    tracker = Wandb(wait=0.1)
    tracker.command = (sys.executable, "-c", script)
    return tracker


BROKEN = {
    "raise SystemExit(7)": "its process ended with code 7",
    'print(\'{"error": "no space left"}\', flush=True)': "no space left",
    "import time; time.sleep(60)": "no answer in 1 s",
    "import os, time; os.close(0); print('{\"notes\": []}', flush=True); time.sleep(60)": "its process is gone",
}


@pytest.mark.parametrize("script", BROKEN)
def test_a_process_that_fails_is_left_with_a_reason(script, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("specbench.wandb_tracker.START", 1.0)
    monkeypatch.setattr("specbench.wandb_tracker.CLOSE", 0.5)
    tracker = spoken_to(script)
    guarded = Guarded(tracker)
    guarded.begin(page(tmp_path))
    guarded.log({"live/seconds": 1.0})
    guarded.end(Ending())
    assert tracker._process is None
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert line == f"no longer tracked: Weights & Biases: {BROKEN[script]}; the run goes on"


def test_wandb_that_cannot_be_imported_is_a_line(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text("raise ImportError('libz is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RunError, match="libz is missing"):
        Wandb().begin(page(tmp_path))


def test_full_disk_is_a_line(tmp_path, monkeypatch):
    tracker = Wandb(mode="offline")
    tracker.begin(page(tmp_path))
    resource.prlimit(tracker._process.pid, resource.RLIMIT_FSIZE, (4096, 4096))
    with pytest.raises(RunError, match="File too large"):
        tracker.end(Ending({"speedup": 1.5}))


def test_rows_that_a_stuck_process_does_not_take_are_dropped_without_waiting(tmp_path):
    tracker = spoken_to("import time; print('{\"notes\": []}', flush=True); time.sleep(60)")
    tracker.begin(page(tmp_path))
    began = time.monotonic()
    for _ in range(2000):  # more than a pipe holds
        tracker.log({"live/seconds": 1.0, "live/replies": 3, "live/tokens_per_pass": 1.5})
    assert time.monotonic() - began < 1
    tracker._leave()


def test_tracker_that_always_fails_changes_nothing(tmp_path, capsys):
    kinds = {"never": "Recorder", "always": "Breaks"}
    for name, kind in kinds.items():
        (tmp_path / name).mkdir()
        assert (
            __main__.main([*asked(tmp_path / name), *recorded(kind), f"results_dir={tmp_path / name / 'results'}"]) == 0
        )
    said = capsys.readouterr().err
    assert said.count("no longer tracked: the tracker is made of cheese; the run goes on") == 1
    (one,), (other,) = (records(tmp_path / name).values() for name in kinds)
    for found in (one, other):
        for name in ("provenance", "wall_seconds", "machine_load", "model", "flags"):
            found.pop(name)
        for name in ("config", "dataset"):
            assert found[name]
        found["config"]["dataset"].pop("path")
        timed = [name for name in found["metrics"] if re.search("second|per_s|speedup|ttft|spread|memory|joules", name)]
        for measured in (found["metrics"], *found["by_category"].values()):
            for name in timed:
                measured.pop(name, None)
    assert one.pop("id") != other.pop("id")  # the path of the prompts is part of the question
    assert one == other


def test_tracker_that_failed_is_not_tried_again_by_the_next_cell(tmp_path, capsys):
    assert __main__.main(["-m", *asked(tmp_path), *recorded("Breaks"), "drafter=ngram,none"]) == 0
    assert capsys.readouterr().err.count("no longer tracked") == 1
    assert len(records(tmp_path)) == 2


def test_names_are_no_longer_than_wandb_takes():
    run = record.read(record.find([REFERENCE])[0])
    run["drafter"] = {**run["drafter"], "name": "x" * 200}
    named = tracking.page(run, "k=1,2 " * 40, Path())
    assert (len(named.name), len(named.group), len(named.job)) == (128, 128, 64)
    assert named.name.endswith(f"… {run['id'][:4]}")
    assert named.group.endswith("…")
    assert tracking.page(run, None, Path()).group is None


def test_what_an_earlier_run_of_the_record_said_does_not_stay(tmp_path):
    run = SimpleNamespace(summary={"speedup": 9.0, "status": "ok", "loss": 1.5, "_step": 3}, log=lambda row, step: None)
    run.finish = lambda exit_code: None
    ending = {"error": "it broke", "numbers": {"status": "failed"}}
    found, logged = wandb_process.follow(run, iter([{"row": {"loss": 1.5}, "step": 1}, ending]))
    assert (found, logged) == (ending, {"loss"})
    wandb_process.end(run, {}, ending, run.summary.keys() - logged)
    assert run.summary == {"status": "failed", "error": "it broke", "loss": 1.5, "_step": 3}


@pytest.mark.parametrize("ending", [{"error": "KeyboardInterrupt", "numbers": {}}, None])
def test_an_interrupted_rerun_leaves_the_run_that_was_finished(tmp_path, ending):
    tracker = Wandb(mode="offline")
    tracker.begin(page(tmp_path))
    tracker.end(Ending({"speedup": 1.5}))
    (finished,) = tmp_path.glob("wandb/offline-run-*")
    time.sleep(1.1)  # wandb names a run's folder by the second
    tracker.begin(page(tmp_path))
    if ending:
        tracker.end(Ending(error=ending["error"]))
    else:
        tracker._leave()
    assert finished.exists()


def test_only_what_began_earlier_is_replaced(tmp_path):
    names = ["offline-run-20260101_000000-0123", "run-20260101_000001-0123", "offline-run-20260101_000003-0123"]
    for name in [*names, "offline-run-20260101_000002-0123"]:
        (tmp_path / name).mkdir()
    run = SimpleNamespace(settings=SimpleNamespace(sync_dir=str(tmp_path / "offline-run-20260101_000002-0123")))
    wandb_process.replace_older(run, {"id": "0123"})
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([names[2], "offline-run-20260101_000002-0123"])


def test_wrong_question_ends_the_page_that_was_begun(tmp_path):
    arguments = [*asked(tmp_path), *recorded(), "tracker.every=1"]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"turns": "x" * 600}))
    assert __main__.main([word.replace("tracker.every", "+tracker.every") for word in arguments]) == 2
    (told,) = Recorder.made
    (ending,) = told.of("end")
    assert len(told.of("begin")) == 1
    assert ending.error.startswith("ConfigError: every prompt is longer")


def test_process_that_is_measured_loads_no_wandb_and_the_other_no_torch():
    code = "import sys, specbench.wandb_tracker, specbench.wandb_process; print({'wandb', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


# what the harness tells a tracker


def test_cells_that_run_together_have_a_page_each_and_the_first_alone_is_live(tmp_path):
    compared = ["+drafter@compare.none=none", "+compare.breaks._target_=test_tracking.BreaksInPropose"]
    assert __main__.main([*asked(tmp_path), *recorded(), "+tracker.every=1e-9", "drafter=suffix", *compared]) == 1
    (told,) = Recorder.made
    kinds = [kind for kind, _ in told.told]
    live = kinds.index("end")
    assert kinds[0] == "begin"
    assert set(kinds[1:live]) == {"log"}
    assert kinds[live:] == ["end", "begin", "end", "begin", "end"]
    assert [page.job for page in told.of("begin")] == ["suffix", "none", "breaks"]
    assert [ending.error for ending in told.of("end")] == [
        None,
        None,
        "ArithmeticError: the weights are made of cheese",
    ]
    assert told.of("end")[2].numbers["status"] == "failed"


@pytest.mark.parametrize(
    ("arguments", "group"),
    [
        (["drafter=ngram"], None),
        (["-m", "drafter=ngram,none", "k=2"], "drafter=ngram,none"),
        (["experiment=small"], "small"),
        (["-m", "experiment=small", "k=1,2"], "small"),
    ],
)
def test_group_is_the_experiment_or_the_sweep(tmp_path, arguments, group):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "small.yaml").write_text("# @package _global_\nrepeats: 1\n")
    flags = [word for word in arguments if word.startswith("-")]
    words = [word for word in arguments if not word.startswith("-")]
    given = [*flags, "--config-dir", str(tmp_path / "own"), *asked(tmp_path), *recorded(), *words]
    assert __main__.main(given) == 0
    assert {page.group for told in Recorder.made for page in told.of("begin")} == {group}


def test_tracker_is_no_part_of_the_question(tmp_path):
    assert __main__.main([*asked(tmp_path), *recorded()]) == 0
    assert __main__.main([*asked(tmp_path), *recorded(), "+tracker.every=3"]) == 0
    assert [len(told.told) for told in Recorder.made] == [2, 0]


def test_progress_is_told_outside_of_the_clock_of_a_round(monkeypatch):
    """A tracker that takes long makes no round longer."""
    lm = tiny("llama")
    conversation = comparison.Conversation("a", "chat", ("One two one two one.",))

    class Slow(Recorder):
        def log(self, row, step=None):
            time.sleep(0.1)
            super().log(row, step)

    told, arm, plain = Slow(every=1e-9), Arm("ngram", NGram(), 2), baseline(lm)
    for each in (arm, plain):
        each.bind(lm)
    pulse = Pulse(told, arm, plain).beside(lambda arm, step: None, replies=2)
    settings = Settings(1, Sampling(), 0, StopRule(6))
    comparison.compare(lm, [conversation], plain, [arm], settings, pulse)
    assert len(told.told) == len(arm.steps) + len(plain.steps)
    assert max(row["seconds"] for row in arm.steps + plain.steps) < 0.1


def test_pulse_tells_speed_of_the_moment_and_acceptance_so_far():
    told = Recorder(every=10.0)
    method, other, plain = (Arm(name, NGram(), 2) for name in ("ngram", "other", "baseline"))
    pulse = Pulse(told, method, plain)
    both = pulse.beside(lambda arm, step: None, replies=4)

    def round_(arm, number, tokens, seconds, finish=None):
        both(arm, Step(number, seconds, False, [0], [[]], [0], [0], [list(range(tokens))], [finish]))

    def later():
        pulse._told -= 10.0

    round_(method, 0, 1, 99.0)
    round_(method, 1, 3, 0.5)
    round_(other, 1, 9, 0.1)
    assert told.told == []
    later()
    round_(plain, 1, 1, 0.25, "length")
    later()
    round_(method, 2, 1, 0.5, "length")
    first, second = told.of("log")
    assert {name: first[f"live/{name}"] for name in ("replies", "replies_of", "tokens_per_s", "tokens_per_pass")} == {
        "replies": 1,
        "replies_of": 4,
        "tokens_per_s": 6.0,
        "tokens_per_pass": 3.0,
    }
    assert first["live/baseline_tokens_per_s"] == 4.0
    assert (second["live/tokens_per_s"], second["live/tokens_per_pass"]) == (2.0, 2.0)
    assert "live/baseline_tokens_per_s" not in second


def test_checkpoint_is_an_artifact_beside_the_record():
    some = record.find([REFERENCE])[0]
    found = tracking.ending(record.read(some), some, Path("heads"))
    assert [(artifact.kind, artifact.folder) for artifact in found.artifacts] == [
        ("record", some),
        ("checkpoint", Path("heads")),
    ]


@pytest.mark.parametrize("folder", record.find([REFERENCE]), ids=lambda folder: record.read(folder)["drafter"]["name"])
def test_every_name_is_documented(folder):
    run = record.read(folder)
    documented = set(re.findall(r"`([\w/*]+)`", (ROOT / "docs" / "wandb.md").read_text()))
    names = [*tracking.numbers(run), *tracking.tables(run)]
    assert len(names) > 40
    assert [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in documented)] == []


REFUSED = {
    "tracker=wandbb": ("tracker=wandbb is unknown", "Did you mean 'wandb'?", "none"),
    "tracker=wandb tracker.mode=ofline": ("tracker.mode=ofline is unknown", "Did you mean 'offline'?"),
    "tracker=wandb tracker.every=0": ("tracker.every=0 is no number of seconds above 0",),
    "tracker=wandb tracker.wait=long": ("tracker.wait=long is no number of seconds above 0",),
    "tracker=wandb tracker.figures=yes": ("tracker.figures=yes is neither true nor false",),
    "tracker=wandb tracker.name=x": ("tracker.name is no setting",),
}


@pytest.mark.parametrize("bad", REFUSED)
def test_wrong_settings_are_refused_by_name(tmp_path, capsys, bad):
    assert __main__.main([*asked(tmp_path), *bad.split()]) == 2
    said = capsys.readouterr().err
    assert [part for part in REFUSED[bad] if part not in said] == []


# the scripts


class Calls:
    """Stands for a module: its names make objects that keep their arguments."""

    def __getattr__(self, name):
        return lambda *args, **how: SimpleNamespace(kind=name, args=args, **how)


def dashboard():
    sys.path.insert(0, str(ROOT / "scripts"))
    import wandb_dashboard

    return wandb_dashboard


def test_dashboard_shows_what_runs_have():
    made = dashboard().dashboard("me", "specbench", Calls(), Calls())
    known = {"loss", "validation_loss", "tokens_per_pass"}  # of trainings
    known |= {f"live/{name}" for name in ("seconds", "replies", "replies_of", "tokens_per_s", "tokens_per_pass")}
    known |= {"live/baseline_tokens_per_s"}
    for folder in record.find([REFERENCE]):
        known |= set(tracking.numbers(record.read(folder))) | set(tracking.tables(record.read(folder)))
    shown = []
    for panel in (panel for section in made.sections for panel in section.panels):
        axes = [
            axis.args[0] for axis in (getattr(panel, "x", None), getattr(panel, "y", None)) if hasattr(axis, "args")
        ]
        lines = panel.y if panel.kind == "LinePlot" else []
        shown += [*getattr(panel, "metrics", []), *axes, *lines, getattr(panel, "table_name", "k")]
    columns = [name.partition(":")[2] for name in made.runset_settings.pinned_columns if name.startswith("summary:")]
    assert len(shown) > 30
    assert {*shown, *columns} - known == {"k"}


def test_dashboard_is_a_view_of_the_real_package():
    workspaces = pytest.importorskip("wandb_workspaces.workspaces")
    panels = pytest.importorskip("wandb_workspaces.reports.v2")
    spec = dashboard().dashboard("me", "specbench", workspaces, panels)._to_model().spec.model_dump(by_alias=True)
    sections = spec["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections][:2] == ["Speedup", "Acceptance"]
    assert sections[0]["panels"][2]["config"]["xAxis"] == "config:k.value"
    assert f"| {sections[0]['name']} |" in (ROOT / "docs" / "wandb.md").read_text()


def test_dashboard_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    monkeypatch.setattr(sys, "argv", ["wandb_dashboard", "--entity", "me"])
    with pytest.raises(SystemExit, match="pip install wandb-workspaces"):
        dashboard().main()


def test_records_are_sent_later(tmp_path, monkeypatch, capsys):
    sys.path.insert(0, str(ROOT / "scripts"))
    import wandb_send

    folder = record.find([REFERENCE])[0]
    shutil.copytree(folder, tmp_path / "runs" / folder.name)
    for _ in range(2):
        arguments = [str(tmp_path / "runs"), "--group", "study", "--mode", "offline"]
        monkeypatch.setattr(sys, "argv", ["wandb_send", *arguments])
        wandb_send.main()
    (run,) = kept(tmp_path / "runs").values()
    assert (run.about.run_id, run.about.run_group) == (folder.name, "study")
    assert run.summary["speedup"] == record.read(folder)["metrics"]["speedup"]
    assert capsys.readouterr().err.count("wandb sync") == 2


def test_a_record_that_cannot_be_sent_costs_the_others_nothing(tmp_path, monkeypatch, capsys):
    sys.path.insert(0, str(ROOT / "scripts"))
    import wandb_send

    folder = record.find([REFERENCE])[0]
    shutil.copytree(folder, tmp_path / "runs" / folder.name)
    (tmp_path / "runs" / "0").mkdir()  # half of a record, and the first
    (tmp_path / "runs" / "0" / record.STEPS).touch()
    monkeypatch.setattr(sys, "argv", ["wandb_send", str(tmp_path / "runs"), "--mode", "offline"])
    with pytest.raises(SystemExit, match="1"):
        wandb_send.main()
    assert list(kept(tmp_path / "runs")) == [folder.name]
    assert f"not sent: {tmp_path / 'runs' / '0'} holds no run.json" in capsys.readouterr().err
