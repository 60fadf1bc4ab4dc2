import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import CommandLine, baseline, put_outside, tiny

from drafters.ngram import NGram
from drafters.scripted import Scripted
from drafters.small_lm import SmallLM
from drafters.suffix import Suffix
from specbench import __main__, configured, decoding, law, losslessness, provenance, record
from specbench.comparison import Arm, Settings
from specbench.errors import RunError
from specbench.load import MachineLoad
from specbench.losslessness import Divergence
from specbench.prompts import Conversation, PromptSet
from specbench.runner import Cell, Plan, run
from specbench.sampling import Sampling
from specbench.stopping import StopRule
from specbench.targets import load_hf

ROOT = Path(__file__).parent.parent

CONVERSATIONS = (Conversation("a", "chat", ("one two one", "and two?")), Conversation("b", "code", ("abc abd abc",)))

OUTSIDE = {
    "outside_runner.py": """
        import time
        from pathlib import Path

        from drafters.ngram import NGram


        class Mine(NGram):
            def __init__(self, parts=()):
                super().__init__()

            @classmethod
            def made(cls):
                return cls()


        class NeedsWeights(NGram):
            def bind(self, target):
                self.weights = Path("weights.txt").read_text()

            def describe(self):
                return {"weights": self.weights}


        class Sleeps(NGram):
            def propose(self, batch, k):
                time.sleep(600)


        class ToBeMended(NGram):
            def propose(self, batch, k):
                raise ArithmeticError("it was typed in haste")


        class TellsOfPaths(NGram):
            def describe(self):
                return {"weights": Path("weights.txt")}
    """,
    "outside_part.py": "class Part:\n    pass\n",
    "conf/drafter/mine.yaml": "_target_: outside_runner.Mine",
    "conf/drafter/made.yaml": "_target_: outside_runner.Mine.made",
    "conf/drafter/of_parts.yaml": "_target_: outside_runner.Mine\nparts:\n  - _target_: outside_part.Part",
    "conf/drafter/needs_weights.yaml": "_target_: outside_runner.NeedsWeights",
    "conf/drafter/sleeps.yaml": "_target_: outside_runner.Sleeps",
    "conf/drafter/to_be_mended.yaml": "_target_: outside_runner.ToBeMended",
    "conf/drafter/tells_of_paths.yaml": "_target_: outside_runner.TellsOfPaths",
}


class Breaks(NGram):
    def propose(self, batch, k):
        raise ArithmeticError("the weights are made of cheese")


@pytest.fixture(autouse=True)
def command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with CommandLine():
        yield


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results"


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """Options that add a folder of configurations from outside, whose code can be imported."""
    return put_outside(OUTSIDE, tmp_path / "outside", monkeypatch)


