"""Records are computed again from their raw steps, and compared with each other."""

import json
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import baseline, tiny
from scipy import stats

from drafters.ngram import NGram
from drafters.oracle import Oracle
from drafters.small_lm import SmallLM
from specbench import analysis, guards, metrics, profiling, provenance, record, verify
from specbench import compare as compare_module
from specbench.comparison import Arm, Settings
from specbench.errors import RunError
from specbench.prompts import Conversation, PromptSet
from specbench.runner import Cell, Plan, run
from specbench.sampling import Sampling
from specbench.stopping import StopRule

CONVERSATIONS = tuple(
    Conversation(f"c{i}", ("chat", "code")[i % 2], (f"one two {i} one two", "and again")[: 1 + i % 2]) for i in range(9)
)


def config(sampling: Sampling, **settings) -> dict:
    asked = {"max_new_tokens": 12, "stop": {}, "seed": 0, "batch_size": 1, "drafter": {}, **settings}
    return {**asked, "sampling": vars(sampling)}


def measure(folder: Path, arms: list[Arm], sampling: Sampling, profiled: int = 2, repeats: int = 1, **settings):
    lm = tiny("llama")
    for arm in arms:
        arm.bind(lm)
    cells = [Cell(arm, {**config(sampling, **settings), "name": arm.name, "arm": i}) for i, arm in enumerate(arms)]
    plan = Plan(
        lm,
        PromptSet("nine", CONVERSATIONS),
        Settings(1, sampling, 0, StopRule(12), repeats),
        cells,
        folder,
        profiled=profiled,
    )
    return run(plan, baseline(lm), lambda arms, turns: nullcontext(lambda arm, step: None))


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Records of two methods, greedy and sampled."""
    home = tmp_path_factory.mktemp("records")
    for name, sampling in (("greedy", Sampling()), ("t1", Sampling(1.0))):
        small = SmallLM(tiny("llama", seed=1), proposal="sample")
        found = measure(home / name, [Arm("ngram", NGram(), 3), Arm("small_lm", small, 2)], sampling, repeats=2)
        assert [r["status"] for r in found] == ["ok", "ok"], [r["error"] for r in found]
        for made in found:
            (home / name / made["id"]).rename(home / name / made["drafter"]["name"])
    return home


@pytest.fixture
def copy(home, tmp_path) -> Path:
    shutil.copytree(home / "greedy" / "ngram", tmp_path / "copy")
    return tmp_path / "copy"


def said(capsys) -> str:
    found = capsys.readouterr()
    return " ".join((found.out + found.err).split())


@pytest.mark.parametrize("law", ["greedy", "t1"])
def test_an_honest_record_agrees(home, law, capsys):
    assert verify.main([str(home / law)]) == 0
    assert said(capsys).count("agrees with its steps") == 2


def rewrite(folder: Path, change) -> None:
    path = folder / record.RUN
    run_json = json.loads(path.read_text())
    change(run_json)
    path.write_text(json.dumps(run_json))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda r: r["metrics"].update(speedup=r["metrics"]["speedup"] * 1.01), "metrics.speedup is"),
        (lambda r: r["metrics"]["speedup_ci95"].__setitem__(0, 1.0), "metrics.speedup_ci95[0] is 1.0 in run.json"),
        (lambda r: r["metrics"]["accepted_length_histogram"].__setitem__(3, 99), "histogram[3] is 99 in run.json"),
        (lambda r: r["metrics"].pop("tokens_per_pass"), "metrics.tokens_per_pass is None in run.json"),
        (lambda r: r["metrics"]["lossless"].update(equal=3), "metrics.lossless.equal is 3 in run.json"),
        (lambda r: r["by_category"]["code"].update(acceptance_rate=0.9), "by_category.code.acceptance_rate is 0.9"),
        (lambda r: r["model"].update(predicted_speedup=3.0), "model.predicted_speedup is 3.0"),
        (lambda r: r["model"]["by_k"][1].update(bound=9.0), "model.by_k[1].bound is 9.0"),
        (lambda r: r["model"]["shares"].update(draft=0.0), "model.shares.draft is 0.0"),
        (lambda r: r.update(model=None), "model is None in run.json"),
        (
            lambda r: r["flags"].append({"flag": "changed-text", "message": ""}),
            "the flag changed-text is raised without a cause",
        ),
        (lambda r: r["metrics"]["lossless"].update(verdict="law", level=0.001), "metrics.lossless.verdict is law"),
    ],
)
def test_a_number_that_was_tampered_with_is_named(copy, change, named, capsys):
    rewrite(copy, change)
    assert verify.main([str(copy)]) == 1
    assert named in said(capsys)


def test_a_verdict_by_law_is_that_of_its_p_value(home, tmp_path, capsys):
    shutil.copytree(home / "t1" / "small_lm", tmp_path / "copy")
    rewrite(tmp_path / "copy", lambda r: r["metrics"]["lossless"]["p_values"].update(overlap=1e-9))
    assert verify.main([str(tmp_path / "copy")]) == 1
    words = said(capsys)
    assert "metrics.lossless.verdict is law in run.json and mismatch by the steps" in words
    assert "metrics.lossless.p_value is" in words


def test_a_verdict_that_is_not_that_of_its_margin_is_named(copy, capsys):
    prompts = pd.read_parquet(copy / record.PROMPTS)
    prompts.at[2, "lossless"] = "near-tie"
    prompts.at[2, "tokens"] = [*prompts.at[2, "tokens"][:-1], 0]
    prompts["divergence_margin"], prompts["divergence_tolerance"] = 0.5, 0.25
    prompts.to_parquet(copy / record.PROMPTS)
    assert verify.main([str(copy)]) == 1
    assert f"prompt {prompts.at[2, 'uid']} is said to be what its margin and tolerance do not make it" in said(capsys)


def test_a_prompt_that_is_said_to_be_equal_and_is_not_is_named(copy, capsys):
    prompts = pd.read_parquet(copy / record.PROMPTS)
    prompts.at[2, "lossless"] = "near-tie"
    prompts.to_parquet(copy / record.PROMPTS)
    assert verify.main([str(copy)]) == 1
    assert f"prompt {prompts.at[2, 'uid']} is said to be near-tie, and by its replies it is equal" in said(capsys)


def test_a_record_of_code_that_counted_otherwise_is_updated(copy, capsys):
    good = record.read(copy)

    def older(run_json):
        run_json["metrics"]["speedup_ci95"] = [0.1, 0.2]
        run_json["model"]["bound"] = 99.0
        run_json["conventions"] = {"lossless": "as it was judged then", "speedup_ci95": "otherwise"}
        run_json["flags"] = [{"flag": "busy-machine", "message": "then"}, {"flag": "few-prompts", "message": "no more"}]

    rewrite(copy, older)
    assert verify.main([str(copy), "--update"]) == 0
    assert f"{copy} is updated" in capsys.readouterr().out
    now = record.read(copy)
    for part in ("metrics", "model", "by_category"):
        assert now[part] == good[part]
    assert now["conventions"] == {**good["conventions"], "lossless": "as it was judged then"}
    assert [flag["flag"] for flag in now["flags"]] == [
        "busy-machine",
        *(flag["flag"] for flag in good["flags"] if flag["flag"] in guards.MEASURED),
    ]
    assert now["provenance"]["recomputed"]["code_sha256"] == provenance.code_sha256()
    assert {**now["provenance"], "recomputed": None} == {**good["provenance"], "recomputed": None}
    assert verify.main([str(copy)]) == 0


def test_a_record_whose_tables_contradict_each_other_is_not_updated(copy, capsys):
    prompts = pd.read_parquet(copy / record.PROMPTS)
    prompts.at[2, "tokens"] = [*prompts.at[2, "tokens"][:-1], 0]
    prompts.to_parquet(copy / record.PROMPTS)
    before = (copy / record.RUN).read_bytes()
    assert verify.main([str(copy), "--update"]) == 1
    assert "is left as it is: the method's reply to" in said(capsys)
    assert (copy / record.RUN).read_bytes() == before


def test_an_update_loses_no_model_whose_rounds_are_gone(copy):
    (copy / record.ROUNDS).unlink()
    before = (copy / record.RUN).read_bytes()
    with pytest.raises(RunError, match="cannot be read"):
        verify.update(copy)
    assert (copy / record.RUN).read_bytes() == before


def test_a_record_that_lacks_a_part_is_named(copy, capsys):
    rewrite(copy, lambda r: r.pop("by_category"))
    assert verify.main([str(copy)]) == 1
    assert f"the tables of {copy} cannot be read: KeyError: 'by_category'" in said(capsys)


def test_the_stored_records_agree_with_their_steps(capsys):
    """What the documentation quotes."""
    results = Path(__file__).parent.parent / "results"
    assert verify.main([str(results / "reference"), str(results / "training")]) == 0, said(capsys)[-2000:]


def test_a_flag_that_was_taken_away_is_named(tmp_path, capsys):
    (found,) = measure(tmp_path, [Arm("ngram", NGram(), 3)], Sampling(), profiled=0)
    assert "few-rounds" in {flag["flag"] for flag in found["flags"]}
    rewrite(tmp_path / found["id"], lambda r: r.update(flags=[]))
    assert verify.main([str(tmp_path)]) == 1
    assert "the flag few-rounds is missing" in said(capsys)


def test_the_stored_records_name_no_folder_of_a_machine():
    results = Path(__file__).parent.parent / "results"
    stored = record.find([results / "reference", results / "training"])
    words = {word for folder in stored for word in record.read(folder)["provenance"]["command"]}
    assert not {word for word in words if word.partition("=")[2].startswith("/") or word.startswith("/")}


@pytest.mark.parametrize("k", [2, 4, 7])
def test_every_length_is_timed_in_however_few_batches(tmp_path, k):
    (found,) = measure(tmp_path, [Arm("ngram", NGram(), k)], Sampling(), profiled=1)
    assert [p["k"] for p in found["model"]["by_k"]] == list(range(k + 1))


def test_two_arms_of_one_name_keep_their_own_profile(tmp_path):
    """One of them drafts twice as slowly."""

    class Slow(NGram):
        def propose(self, batch, k):
            time.sleep(0.02)
            return super().propose(batch, k)

    slow, fast = measure(tmp_path, [Arm("same", Slow(), 2), Arm("same", NGram(), 2)], Sampling())
    assert slow["id"] != fast["id"]
    assert slow["model"]["draft_seconds"]["2"] > 5 * fast["model"]["draft_seconds"]["2"]


def test_steps_that_were_tampered_with_are_noticed(copy, capsys):
    steps = pd.read_parquet(copy / record.STEPS)
    chosen = steps.index[(steps["arm"] == "method") & (steps["round"] == 2)][0]
    steps.loc[chosen, "accepted"] += 1
    steps.to_parquet(copy / record.STEPS)
    assert verify.main([str(copy)]) == 1
    assert "metrics.acceptance_rate is" in said(capsys)


def test_a_reply_that_is_not_what_was_committed_is_named(copy, capsys):
    prompts = pd.read_parquet(copy / record.PROMPTS)
    prompts.at[2, "tokens"] = prompts.at[2, "tokens"][:-1]
    prompts.to_parquet(copy / record.PROMPTS)
    assert verify.main([str(copy)]) == 1
    assert f"the method's reply to {prompts.at[2, 'uid']} is not what its steps committed" in said(capsys)


@pytest.mark.parametrize("file", [record.STEPS, record.PROMPTS, record.ROUNDS])
@pytest.mark.parametrize("harm", ["gone", "cut short"])
def test_tables_that_cannot_be_read_are_named(copy, file, harm, capsys):
    if harm == "gone":
        (copy / file).unlink()
    else:
        (copy / file).write_bytes((copy / file).read_bytes()[:50])
    assert verify.main([str(copy)]) == 1
    assert f"the tables of {copy} cannot be read" in said(capsys)


def test_a_failed_run_has_nothing_to_verify(copy, capsys):
    rewrite(copy, lambda r: r.update(status="failed", error="RunError: no"))
    assert verify.main([str(copy)]) == 2
    assert "the record of a failed run" in said(capsys)


def test_a_folder_without_records_is_refused(tmp_path, capsys):
    assert verify.main([str(tmp_path)]) == 2
    assert "no records of runs" in said(capsys)


# what a record says of its time


def test_shares_of_a_round_sum_to_one_and_every_k_is_predicted(home):
    for folder in record.find([home / "greedy", home / "t1"]):
        run_json = record.read(folder)
        found, k = run_json["model"], run_json["drafter"]["k"]
        assert sum(found["shares"].values()) == pytest.approx(1)
        assert set(found["shares"]) == {"draft", "verify", "accept", "bookkeeping"}
        assert [p["k"] for p in found["by_k"]] == list(range(k + 1))
        assert found["by_k"][0]["speedup"] == 1
        assert found["by_k"][k]["speedup"] == found["predicted_speedup"] <= found["bound"]
        assert list(found["draft_seconds"]) == [str(n) for n in range(1, k + 1)]
        assert found["residual"] == pytest.approx(run_json["metrics"]["speedup"] / found["predicted_speedup"] - 1)


def test_every_draft_length_is_timed_in_slices_that_all_share(home):
    rounds = pd.read_parquet(home / "greedy" / "ngram" / record.ROUNDS)
    assert rounds.groupby("arm")["slice"].nunique().to_dict() == {"baseline": 4, "method": 4}
    ours = rounds[rounds["arm"] == "method"].groupby("slice")["k"].agg(set).to_dict()
    assert ours == {0: {3}, 1: {1, 2}, 2: {3}, 3: {1, 2}}


@pytest.mark.parametrize("k", range(2, 10))
@pytest.mark.parametrize("batches", range(1, 13))
def test_every_shorter_draft_length_has_its_slices(k, batches):
    turns = [profiling._shorter(k, number, batches) for number in range(batches)]
    for n in range(1, k):
        assert sum(n in lengths for lengths in turns) >= min(batches, profiling.TURNS)
    assert {n for lengths in turns for n in lengths} == set(range(1, k))


def test_a_prediction_says_how_well_its_profile_knows_the_costs():
    """Of 8 slices, in which a round took between 1.2 and 1.8 times a plain one's time."""

    def rounds(k, seconds):
        parts = {"draft": 0.0, "accept": 0.0, "bookkeeping": 0.0}
        return pd.DataFrame(
            [{"slice": i, "k": k, "verify": s, **parts} for i, s in enumerate(seconds) for _ in range(5)]
        )

    ratios = np.array([1.2, 1.8, 1.3, 1.7, 1.4, 1.6, 1.5, 1.5])
    pace = np.array([1, 2, 1, 2, 1, 1, 3, 1])  # of the machine, which says nothing of the method
    relative = profiling.relative_rounds(rounds(2, ratios * pace), rounds(0, pace), 2)
    assert relative.tolist() == pytest.approx(ratios.tolist())
    error = ratios.std(ddof=1) / 8**0.5
    low, high = metrics.mean_interval(relative)
    assert low == pytest.approx(1.5 - stats.t.ppf(0.975, 7) * error, abs=0.2 * error)
    assert high == pytest.approx(1.5 + stats.t.ppf(0.975, 7) * error, abs=0.2 * error)
    table = pd.concat(
        [rounds(0, pace).assign(arm="baseline"), rounds(2, ratios * pace).assign(arm="method")], ignore_index=True
    )
    names = ("speedup", "tokens_per_pass", "round_seconds", "baseline_round_seconds")
    found = analysis.model(table, {"accepted_length_histogram": [1, 0, 1], **dict.fromkeys(names)}, 2)
    assert found["predicted_speedup"] == pytest.approx(2 / 1.5)
    assert found["predicted_speedup_ci95"] == pytest.approx([2 / high, 2 / low])


