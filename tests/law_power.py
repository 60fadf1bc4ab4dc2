"""How many sampled tokens it takes until the test of their law finds a bug: ``python tests/law_power.py``, 15 minutes.

On the default model, with drafts of a copy of it that is less sure (two drafts in three are kept). Each bug of test_law
is planted, a case on each core, then none; the p-value is taken at growing numbers of tokens. Writes table.md and
law_power.json to results/reference/law_power; what stands there is not done again.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from conftest import mutated
from test_law import BUGS, NUCLEUS, PLAIN
from test_law_real import less_sure
from test_real_model import load

from drafters.small_lm import SmallLM
from specbench import cli, decoding, law, provenance, record
from specbench.drafting import Request
from specbench.law import Evidence
from specbench.model import CausalLM
from specbench.prompts import load_builtin
from specbench.sampling import Sampling
from specbench.stopping import StopRule
from specbench.verification import verify

OUT = Path(__file__).parent.parent / "results/reference/law_power"
K, ROWS, TOKENS = 3, 16, 64
BATCHES = (1, 2, 3)  # after which the p-value is taken
CASES: dict[str, tuple[Sampling, tuple[tuple[str, str], ...]]] = {
    **{bug: (sampling, changes) for bug, (sampling, *changes) in BUGS.items()},
    "none, at temperature 0.7": (PLAIN, ()),
    "none, at temperature 0.7 and top-p 0.9": (NUCLEUS, ()),
}  # fmt: skip


def main() -> None:
    file = OUT / "law_power.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["cases"] if file.exists() else {}
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        under_way = {pool.submit(examine, case): case for case in CASES if case not in found}
        for done in as_completed(under_way):
            case = under_way[done]
            found[case] = done.result()
            origin = {**provenance.collect(), "command": ["python", *sys.argv], "ended": provenance.now()}
            record.write_file(file, json.dumps({"cases": found, "provenance": origin}, indent=1) + "\n")
            cli.out.print(f"{case}: {', '.join(shown(said) for said in found[case])}", highlight=False)
    record.write_file(OUT / "table.md", table({case: found[case] for case in CASES}))


def examine(case: str) -> list[dict[str, Any]]:
    """The verdicts on a case, on one core."""
    torch.set_num_threads(1)
    sampling, changes = CASES[case]
    with patch.object(decoding, "verify", mutated(verify, *changes)):
        return list(verdicts(*models(), sampling))


@cache
def models() -> tuple[CausalLM, SmallLM]:
    """Target and drafter."""
    target = load("bfloat16")
    return target, less_sure(target)


def verdicts(target: CausalLM, drafter: SmallLM, sampling: Sampling) -> Iterator[dict[str, Any]]:
    """Of ever more tokens, each batch being added to those before."""
    asked = [
        target.encode([{"role": "user", "content": conversation.turns[0]}])
        for conversation in load_builtin().conversations
    ]
    evidence = Evidence()
    for number in range(max(BATCHES)):
        texts = [asked[(number * ROWS + row) % len(asked)] for row in range(ROWS)]
        requests = [Request(f"{number}-{row}", tokens) for row, tokens in enumerate(texts)]
        add(evidence, law.check(target, drafter, [requests], K, sampling, number, StopRule(TOKENS)))
        if number + 1 in BATCHES:
            yield evidence.verdict()


def add(evidence: Evidence, more: Evidence) -> None:
    """Let ``evidence`` be that of both."""
    for name in ("surprisal", "bonus", "overlap", "acceptance"):
        ours, theirs = getattr(evidence, name), getattr(more, name)
        for moment in ("excess", "variance", "third", "places"):
            setattr(ours, moment, getattr(ours, moment) + getattr(theirs, moment))
    evidence.integrals += more.integrals
    evidence.ruled_out += more.ruled_out


def shown(said: dict[str, Any]) -> str:
    """The p-value, bold where the method is blamed."""
    p_value = f"{said['p_value']:.1g}" if said["p_value"] > 1e-9 else "< 1e-9"
    return f"**{p_value}**" if said["verdict"] == "mismatch" else p_value


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """p-values of each case by about how many tokens were looked at."""
    places = [max(said[i]["places"] for said in found.values()) for i in range(len(BATCHES))]
    lines = [
        f"| bug | {' | '.join(f'{count:,} tokens' for count in places)} | seen most by |",
        f"|---|{'---:|' * len(places)}---|",
    ]
    for case, said in found.items():
        by = min(said[-1]["p_values"], key=said[-1]["p_values"].get)
        lines.append(
            f"| {case} | {' | '.join(map(shown, said))} | {by if said[-1]['verdict'] == 'mismatch' else '–'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