def forget_outside():
    for name in ("outside_runner", "outside_part"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text('{"turns": "One two one two."}\n{"turns": "Say hi."}\n')
    return path


@pytest.fixture
def asked(prompts, results):
    """A small run; what is added after it wins."""
    return [
        "target=tiny",
        "dtype=float32",
        "device=cpu",
        "k=3",
        "max_new_tokens=6",
        "dataset=jsonl",
        f"dataset.path={prompts}",
        f"results_dir={results}",
    ]


def records(results):
    return [record.read(folder) for folder in record.find([results])]


def measure(results, *drafters, sampling=None, profiled=0, engines=None):
    """The records of ``drafters`` at k=3 on a tiny model."""
    lm = tiny("llama")
    cells = []
    for number, drafter in enumerate(drafters):
        drafter.bind(lm)
        cells.append(Cell(Arm(f"{number}-{type(drafter).__name__}", drafter, 3), {"drafter": {"number": number}}))
    settings = Settings(1, sampling or Sampling(), 0, StopRule(8))
    plan = Plan(lm, PromptSet("two", CONVERSATIONS), settings, cells, results, profiled=profiled, engines=engines)
    return run(plan, baseline(lm), lambda arms, turns: nullcontext(lambda arm, step: None))


# what is to be doubted


def test_doubts_about_machine_prompts_and_baseline_are_in_the_record(results, monkeypatch):
    """Each from where it is seen to run.json; what raises it is tested in test_guards."""
    seconds = {"specbench float32": [2.0], "another float32": [1.0]}
    engines = {"provenance": {"machine": provenance.machine()}, "compared": {"plain decoding": {"seconds": seconds}}}
    clocks = iter(({"cpu_mhz": 3000.0}, {"cpu_mhz": 1000.0}))
    monkeypatch.setattr(provenance, "clocks", lambda: next(clocks))
    monkeypatch.setattr(MachineLoad, "warning", lambda self: "other work took half of the processor")
    monkeypatch.setattr(law, "surprise", lambda target, prompts: 99.0)
    monkeypatch.setattr(NGram, "learned_from", lambda self: ["one two one"])
    (found,) = measure(results, NGram(), engines=engines)
    raised = {flag["flag"] for flag in record.read(results / found["id"])["flags"]}
    assert raised >= {"busy-machine", "throttled", "slow-baseline", "synthetic-prompts", "seen-in-training"}


# the model of the speedup


class Paid(Scripted):
    """Takes 3 ms a draft, by a clock that is set by hand."""

    def __init__(self, clock, script):
        super().__init__(script)
        self.clock = clock

    def propose(self, batch, k):
        self.clock[0] += 0.003 * k
        return super().propose(batch, k)


def test_a_scripted_drafter_with_planted_costs_is_predicted_by_hand(results, monkeypatch):
    """A pass takes 18 ms and 2 for each token of a row."""
    clock = [0.0]
    monkeypatch.setattr(decoding, "perf_counter", lambda: clock[0])
    lm = tiny("llama")
    forward = lm.forward

    def paid(tokens, *args, **how):
        clock[0] += 0.018 + 0.002 * tokens.shape[1]
        return forward(tokens, *args, **how)

    monkeypatch.setattr(lm, "forward", paid)
    (found,) = measure(results, Paid(clock, [(3, 3), (3, 0), (3, 1)]), profiled=8)
    model, metrics = found["model"], found["metrics"]
    assert model["plain_seconds"] == pytest.approx(0.020)
    assert model["draft_seconds"] == pytest.approx({"1": 0.003, "2": 0.006, "3": 0.009})
    assert model["pass_seconds"] == pytest.approx({"1": 0.020, "2": 0.022, "3": 0.024, "4": 0.026})
    rounds = metrics["accepted_length_histogram"]
    survived = [sum(rounds[i:]) / sum(rounds) for i in (1, 2, 3)]
    assert survived == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    for k, seconds in ((1, 0.025), (2, 0.030), (3, 0.035)):
        by_hand = (1 + sum(survived[:k])) * 0.020 / seconds
        assert model["by_k"][k]["speedup"] == pytest.approx(by_hand)
        assert model["by_k"][k]["bound"] == pytest.approx((k + 1) * 0.020 / seconds)
    assert model["predicted_speedup"] == model["by_k"][3]["speedup"]
    # what was measured: tokens over 35 ms a round, and texts that end within a round leave fewer than was accepted
    assert metrics["speedup"] == pytest.approx(metrics["tokens_per_pass"] * 0.020 / 0.035)
    assert model["residual"] == pytest.approx(metrics["tokens_per_pass"] / (1 + sum(survived)) - 1)
    assert model["shares"] == pytest.approx({"draft": 9 / 35, "verify": 26 / 35, "accept": 0.0, "bookkeeping": 0.0})


# verdicts


def test_sampled_drafts_are_judged_by_law_and_are_never_a_mismatch(results):
    drafter = SmallLM(tiny("llama", seed=1), proposal="sample")
    (found,) = measure(results, drafter, sampling=Sampling(temperature=1.0))
    said = found["metrics"]["lossless"]
    assert said["verdict"] == "untested"  # so few tokens say nothing
    assert said["places"] == sum(found["prompts"]["turns"] and 8 for _ in range(3))
    judged = pd.read_parquet(results / found["id"] / record.PROMPTS)["lossless"]
    assert set(judged) <= {"law", "equal"}
    assert "law" in set(judged)


@pytest.mark.parametrize("proposal", ["greedy", "sample"])
def test_greedy_drafts_in_float32_are_equal(results, proposal):
    (found,) = measure(results, SmallLM(tiny("llama", seed=1), proposal=proposal))
    assert found["metrics"]["lossless"] == {
        "verdict": "equal",
        "prompts": 3,
        "equal": 3,
        "near_ties": 0,
        "mismatches": 0,
        "largest_near_tie_margin": None,
        "largest_mismatch_margin": None,
    }


def test_deterministic_drafts_say_what_plain_sampling_says(results):
    (found,) = measure(results, NGram(), sampling=Sampling(temperature=1.0))
    assert found["metrics"]["lossless"]["verdict"] == "equal"


def test_an_arm_that_breaks_is_a_failed_record_beside_a_good_one(results):
    broken, good = measure(results, Breaks(), NGram())
    assert (broken["status"], broken["error"]) == ("failed", "ArithmeticError: the weights are made of cheese")
    assert (good["status"], good["error"]) == ("ok", None)
    assert "metrics" not in broken
    assert sorted(run["status"] for run in records(results)) == ["failed", "ok"]


def test_records_come_back_in_the_order_asked_with_their_folders(results):
    found = measure(results, Suffix(), NGram())
    assert [run["drafter"]["name"] for run in found] == ["0-Suffix", "1-NGram"]
    assert [run["folder"] for run in found] == [str(results / run["id"]) for run in found]


def test_a_reply_that_several_arms_gave_is_judged_once(results, monkeypatch):
    judged = []
    monkeypatch.setattr(losslessness, "divergence", lambda target, uid, *question: judged.append(uid))
    ours, theirs = measure(results, Suffix(), NGram())
    assert ours["metrics"]["lossless"]["prompts"] == theirs["metrics"]["lossless"]["prompts"] == len(judged)
    assert len(set(judged)) == len(judged)


def test_a_method_that_changes_the_text_is_named_as_one(asked, results, monkeypatch, capsys):
    monkeypatch.setattr(losslessness, "divergence", lambda *question: Divergence(0, margin=9.0, tolerance=0.0))
    __main__.main(asked)
    said = capsys.readouterr().out
    assert "changed-text: it changed the text: its speedup is not that of a lossless method" in said
    assert "MISMATCH 2/2" in said
    assert records(results)[0]["metrics"]["lossless"]["largest_mismatch_margin"] == 9.0


# what an id depends on


USUAL: list[str] = []


@pytest.fixture
def usual_ids(ids):
    """Ids of what is asked with nothing added; found once."""
    return USUAL or USUAL.extend(ids()) or USUAL


@pytest.fixture
def ids(asked, monkeypatch):
    """Ids of the cells that a command line asks for; nothing is decoded."""

    def of(*more, flags=()):
        found = []

        def only_asked(plan, *_):
            found.extend(record.run_id(plan.question(cell)) for cell in plan.cells)
            raise RunError("asked")

        with monkeypatch.context() as patch:
            patch.setattr(configured, "run", only_asked)
            assert __main__.main([*flags, *asked, *more]) == 1
        return found

    return of


def test_id_that_is_asked_for_is_that_of_the_record(asked, usual_ids, results):
    assert __main__.main(asked) == 0
    assert [run["id"] for run in records(results)] == usual_ids


@pytest.mark.parametrize(
    "change",
    [
        "k=2",
        "seed=1",
        "max_new_tokens=7",
        "batch_size=2",
        "stop.token_ids=[7]",
        "stop.strings=[x]",
        "sampling=t1",
        "dtype=bfloat16",
        "drafter.max_n=3",
    ],
)
def test_id_changes_with(ids, usual_ids, change):
    assert ids(change) != usual_ids


def test_id_changes_with_what_the_prompts_say(ids, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"turns": "Say hi."}')
    before = ids("dataset.path=mine.jsonl")
    (tmp_path / "mine.jsonl").write_text('{"turns": "Say ho."}')
    assert ids("dataset.path=mine.jsonl") != before


def test_id_does_not_change_with_how_a_run_is_carried_out(ids, usual_ids):
    assert ids("results_dir=elsewhere", "force=true") == usual_ids


@pytest.mark.skipif(torch.cuda.is_available(), reason="there auto is another device")
def test_id_under_device_auto_is_that_of_what_it_resolves_to(ids, usual_ids):
    assert ids("device=auto") == usual_ids


@pytest.mark.parametrize(("native", "resolved"), [(True, "bfloat16"), (False, "float32")])
def test_id_under_dtype_auto_is_that_of_what_it_resolves_to(ids, monkeypatch, native, resolved):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    assert ids("dtype=auto") == ids(f"dtype={resolved}")


def test_id_does_not_depend_on_the_arms_beside(ids, usual_ids):
    assert ids("+drafter@compare.suffix=suffix", "+drafter@compare.none=none")[:1] == usual_ids


def test_id_of_an_arm_beside_is_that_of_the_same_arm_asked_for(ids, usual_ids):
    assert ids("drafter=suffix", "+drafter@compare.ngram=ngram")[1:] == usual_ids


def test_id_of_a_drafter_that_drafts_nothing_does_not_depend_on_k(ids):
    assert ids("drafter=none", "k=2") == ids("drafter=none", "k=5")


def add_comment(path):
    path.write_text(path.read_text() + "\n# another version\n")


def test_outside_drafter_whose_source_changed_is_run_again(outside, asked, results, tmp_path, capsys):
    asked = [*outside, *asked, "drafter=mine"]
    assert __main__.main(asked) == 0
    assert __main__.main(asked) == 0
    assert "already finished" in capsys.readouterr().err
    add_comment(tmp_path / "outside" / "outside_runner.py")
    forget_outside()
    assert __main__.main(asked) == 0
    assert "already finished" not in capsys.readouterr().err
    assert len(records(results)) == 2


def test_id_changes_with_outside_code_that_is_named_in_a_list(outside, ids, tmp_path):
    before = ids("drafter=of_parts", flags=outside)
    add_comment(tmp_path / "outside" / "outside_part.py")
    forget_outside()
    assert ids("drafter=of_parts", flags=outside) != before


def test_id_changes_with_the_source_of_a_class_method_named_as_target(outside, ids, tmp_path):
    before = ids("drafter=made", flags=outside)
    add_comment(tmp_path / "outside" / "outside_runner.py")
    forget_outside()
    assert before
    assert ids("drafter=made", flags=outside) != before


def test_drafter_made_by_an_outside_class_method_runs(outside, asked, results):
    assert __main__.main([*outside, *asked, "drafter=made"]) == 0


def edit_json(path, **more):
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


@pytest.mark.parametrize(
    ("file", "edit"),
    [
        ("generation_config.json", lambda path: edit_json(path, eos_token_id=[1, 2])),
        ("config.json", lambda path: edit_json(path, rms_norm_eps=1e-5)),
        ("chat_template.jinja", lambda path: path.write_text(path.read_text().replace("<turn>", "<turn>the "))),
    ],
    ids=["end ids", "config", "chat template"],
)
def test_id_changes_with_a_file_of_a_local_target(tmp_path, file, edit):
    lm = tiny("llama", engine="plain")
    lm.model.save_pretrained(tmp_path / "model")
    lm.tokenizer.save_pretrained(tmp_path / "model")

    def id_of_run():
        target = load_hf("./model", dtype="float32", device="cpu")
        settings = Settings(1, Sampling(), 0, StopRule(8))
        cell = Cell(Arm("ngram", NGram(), 3), {"target": {"path": "./model"}})
        return record.run_id(Plan(target, PromptSet("two", CONVERSATIONS), settings, [cell], tmp_path).question(cell))

    before = id_of_run()
    assert id_of_run() == before
    edit(tmp_path / "model" / file)
    assert id_of_run() != before


# finished already


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Results of one finished cell."""
    results = tmp_path_factory.mktemp("finished")
    measure(results, NGram())
    return results


def again(finished, results, caplog, change=lambda origin: None):
    """What is said when a finished cell is asked for again, after a change of its record's provenance."""
    shutil.copytree(finished, results)
    (folder,) = record.find([results])
    stored = json.loads((folder / record.RUN).read_text())
    change(stored["provenance"])
    (folder / record.RUN).write_text(json.dumps(stored))
    caplog.set_level(logging.INFO, logger="specbench")
    (found,) = measure(results, NGram())
    assert found["provenance"] == stored["provenance"]
    (line,) = caplog.messages
    return line, folder


def test_finished_cell_is_said_to_be_finished_and_no_more(finished, results, caplog):
    line, folder = again(finished, results, caplog)
    assert line == f"0-NGram k=3 is already finished ({folder})"


THREADS = provenance.machine()["threads"]
OTHER_CODE = "0" * 64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda o: o.update(code_sha256=OTHER_CODE, git=None), "other code (specbench "),
        (
            lambda o: o.update(code_sha256=OTHER_CODE, git={"commit": "abcdef0123456789"}),
            "other code (commit abcdef0123)",
        ),
        (lambda o: o["packages"].update(torch="1.0"), f"torch 1.0 (now {provenance.packages()['torch']})"),
        (lambda o: o["machine"].update(threads=THREADS + 1), f"threads {THREADS + 1} (now {THREADS})"),
        (lambda o: o["machine"].update(tpu="v9"), "tpu v9 (now None)"),
        (lambda o: o["machine"].pop("threads"), f"threads None (now {THREADS})"),
    ],
    ids=["specbench", "commit", "torch", "threads", "more", "less"],
)
def test_finished_cell_says_what_differs_and_how_to_run_it_again(finished, results, caplog, change, said):
    line, folder = again(finished, results, caplog, change)
    assert line == f"0-NGram k=3 is already finished ({folder}); it was made with {line.partition('made with ')[2]}"
    assert said in line
    assert line.endswith(": force=true runs it again")