def test_costs_are_those_of_a_machine_at_its_mean_speed():
    """In the second slice all takes twice as long: that says nothing of the method."""

    def rounds(slice_, k, draft, verify):
        return pd.DataFrame(
            [{"slice": slice_, "k": k, "draft": draft, "verify": verify, "accept": 0.1, "bookkeeping": 0.1}] * 10
        )

    plain = pd.concat([rounds(0, 0, 0.0, 0.8), rounds(1, 0, 0.0, 1.6)])
    plain.loc[plain["slice"] == 1, ["accept", "bookkeeping"]] = 0.2
    ours = pd.concat([rounds(0, 2, 0.4, 1.0), rounds(1, 1, 0.4, 1.8)])
    found = profiling.costs(ours, plain, 2)
    assert found.plain == pytest.approx(1.5)
    assert found.drafts == pytest.approx({2: 0.4 * 1.5, 1: 0.4 * 0.75})
    assert found.passes == pytest.approx({1: 0.8 * 1.5, 3: 1.0 * 1.5, 2: 1.8 * 0.75})
    assert found.rest == pytest.approx(0.2 * 1.5)
    assert sum(profiling.shares(ours, 2).values()) == pytest.approx(1)


def test_without_a_profile_nothing_is_predicted(tmp_path):
    (found,) = measure(tmp_path, [Arm("ngram", NGram(), 3)], Sampling(), profiled=0)
    assert found["model"] is None
    assert not (tmp_path / found["id"] / record.ROUNDS).exists()
    assert verify.main([str(tmp_path)]) == 0


