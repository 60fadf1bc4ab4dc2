"""What runs must share to stand in one table or figure, and what such a setting is called."""

import hashlib
import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

Run = Mapping[str, Any]
APART = "apart"  # key of what a setting's words do not say, added where two are called alike


def of(run: Run) -> tuple[str, ...]:
    """The setting of a run in words: target, precision, device, prompts, sampling, lengths, batch size."""
    config = run["config"]
    sampling = config["sampling"]
    law = "greedy" if not sampling["temperature"] else f"temperature {sampling['temperature']:g}"
    for name, neutral in (("top_k", 0), ("top_p", 1), ("min_p", 0), ("repetition_penalty", 1)):
        if sampling[name] != neutral:
            law += f", {name} {sampling[name]:g}"
    counted = run.get("prompts")
    prompts = f"{counted['turns']} prompts of {run['dataset']['name']}" if counted else run["dataset"]["name"]
    return (
        run["target"]["name"],
        f"{precision(run['target'])} on {run['target']['device']}",
        prompts,
        law,
        f"{config['max_new_tokens']} new tokens",
        f"batch {config['batch_size']}",
        *([run[APART]] if run.get(APART) else []),
    )


def title(runs: Sequence[Run]) -> tuple[str, ...]:
    """The setting that a group of runs shares."""
    return of(next((run for run in runs if run["status"] == "ok"), runs[0]))


def shared(runs: Sequence[Run]) -> tuple[str, ...]:
    """Of the setting what all finished runs share."""
    each = [of(run) for run in runs if run["status"] == "ok"] or [of(runs[0])]
    return tuple(part for part in each[0] if all(part in parts for parts in each))


def precision(target: Mapping[str, Any]) -> str:
    """Of a target as a record describes it, in words."""
    return target["dtype"] if target.get("quant") is None else f"{target['dtype']} with {target['quant']} weights"


def groups(runs: Sequence[Run], varying: Container[str] = ()) -> list[list[Run]]:
    """Runs that may stand in one table, in order of first appearance: same target files, precision, prompts, sampling,
    lengths, batch size, stops, seed, code, packages and machine. Failed runs join those they would have been with.

    ``varying``: settings in which they may differ, as the table is about them. Where groups would be called alike, what
    sets them apart joins their names.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        config, target, made = run["config"], run["target"], run["provenance"]
        names = ("sampling", "max_new_tokens", "batch_size", "stop", "seed")
        shared = {name: config[name] for name in names if name not in varying}
        same = [made["code_sha256"], made["packages"], made["machine"], run["dataset"]["sha256"]]
        key = str([shared, target["files"], precision(target), target["device"], target.get("engine"), *same])
        found.setdefault(key, []).append(run)
    return _told_apart(list(found.values()))


def _told_apart(found: list[list[Run]]) -> list[list[Run]]:
    facts = [_unsaid(group[0]) for group in found]
    titles = [title(group) for group in found]
    told: list[list[Run]] = []
    for group, own, name in zip(found, facts, titles, strict=True):
        alike = [other for other, theirs in zip(facts, titles, strict=True) if theirs == name]
        differing = [f"{fact} {own[fact]}" for fact in own if any(other[fact] != own[fact] for other in alike)]
        told.append([{**run, APART: ", ".join(differing)} for run in group] if differing else group)
    return told


def _unsaid(run: Run) -> dict[str, str]:
    """What runs of one setting share that its words do not say."""
    made, target = run["provenance"], run["target"]
    return {
        "seed": str(run["config"]["seed"]),
        "stops": json.dumps(run["config"]["stop"]),
        "engine": str(target.get("engine")),
        "data set": str(run["dataset"]["sha256"])[:10],
        "target files": hashlib.sha256(str(target["files"]).encode()).hexdigest()[:10],
        "code": str(made["code_sha256"])[:10],
        "packages": versions(made["packages"]),
        "machine": machine(made["machine"]),
    }


def machine(found: Mapping[str, Any]) -> str:
    """That of a record, in words."""
    facts = [found.get("gpu"), found["cpu"], f"{found['threads']} threads", found.get("system")]
    memory = found.get("memory_bytes")
    return ", ".join([*(fact for fact in facts if fact), *([f"{memory / 2**30:.0f} GiB"] if memory else [])])


def versions(packages: Mapping[str, str]) -> str:
    """Those of packages, in words."""
    return ", ".join(f"{name} {version}" for name, version in packages.items() if version)