# what cannot be stored


def test_a_record_that_cannot_be_stored_does_not_lose_the_others(results, monkeypatch):
    write, refused = record.write, []

    def full_for_the_first(results_dir, run_json, *tables):
        if not refused:
            refused.append(run_json["id"])
            raise RunError("no room")
        return write(results_dir, run_json, *tables)

    monkeypatch.setattr(record, "write", full_for_the_first)
    found = measure(results, NGram(), Suffix(), NGram(max_n=2))
    assert [(run["status"], run["error"]) for run in found] == [("failed", "no room"), ("ok", None), ("ok", None)]
    kept = records(results)
    assert sorted(run["drafter"]["name"] for run in kept) == ["1-Suffix", "2-NGram"]
    assert {run["status"] for run in kept} == {"ok"}


def test_full_disk_fails_the_run_names_the_folder_and_leaves_nothing_half_written(asked, results, monkeypatch, capsys):
    def no_space(self, path, **how):
        Path(path).write_bytes(b"PAR1")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", no_space)
    assert __main__.main(asked) == 1
    said = capsys.readouterr().err
    assert f"could not write the record to {results}" in said
    assert "No space left on device" in said
    assert list(results.iterdir()) == []


def test_drafter_that_could_not_be_bound_leaves_only_the_good_record_once_it_works(outside, asked, results, tmp_path):
    asked = [*outside, *asked, "drafter=needs_weights"]
    assert __main__.main(asked) == 1
    (failed,) = records(results)
    assert (failed["status"], failed["error"].partition(":")[0]) == ("failed", "FileNotFoundError")
    (tmp_path / "weights.txt").write_text("found")
    assert __main__.main(asked) == 0
    (good,) = records(results)
    assert (good["status"], good["drafter"]["weights"]) == ("ok", "found")
    assert [path.name for path in results.iterdir()] == [good["id"]]


