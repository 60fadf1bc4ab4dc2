"""Where the runs of a setting come from, and what tells settings apart that are called alike."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from specbench import tables
from specbench.report.raw import Run


def apart(groups: Sequence[Sequence[Run]]) -> list[str]:
    """For each group what sets it apart from others of the same title, in words; nothing where its title is its own."""
    titles = [tables.title(group) for group in groups]
    facts = [_hidden(group[0]) for group in groups]
    said = []
    for title, own in zip(titles, facts, strict=True):
        alike = [other for name, other in zip(titles, facts, strict=True) if name == title]
        differing = [name for name in own if any(other[name] != own[name] for other in alike)]
        said.append(", ".join(f"{name} {own[name]}" for name in differing))
    return said


def _hidden(run: Run) -> dict[str, str]:
    """What runs of one setting share that its title does not say."""
    origin, target = run["provenance"], run["target"]
    return {
        "seed": str(run["config"]["seed"]),
        "stops": json.dumps(run["config"]["stop"]),
        "engine": str(target.get("engine")),
        "data set": run["dataset"]["sha256"][:10],
        "target files": hashlib.sha256(str(target["files"]).encode()).hexdigest()[:10],
        "code": origin["code_sha256"][:10],
        "packages": _words(origin["packages"]),
        "machine": _machine(origin["machine"]),
    }


def of_group(runs: Sequence[Run]) -> list[list[str]]:
    """Where the runs of a setting come from: names and what they are."""
    run, origin = runs[0], runs[0]["provenance"]
    commits = [(each["provenance"]["git"] or {}) for each in runs]
    dates = sorted({each["provenance"]["started"][:10] for each in runs})
    code = [f"{git['commit']}{_uncommitted(git)}" for git in commits if git.get("commit")]
    commands = [" ".join(each["provenance"]["command"]) for each in runs if "command" in each["provenance"]]
    files = [[f"target {name}", digest] for name, digest in run["target"]["files"].items()]
    return [
        ["machine", _machine(origin["machine"])],
        ["packages", _words({"python": origin.get("python", ""), **origin["packages"]})],
        *(["commit", commit] for commit in dict.fromkeys(code)),
        ["code SHA-256", origin["code_sha256"]],
        *(["command", command] for command in dict.fromkeys(commands)),
        ["measured", " to ".join(dict.fromkeys([dates[0], dates[-1]]))],
        ["data set", f"{run['dataset']['name']} {run['dataset']['sha256']}"],
        *files,
        ["runs", ", ".join(each["id"] for each in runs)],
    ]


def _uncommitted(git: Mapping[str, Any]) -> str:
    changes = git.get("uncommitted_sha256")
    return f", with uncommitted changes ({changes[:10]})" if changes else ""


def _machine(machine: Mapping[str, Any]) -> str:
    facts = [machine.get("gpu"), machine["cpu"], f"{machine['threads']} threads", machine.get("system")]
    memory = machine.get("memory_bytes")
    return ", ".join([*(fact for fact in facts if fact), *([f"{memory / 2**30:.0f} GiB"] if memory else [])])


def _words(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)
