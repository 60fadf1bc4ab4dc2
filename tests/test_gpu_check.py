import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import break_cache, mutated, tiny

import specbench.decoding
from specbench.graphs import _Recorded
from specbench.targets import TINY
from specbench.verification import verify

ROOT = Path(__file__).parent.parent
DRY = ("--device", "cpu", "--size", "tiny")
ABSENT = ("hydra", "omegaconf", "wandb", "datasets")


@pytest.fixture
def script():
    """The script as a module of its own, so that what a test changes in it ends with the test."""
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.NEW = 8
    return module


def check(script, monkeypatch, out, *options, families=("llama",), dtypes=("float32",)):
    """The exit code and what was written, for some families and precisions."""
    monkeypatch.setattr(script, "TINY", {family: TINY[family] for family in families})
    monkeypatch.setattr(script, "DTYPES", dtypes)
    code = script.main([*DRY, "--out", str(out), *options])
    assert [path.name for path in out.iterdir()] == ["gpu_check.json"]  # nothing half-written beside it
    return code, json.loads((out / "gpu_check.json").read_text())


def expected_numbers():
    names = {"memory, read by a sum": "GB/s", "memory, read and written by a copy": "GB/s"}
    for batch, widths in {1: (1, 2, 3, 4, 5, 8, 16), 8: (1, 2, 3, 4, 5)}.items():
        for width in widths:
            names[f"forward, batch {batch}, {width} tokens a row"] = "ms"
            names[f"forward, batch {batch}, {width} tokens a row: of memory bandwidth"] = "%"
        names[f"forward, batch {batch}, 5 tokens over 1"] = "x"
        names[f"plain decoding, batch {batch}"] = "tokens/s"
        for drafter in ("none", "ngram", "oracle", "small_lm") if batch == 1 else ("none", "ngram", "oracle"):
            label = f"{drafter}, batch {batch}"
            names |= {f"{label}: round": "ms", f"{label}: tokens per pass": "tokens"}
            for share in ("outside forwards", *(f"split, {part}" for part in specbench.decoding.PARTS)):
                names[f"{label}: {share}"] = "%"
            if drafter in ("ngram", "oracle"):
                names[f"{label}: speedup, every draft right"] = "x"
    names["plain decoding, batch 1, of the bandwidth bound"] = "%"
    names["small_lm, batch 1: a draft step over a target step"] = "x"
    return names


def test_a_dry_run_measures_everything(script, monkeypatch, tmp_path, capsys):
    code, found = check(script, monkeypatch, tmp_path, families=("gemma3",), dtypes=("float32", "bfloat16"))
    shown = capsys.readouterr().out
    assert code == 0
    assert found["sound"]
    assert found["finished"]
    assert all(line["ok"] for line in found["checks"])
    assert {name: number["unit"] for name, number in found["numbers"].items()} == expected_numbers()
    assert all(name in shown for name in found["numbers"])
    held = {name: number["verdict"] for name, number in found["numbers"].items() if number["target"]}
    assert len(held) == 2 + 1 + 7  # verify passes, plain decoding, outside forwards
    assert held["plain decoding, batch 1, of the bandwidth bound"] == "below target"  # which is no failure
    assert found["numbers"]["oracle, batch 8: tokens per pass"]["value"] == 19 / 4  # 20 tokens, the first by prefill
    assert set(found["elapsed_s"]) == {"correctness", "speed"}
    assert found["torch"] == torch.__version__


def test_every_family_precision_and_drafter_is_checked(script, monkeypatch, tmp_path):
    assert script.TINY is TINY
    assert script.DTYPES == ("float32", "bfloat16")
    monkeypatch.setattr(script, "check_text", lambda *args: "")
    code, found = check(script, monkeypatch, tmp_path, "--skip-speed", families=TINY, dtypes=script.DTYPES)
    assert code == 0
    lines = {line["name"] for line in found["checks"]}
    for label in (f"{family} {dtype}" for family in TINY for dtype in script.DTYPES):
        drafters = ("ngram", "suffix", "oracle, 70 % right", "small_lm", "small_lm, proposal=sample")
        assert lines > {f"{label}: {name}" for name in (*drafters, "none, batch 3 as batch 1", "recorded forwards")}
    assert {"qwen3 float32: engine=plain", "qwen3 float32: suffix, temperature 1"} < lines


def test_stale_keys_fail(script, monkeypatch, tmp_path, capsys):
    break_cache(monkeypatch, "write", ("index_copy_", "index_add_"))
    code, found = check(script, monkeypatch, tmp_path, "--skip-speed")
    assert code == 1
    assert not found["sound"]
    assert "cannot take tokens back" in found["checks"][0]["note"]
    assert "FAILED llama float32" in capsys.readouterr().out


def test_accepting_wrong_drafts_fails(script, monkeypatch, tmp_path):
    bug = ("own[:, :drafted] == draft.tokens", "own[:, :drafted] >= 0")
    monkeypatch.setattr(specbench.decoding, "verify", mutated(verify, bug))
    code, found = check(script, monkeypatch, tmp_path, "--skip-speed")
    assert code == 1
    failed = {line["name"]: line["note"] for line in found["checks"] if not line["ok"]}
    assert "not plain decoding's from token" in failed["llama float32: small_lm"]
    assert "llama float32: ngram, temperature 1" in failed
    assert "llama float32: engine=plain" not in failed


def test_a_replay_of_old_inputs_fails(script, monkeypatch):
    lm = tiny("llama")
    assert script.check_recording(lm) == "bit for bit"
    monkeypatch.setattr(script.CausalLM, "__init__", skip_rollback(script.CausalLM.__init__))
    bug = ("held.copy_(given, non_blocking=True)", "pass")
    monkeypatch.setattr(_Recorded, "__call__", mutated(_Recorded.__call__, bug))
    with pytest.raises(script.CheckError, match="a replay of 1 tokens a row is off by"):
        script.check_recording(lm)


def skip_rollback(init):
    """The constructor without the check at load, which would find the bug first."""
    return mutated(init, ("check_rollback(self, whole).bytes_per_slot", "1"))


def test_what_was_measured_before_a_break_is_kept(script, monkeypatch, tmp_path, capsys):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of\nmemory")

    monkeypatch.setattr(script, "correctness", lambda *args: None)
    monkeypatch.setattr(script, "time_passes", full)
    code, found = check(script, monkeypatch, tmp_path)
    assert code == 1
    assert found["failure"] == "speed: OutOfMemoryError: CUDA out of memory"
    assert "memory, read by a sum" in found["numbers"]
    assert "broke off: speed: OutOfMemoryError" in capsys.readouterr().out


def test_a_text_that_stops_counting_is_wrong(script):
    (request,) = script.counting(script.SIZES["tiny"], 1)
    assert script.check_counting([request], [request.reference]) == ""
    with pytest.raises(script.CheckError, match="row 0 goes on with"):
        script.check_counting([request], [request.reference[1:]])


def test_full_size_without_a_gpu_is_refused_from_any_folder(tmp_path):
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), "--device", "cpu", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "bash scripts/gpu_check.sh --device cpu --size tiny" in done.stderr
    assert not (tmp_path / "out").exists()


def test_hydra_wandb_and_datasets_are_not_needed():
    code = f"import sys; sys.modules |= dict.fromkeys({ABSENT}); import gpu_check"
    path = os.pathsep.join(map(str, (ROOT, ROOT / "scripts")))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