def test_a_failed_record_goes_when_the_drafter_was_mended(outside, asked, results, tmp_path):
    code = tmp_path / "outside" / "outside_runner.py"
    asked = [*outside, *asked, "drafter=to_be_mended"]
    assert __main__.main(asked) == 1
    (failed,) = records(results)
    code.write_text(code.read_text() + "\n# tried again, in vain\n")
    forget_outside()
    assert __main__.main(asked) == 1
    (again,) = records(results)
    assert again["id"] != failed["id"]
    mended = "return super().propose(batch, k)"
    code.write_text(code.read_text().replace('raise ArithmeticError("it was typed in haste")', mended))
    forget_outside()
    assert __main__.main(asked) == 0
    (good,) = records(results)
    assert good["status"] == "ok"


def test_a_failed_record_of_another_question_stays(results):
    run = {"config": {"k": 1}, "target": {"name": "a"}, "dataset": {"name": "b"}}
    for id_, other in {"same": {}, "k": {"config": {"k": 2}}, "target": {"target": {"name": "c"}}}.items():
        record.write(results, {"id": id_, "status": "failed", **run, **other})
    record.write(results, {"id": "good", "status": "ok", **run})
    record.discard_failed(results, {"id": "new", **run})
    assert sorted(path.name for path in results.iterdir()) == ["good", "k", "target"]