def test_a_drafter_that_cannot_be_profiled_is_measured_all_the_same(tmp_path):
    class Tired(NGram):
        """Works at the length it is measured with, and at no other."""

        def propose(self, batch, k):
            if k == 1:
                raise RuntimeError("too short")
            return super().propose(batch, k)

    tired, fine = measure(tmp_path, [Arm("tired", Tired(), 2), Arm("ngram", NGram(), 2)], Sampling())
    assert (tired["status"], tired["model"]) == ("ok", None)
    said = {flag["flag"]: flag["message"] for flag in tired["flags"]}
    assert said["not-seen"] == "the parts of its rounds could not be timed: RuntimeError: too short"
    assert fine["model"] is not None


def test_the_oracle_is_profiled_with_the_replies_it_knows(tmp_path):
    (found,) = measure(tmp_path, [Arm("oracle", Oracle(), 2)], Sampling())
    assert found["model"]["bound"] == pytest.approx(found["model"]["predicted_speedup"], rel=0.2)


# one against another


def test_a_run_against_itself_is_even(home, capsys):
    folder = str(home / "greedy" / "ngram")
    assert compare_module.main([folder, folder]) == 0
    text = said(capsys)
    assert "1.00x 1.00–1.00" in text
    assert "+0.00 +0.00–+0.00" in text
    assert "which of ngram k=3 and ngram k=3 is faster cannot be told" in text


