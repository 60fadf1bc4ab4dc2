"""Where the runs of a setting come from."""

from collections.abc import Mapping, Sequence
from typing import Any

from specbench import settings
from specbench.raw import Run


def of_group(runs: Sequence[Run]) -> list[list[str]]:
    """Where the runs of a setting come from: names and what they are."""
    run, origin = runs[0], runs[0]["provenance"]
    commits = [(each["provenance"]["git"] or {}) for each in runs]
    dates = sorted({each["provenance"]["started"][:10] for each in runs})
    code = [f"{git['commit']}{_uncommitted(git)}" for git in commits if git.get("commit")]
    commands = [" ".join(each["provenance"]["command"]) for each in runs if "command" in each["provenance"]]
    files = [[f"target {name}", digest] for name, digest in run["target"]["files"].items()]
    return [
        ["machine", settings.machine(origin["machine"])],
        ["packages", settings.versions({"python": origin.get("python", ""), **origin["packages"]})],
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