def test_a_drafter_whose_facts_no_record_can_hold_fails_alone(outside, asked, results):
    assert __main__.main([*outside, *asked, "drafter=ngram", "+drafter@compare.tells_of_paths=tells_of_paths"]) == 1
    found = {run["drafter"]["name"]: run for run in records(results)}
    assert found["ngram"]["status"] == "ok"
    assert (found["tells_of_paths"]["status"], found["tells_of_paths"]["error"].partition(":")[0]) == (
        "failed",
        "TypeError",
    )


# killed


def test_killed_sweep_keeps_what_is_finished_and_goes_on_from_there(outside, asked, results, tmp_path, capsys):
    command = [sys.executable, "-m", "specbench", "-m", *outside, *asked, "drafter=none,ngram,sleeps,suffix"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "outside"), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while len(list(results.glob(f"[!.]*/{record.RUN}"))) < 2 and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    kept = {run["drafter"]["name"]: run for run in records(results)}
    assert {name: run["status"] for name, run in kept.items()} == {"none": "ok", "ngram": "ok"}
    written = {run["id"]: (results / run["id"] / record.RUN).stat().st_mtime_ns for run in kept.values()}

    assert __main__.main(["-m", *outside, *asked, "drafter=none,ngram,suffix"]) == 0
    assert capsys.readouterr().err.count("already finished") == 2
    after = {run["drafter"]["name"]: run for run in records(results)}
    assert sorted(after) == ["ngram", "none", "suffix"]
    assert {id_: (results / id_ / record.RUN).stat().st_mtime_ns for id_ in written} == written
    assert {name: after[name] for name in kept} == kept