def test_methods_are_compared_prompt_by_prompt(home):
    runs = [record.read(home / "greedy" / name) for name in ("ngram", "small_lm")]
    steps = [pd.read_parquet(home / "greedy" / name / record.STEPS) for name in ("ngram", "small_lm")]
    found = compare_module.compare(*steps)
    first, second = (r["metrics"] for r in runs)
    assert found["units"] == 9
    assert found["speedup"] == pytest.approx(first["speedup"] / second["speedup"])
    assert found["tokens_per_pass"] == pytest.approx(first["tokens_per_pass"] - second["tokens_per_pass"])
    low, high = found["speedup_ci95"]
    assert low < found["speedup"] < high
    back = compare_module.compare(*steps[::-1])
    assert back["speedup"] == pytest.approx(1 / found["speedup"])
    assert back["tokens_per_pass"] == pytest.approx(-found["tokens_per_pass"])


def test_pairing_takes_away_what_prompts_share():
    """Two methods that differ by a tenth on every prompt, prompts that differ tenfold: the difference is certain."""

    def steps(factor):
        return pd.DataFrame(
            {
                "arm": arm,
                "unit": unit,
                "batch": unit,
                "round": round_,
                "uid": f"p{unit}",
                "committed": 1,
                "seconds": seconds if arm == "baseline" else factor * seconds * (0.5 if unit % 2 else 0.2),
            }
            for unit, seconds in enumerate([1.0, 2.0, 4.0, 10.0] * 3)
            for arm in ("baseline", "method")
            for round_ in (0, 1)
        )

    found = compare_module.compare(steps(1.0), steps(1.1))
    assert found["speedup"] == pytest.approx(1.1)
    assert found["speedup_ci95"] == pytest.approx([1.1, 1.1])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda r: r["dataset"].update(sha256="f" * 64), "prompts (nine "),
        (lambda r: r["target"].update(files={"weights": "0"}), "target (tiny-llama and tiny-llama)"),
        (lambda r: r["target"].update(dtype="bfloat16"), "precision (float32 and bfloat16)"),
        (lambda r: r["target"].update(quant="int8"), "precision (float32 and float32 with int8 weights)"),
        (lambda r: r["target"].update(device="cuda"), "device (cpu and cuda)"),
        (lambda r: r["config"]["sampling"].update(temperature=0.5), "sampling (temperature=0.0"),
        (lambda r: r["config"].update(max_new_tokens=13), "token rules (max_new_tokens=12"),
        (lambda r: r["config"].update(stop={"strings": ["x"]}), "token rules (max_new_tokens=12, stop={}"),
        (lambda r: r["config"].update(batch_size=2), "batch size (1 and 2)"),
    ],
)
def test_unlike_runs_are_refused_by_what_differs(home, copy, change, named, capsys):
    rewrite(copy, change)
    assert compare_module.main([str(home / "greedy" / "small_lm"), str(copy)]) == 2
    text = said(capsys)
    assert "these runs cannot be compared: they differ in" in text
    assert named in text


def test_runs_of_other_code_are_compared_with_a_word(home, copy, capsys):
    rewrite(copy, lambda r: r["provenance"].update(code_sha256="0"))
    assert compare_module.main([str(home / "greedy" / "small_lm"), str(copy)]) == 0
    assert "the runs are of different code: that may be part of the difference" in said(capsys)


def test_sampled_and_greedy_runs_are_not_compared(home, capsys):
    assert compare_module.main([str(home / "greedy" / "ngram"), str(home / "t1" / "ngram")]) == 2
    assert "sampling (temperature=0.0" in said(capsys)
