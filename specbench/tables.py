"""Tables of runs, computed from their records: for the terminal and for documents."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

COLUMNS = ("drafter", "k", "tokens/s", "tokens/pass", "acceptance", "speedup", "95 % CI", "lossless")
CATEGORY_COLUMNS = ("category", "tokens/s", "tokens/pass", "acceptance", "speedup", "95 % CI")

TEXT = ("drafter", "category", "lossless")  # the others hold numbers

Run = Mapping[str, Any]


def setting(run: Run) -> tuple[str, ...]:
    """What runs must share to stand in one table: target, precision, device, prompts, sampling, lengths, batch size."""
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
        f"{run['target']['dtype']} on {run['target']['device']}",
        prompts,
        law,
        f"{config['max_new_tokens']} new tokens",
        f"batch {config['batch_size']}",
    )


def by_setting(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs grouped by ``setting``, in order of first appearance; failed runs join the group they would have been in."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        config, target = run["config"], run["target"]
        shared = [config["sampling"], config["max_new_tokens"], config["batch_size"], run["dataset"]["sha256"]]
        key = str([target["name"], target["dtype"], target["device"], *shared])
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def in_order(runs: Sequence[Run]) -> list[Run]:
    """Runs by speedup, slowest first; failed ones last."""
    return sorted(runs, key=lambda run: (run["status"] != "ok", run.get("metrics", {}).get("speedup") or 0.0))


def row(run: Run) -> list[str]:
    """The cells of one run under ``COLUMNS``."""
    name, k = run["drafter"]["name"], str(run["drafter"]["k"])
    if run["status"] != "ok":
        return [name, k, "–", "–", "–", "–", "–", "failed"]
    measured = run["metrics"]
    return [name, k, *_numbers(measured), _verdict(measured["lossless"])]


def category_rows(run: Run) -> list[list[str]]:
    """The cells of each category under ``CATEGORY_COLUMNS``."""
    return [[category, *_numbers(measured)] for category, measured in run["by_category"].items()]


def baseline_speed(runs: Sequence[Run]) -> float | None:
    """Plain decoding's tokens/s in the first finished run of a group."""
    return next((run["metrics"]["baseline_decode_tokens_per_s"] for run in runs if run["status"] == "ok"), None)


def terminal(runs: Sequence[Run]) -> Table:
    """One group of runs as a table for the terminal."""
    table = _table(COLUMNS)
    for run in runs:
        table.add_row(*row(run), style="red" if run["status"] != "ok" else None)
    speed = baseline_speed(runs)
    if speed is not None:
        table.caption = f"speedup over plain decoding of the same prompts, interleaved ({speed:.1f} tokens/s)"
    return table


def terminal_by_category(run: Run) -> Table:
    """One run's categories as a table for the terminal."""
    table = _table(CATEGORY_COLUMNS)
    for cells in category_rows(run):
        table.add_row(*cells)
    return table


def markdown(runs: Sequence[Run]) -> str:
    """One group of runs as a Markdown table, with its setting, machine and the ids of the runs it came from; failed
    runs say why below it."""
    lines = [" · ".join(title(runs)), "", "| " + " | ".join(COLUMNS) + " |"]
    lines.append("|" + "|".join("---" if c in TEXT else "---:" for c in COLUMNS) + "|")
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row(run)) + " |" for run in runs]
    lines += [f"\n{run['drafter']['name']} failed: {run['error']}" for run in runs if run["status"] != "ok"]
    origin = runs[0]["provenance"]
    commit = (origin["git"] or {}).get("commit")
    code = f"commit {commit[:10]}" if commit else f"specbench {origin['specbench']}"
    machine = origin["machine"]
    device = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
    speed = baseline_speed(runs)
    lines += [
        "",
        f"Plain decoding: {speed:.1f} tokens/s. " if speed is not None else "",
        f"{device}; torch {origin['packages']['torch']}; {origin['started']}; {code}; "
        f"runs {', '.join(run['id'] for run in runs)}.",
    ]
    return "\n".join(lines) + "\n"


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, caption_justify="left")  # 80 columns suffice
    for column in columns:
        table.add_column(column, justify="left" if column in TEXT else "right", no_wrap=True)
    return table


def title(runs: Sequence[Run]) -> tuple[str, ...]:
    """The setting that a group of runs shares."""
    return setting(next((run for run in runs if run["status"] == "ok"), runs[0]))


def _numbers(measured: Mapping[str, Any]) -> list[str]:
    interval = measured["speedup_ci95"]
    return [
        _show(measured["decode_tokens_per_s"], "{:.1f}"),
        _show(measured["tokens_per_pass"], "{:.2f}"),
        _show(measured["acceptance_rate"], "{:.0%}"),
        _show(measured["speedup"], "{:.2f}x"),
        "–" if interval is None else f"{interval[0]:.2f}–{interval[1]:.2f}",
    ]


def _show(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _verdict(lossless: Mapping[str, Any]) -> str:
    if lossless["verdict"] == "equal":
        return f"equal {lossless['equal']}/{lossless['prompts']}"
    if lossless["verdict"] == "near-tie":
        return f"near-tie {lossless['near_ties']}/{lossless['prompts']}"
    return f"MISMATCH {lossless['mismatches']}/{lossless['prompts']}"
