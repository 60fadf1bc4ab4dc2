"""Hand-made records for the tests of the report: every prompt is answered in the same few rounds, which hold one of
each kind of token, in text that needs care."""

import copy
import hashlib
from functools import cache
from pathlib import Path

import pandas as pd

from specbench import metrics, record
from specbench.analysis import analyse
from specbench.targets import byte_tokenizer

TOKENIZER = byte_tokenizer()
CATEGORIES = ("chat", "code", "maths")
HOSTILE = "</script><script>window.broken = true</script><img src=x onerror='window.broken = true'>"
UNITS = 9
REPLY = "ab é cd"


def ids(text):
    return TOKENIZER(text).input_ids


A, B, BLANK, E1, E2, _, C, D = ids(REPLY)
X, Y, Z = ids("xyz")

# drafted, accepted, committed of each round: prefill; a draft cut short; one kept whole; none; one that the end cuts
ROUNDS = [
    ([], 0, [A]),
    ([B, BLANK, X, Y], 2, [B, BLANK, E1]),
    ([E2], 1, [E2, BLANK]),
    ([], 0, [C]),
    ([D, Z], 1, [D]),
]
PLAIN = [([], 0, [token]) for token in ids(REPLY)]
EQUAL = {"verdict": "equal", "prompts": UNITS, "equal": UNITS, "near_ties": 0, "mismatches": 0}


def steps(rounds, arm, seconds, jitter):
    """Each prompt in these rounds, each of which took ``seconds``, more or less by ``jitter`` from unit to unit."""
    made = []
    for unit in range(UNITS):
        for number, (drafted, accepted, tokens) in enumerate(rounds):
            ended = number == len(rounds) - 1
            made.append(
                {
                    "arm": arm,
                    "unit": unit,
                    "batch": unit,
                    "repeat": 0,
                    "order": 0,
                    "round": number,
                    "uid": f"c{unit}/1",
                    "drafted": drafted,
                    "sampled": False,
                    "proposed": min(len(drafted), len(tokens)) if ended else len(drafted),
                    "accepted": accepted,
                    "tokens": tokens,
                    "committed": len(tokens),
                    "finish": "length" if ended else None,
                    "seconds": seconds * (1 + jitter * ((unit * 5) % UNITS - UNITS // 2) / UNITS),
                }
            )
    return made


def asked():
    return pd.DataFrame(
        [
            {
                "uid": f"c{unit}/1",
                "category": CATEGORIES[unit % 3],
                "turn": 1,
                "prompt": HOSTILE if unit == 0 else f"prompt {unit}",
                "tokens": ids(REPLY),
                "baseline_tokens": ids(REPLY),
                "finish": "length",
                "lossless": "equal",
            }
            for unit in range(UNITS)
        ]
    )


def profile(k, seconds):
    """Rounds of a profiling pass in which drafting takes a tenth of a round."""
    parts = {"draft": 0.1, "verify": 0.8, "accept": 0.06, "bookkeeping": 0.04}
    rows = [{"arm": "baseline", "slice": 0, "k": 0, **{p: 0.02 * s for p, s in parts.items()}} for _ in range(3)]
    for n in range(1, k + 1):
        rows += [{"arm": "method", "slice": 0, "k": n, **{p: seconds * s for p, s in parts.items()}} for _ in range(3)]
    return pd.DataFrame(rows)


@cache
def measured(seconds, jitter, k):
    """Steps, profile, and what follows from them."""
    rounds = ROUNDS if k else PLAIN
    raw = pd.DataFrame([*steps(rounds, "method", seconds, jitter), *steps(PLAIN, "baseline", 0.02, 0.05)])
    timed = profile(k, seconds) if k else None
    return raw, timed, analyse(raw, asked(), timed, k)


def made(name, seconds=0.02, jitter=0.1, k=4, flags=(), **changes):
    """A run's record and its tables. Plain decoding's rounds take 20 ms, its own ``seconds``. ``changes``: metrics."""
    raw, timed, found = copy.deepcopy(measured(seconds, jitter, k))
    run = {
        "id": hashlib.sha256(f"{name} {k}".encode()).hexdigest()[:12],
        "status": "ok",
        "error": None,
        "config": {
            "target": {"_target_": "specbench.targets.load_hf", "path": "nowhere"},
            "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
            "max_new_tokens": 8,
            "batch_size": 1,
            "seed": 0,
            "repeats": 1,
            "stop": {"token_ids": [], "strings": []},
            "drafter": {"_target_": f"drafters.{name}"},
        },
        "conventions": metrics.DEFINITIONS,
        "target": {"name": "bytes", "dtype": "float32", "quant": None, "device": "cpu", "files": {"weights": "a"}},
        "drafter": {"name": name, "k": k},
        "stateful_drafter": False,
        "needs_reference": False,
        "dataset": {"name": "nine", "sha256": "d" * 64},
        "prompts": {"conversations": UNITS, "turns": UNITS, "too_long": [], "smaller_batches": 0},
        "flags": [{"flag": flag, "message": f"{flag} <i>by hand</i>"} for flag in flags],
        **found,
        "provenance": {
            "specbench": "0.1",
            "code_sha256": "c" * 64,
            "git": {"commit": "0123456789abcdef", "uncommitted_sha256": None},
            "command": ["python", "-m", "specbench", f"drafter={name}"],
            "started": "2026-01-02T03:04:05+00:00",
            "packages": {"torch": "2.11"},
            "machine": {"cpu": "A Processor", "threads": 2},
        },
    }
    run["metrics"] |= {"lossless": EQUAL, **changes}
    return run, raw, asked(), timed


def failed(name="broken"):
    run = made(name)[0] | {"status": "failed", "error": "ArithmeticError: made of <b>cheese</b>"}
    return {key: value for key, value in run.items() if key not in ("metrics", "by_category", "model", "prompts")}


def store(results: Path, *runs):
    """Put records into a folder, with their target's tokenizer; returns where that is."""
    TOKENIZER.backend_tokenizer.save(str(results / "tokenizer.json"))
    digest = hashlib.sha256((results / "tokenizer.json").read_bytes()).hexdigest()
    for run in runs:
        run_json, *tables = run if isinstance(run, tuple) else (run,)
        run_json["target"]["files"] = {"tokenizer.json": digest}
        record.write(results / "runs", run_json, *tables)
    return results / "tokenizer.json"


def several():
    """A winner, one it cannot be told apart from, one slower than plain decoding, plain decoding, one that failed."""
    return [
        made("quick", 0.02),
        made("alike", 0.0202, jitter=0.2),
        made("slow", 0.05, flags=["unsteady-clock"]),
        made("none", k=0),
        failed(),
    ]
