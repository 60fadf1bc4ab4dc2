"""Does a record say what its raw steps say? ``python -m specbench.verify RUN…`` computes every metric anew.

Exit code 0 if all agree, 1 if a record was tampered with, damaged, or made by code that counted otherwise. Of the last,
``--update`` writes what this code finds into the record, and who found it.
What would need the target or the machine again is taken as it was measured: margins of replies that differ, p-values of
the test of their law, memory and energy. That verdicts and flags follow from these is checked.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from specbench import cli, guards, law, losslessness, metrics, provenance, record
from specbench.analysis import analyse
from specbench.errors import ConfigError, RunError

CLOSE = 1e-9  # relative; the order of a sum may change the last digits


def differences(folder: Path) -> list[str]:
    """What the record in ``folder`` says that its tables do not, in words. Raises ConfigError for a folder that is no
    finished record, RunError for tables that cannot be read."""
    run = record.read(folder)
    if run["status"] != "ok":
        raise ConfigError(f"{folder} is the record of a failed run, which has no metrics: {run['error']}")
    try:
        steps, prompts, rounds = _tables(folder, run)
        found = analyse(steps, prompts, rounds, run["drafter"]["k"])
        told = {name: run[name] for name in found}
        told["metrics"] = {name: told["metrics"].get(name) for name in found["metrics"] or {}}
        by_law = bool(steps.loc[steps["arm"] == "method", "sampled"].any())
        return [
            *_differing("", told, found),
            *_differing("metrics.lossless.", run["metrics"]["lossless"], _verdicts(run, prompts, by_law)),
            *_texts(steps, prompts),
            *_equalities(prompts),
            *_flags(run, prompts),
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"the tables of {folder} cannot be read: {type(error).__name__}: {error}") from error


def _tables(folder: Path, run: Mapping[str, Any]) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame | None]:
    """Steps, prompts and rounds; the last must be there where the record has a model, which is made of them."""
    steps, prompts = pd.read_parquet(folder / record.STEPS), pd.read_parquet(folder / record.PROMPTS)
    profiled = run["model"] is not None or (folder / record.ROUNDS).exists()
    return steps, prompts, pd.read_parquet(folder / record.ROUNDS) if profiled else None


def update(folder: Path) -> None:
    """Let a finished record say what this code finds in its tables: metrics, model, flags of what was measured, and
    definitions. Its provenance gets ``recomputed``: by what code, and when. Raises as ``differences`` does, and
    RunError if the tables contradict each other, as then no code is right."""
    run = record.read(folder)
    try:
        steps, prompts, rounds = _tables(folder, run)
        wrong = [*_texts(steps, prompts), *_equalities(prompts)]
        found = analyse(steps, prompts, rounds, run["drafter"]["k"])
        new = {**run, **found, "metrics": {**run["metrics"], **(found["metrics"] or {})}}
        ours = run["metrics"].keys()
        kept = [flag for flag in run["flags"] if flag["flag"] not in guards.MEASURED]
        new["flags"] = [*kept, *(asdict(flag) for flag in guards.of_results(new, prompts))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"the tables of {folder} cannot be read: {type(error).__name__}: {error}") from error
    if wrong:
        raise RunError(f"{folder} is left as it is: {wrong[0]}")
    by = {name: known for name, known in provenance.collect().items() if name in ("specbench", "code_sha256", "git")}
    as_measured = {
        name: told for name, told in run["conventions"].items() if name in ours - (found["metrics"] or {}).keys()
    }
    new["conventions"] = {**metrics.DEFINITIONS, **as_measured}
    new["provenance"] = {**run["provenance"], "recomputed": {**by, "at": provenance.now()}}
    record.rewrite(folder, new)


def _differing(name: str, told: Any, found: Any) -> Iterator[str]:
    """Where two values of JSON differ; of a mapping, in what ``found`` has."""
    if isinstance(found, dict) and isinstance(told, dict):
        for key, value in found.items():
            yield from _differing(f"{name}{key}." if isinstance(value, dict) else f"{name}{key}", told.get(key), value)
        return
    if isinstance(found, list) and isinstance(told, list) and len(found) == len(told):
        for i, (ours, theirs) in enumerate(zip(found, told, strict=True)):
            yield from _differing(f"{name}[{i}]." if isinstance(ours, dict) else f"{name}[{i}]", theirs, ours)
        return
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (told, found))
    if told != found and not (numbers and math.isclose(told, found, rel_tol=CLOSE)):
        yield f"{name.rstrip('.')} is {told} in run.json and {found} by the steps"


def _verdicts(run: Mapping[str, Any], prompts: pd.DataFrame, by_law: bool) -> dict[str, object]:
    """What the prompts say of the verdict; ``by_law``: then each is equal, or no evidence by itself, and the verdict is
    that of the p-value, which only the target could give anew."""
    if not by_law:
        return losslessness.counts(prompts["lossless"].tolist())
    told = run["metrics"]["lossless"]
    single = told["p_values"].values()
    p_value = min(1.0, len(single) * min(single)) if single else None
    caught = told["ruled_out"] or (p_value is not None and p_value < told["level"])
    verdict = "mismatch" if caught else "untested" if p_value is None else "law"
    equal = int((prompts["lossless"] == "equal").sum())
    return {"prompts": len(prompts), "equal": equal, "level": law.LEVEL, "p_value": p_value, "verdict": verdict}


def _equalities(prompts: pd.DataFrame) -> Iterator[str]:
    """Prompts that are said to be equal in text and are not, or the other way about."""
    columns = (prompts[name] for name in ("uid", "lossless", "tokens", "baseline_tokens"))
    for uid, verdict, ours, plain in zip(*columns, strict=True):
        if (verdict == "equal") != (list(ours) == list(plain)):
            yield f"prompt {uid} is said to be {verdict}, and by its replies it is {'not ' * (verdict == 'equal')}equal"
    if "divergence_tolerance" in prompts:  # records of earlier versions do not tell
        judged = prompts[prompts["lossless"].isin(["near-tie", "mismatch"])]
        near = judged["divergence_margin"] <= judged["divergence_tolerance"]
        for uid in judged["uid"][near != (judged["lossless"] == "near-tie")]:
            yield f"prompt {uid} is said to be what its margin and tolerance do not make it"


def _flags(run: Mapping[str, Any], prompts: pd.DataFrame) -> Iterator[str]:
    """Flags of what was measured that the record lacks, or that nothing measured raises."""
    due = {flag.flag for flag in guards.of_results(run, prompts)}
    raised = {flag["flag"] for flag in run["flags"]} & set(guards.MEASURED)
    for name in sorted(due ^ raised):
        yield f"the flag {name} is {'missing' if name in due else 'raised without a cause'}"


def _texts(steps: pd.DataFrame, prompts: pd.DataFrame) -> Iterator[str]:
    """Replies that are not what the steps of the first repeat committed."""
    first = steps[steps["repeat"] == 0]
    for arm, column in (("method", "tokens"), ("baseline", "baseline_tokens")):
        said = first[first["arm"] == arm].groupby("uid")["tokens"].agg(lambda rows: [t for row in rows for t in row])
        for uid, reply in zip(prompts["uid"], prompts[column], strict=True):
            if list(reply) != said.get(uid):
                yield f"the {arm}'s reply to {uid} is not what its steps committed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify the records that are named, or those of a folder."""
    parser = argparse.ArgumentParser(prog="python -m specbench.verify", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="record folders, or folders that hold some")
    parser.add_argument("--update", action="store_true", help="write what differs into records of earlier code")
    asked = parser.parse_args(arguments)
    try:
        folders = record.find(asked.runs)
    except ConfigError as error:
        return cli.fail(str(error), cli.BAD_CONFIG)
    codes = []
    for folder in folders:
        try:
            wrong = differences(folder)
            if wrong and asked.update:
                update(folder)
                cli.out.print(f"{folder} is updated", highlight=False, soft_wrap=True)
                wrong = differences(folder)
        except ConfigError as error:
            codes.append(cli.fail(str(error), cli.BAD_CONFIG))
            continue
        except RunError as error:
            codes.append(cli.fail(str(error), cli.FAILED))
            continue
        for difference in wrong:
            cli.fail(f"{folder}: {difference}", cli.FAILED)
        if not wrong:
            cli.out.print(f"{folder} agrees with its steps", highlight=False, soft_wrap=True)
        codes.append(cli.FAILED if wrong else cli.OK)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
