"""Tables of runs, computed from their records: for the terminal and for documents."""

import hashlib
import json
import math
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from specbench import settings

COLUMNS = ("drafter", "k", "tokens/pass", "acceptance", "tokens/s", "plain", "speedup", "95 % CI", "lossless")
CATEGORY_COLUMNS = ("category", "tokens/pass", "acceptance", "tokens/s", "plain", "speedup", "95 % CI")

DETAILS = (
    "drafter",
    "k",
    "tokens/pass 95 % CI",
    "accepted up to position",
    "draft / verify / accept / rest",
    "predicted",
    "measured",
    "bound",
    "pays from",
    "best k",
)

TEXT = ("drafter", "category", "lossless", "")  # the others hold numbers

Run = Mapping[str, Any]


def labels(runs: Sequence[Run]) -> list[str]:
    """What to call each run of a group: the drafter's name and, where runs of one name differ in the drafter's options,
    those options; where only its files differ, as of one trained anew in the same place, a hash of these."""
    named: dict[str, list[Run]] = {}
    for run in runs:
        named.setdefault(run["drafter"]["name"], []).append(run)
    return [_label(run, named[run["drafter"]["name"]]) for run in runs]


def _label(run: Run, twins: Sequence[Run]) -> str:
    """``twins``: the runs of its drafter's name, itself among them."""
    options = run["config"]["drafter"]
    differing = [key for key in options if any(twin["config"]["drafter"].get(key) != options[key] for twin in twins)]
    words = [run["drafter"]["name"], *(f"{key}={options[key]}" for key in differing)]
    files = [twin["drafter"].get("files") for twin in twins if twin["config"]["drafter"] == options]
    own = run["drafter"].get("files")
    if own and any(others and others != own for others in files):
        words.append(f"files {hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:6]}")
    return " ".join(words)


def in_order(runs: Sequence[Run]) -> list[Run]:
    """Runs by speedup, slowest first; failed ones last."""
    return sorted(runs, key=lambda run: (run["status"] != "ok", run.get("metrics", {}).get("speedup") or 0.0))


def by_setting(runs: Sequence[Run], varying: Container[str] = ()) -> list[list[Run]]:
    """``settings.groups``, each in order; the groups by their settings' words, smaller numbers first, so that their
    order is not one of speeds."""
    groups = [in_order(group) for group in settings.groups(runs, varying)]
    return sorted(groups, key=lambda group: (_natural(settings.shared(group)), min(run["id"] for run in group)))


def _natural(words: Sequence[str]) -> list[list[tuple[float, str]]]:
    """A key by which "batch 8" comes before "batch 16"."""
    parts = [re.split(r"(\d+)", each) for each in words]
    return [[(int(part), "") if part.isdigit() else (math.inf, part) for part in each if part] for each in parts]


def row(run: Run, label: str) -> list[str]:
    """The cells of one run under ``COLUMNS``."""
    if run["status"] != "ok":
        return [label, str(run["drafter"]["k"]), *["–"] * (len(COLUMNS) - 3), "failed"]
    return [label, str(run["drafter"]["k"]), *_numbers(run["metrics"]), verdict(run["metrics"]["lossless"])]


def detail(run: Run, label: str) -> list[str]:
    """The cells of one run under ``DETAILS``: where its speedup comes from."""
    cells = [label, str(run["drafter"]["k"])]
    if run["status"] != "ok":
        return cells + ["–"] * (len(DETAILS) - 2)
    metrics, model = run["metrics"], run["model"]
    joint = [show(share, "{:.2f}").replace("0.", ".", 1) for share in metrics["acceptance_by_position"]["joint"]]
    cells += [interval(metrics["tokens_per_pass_ci95"]), " ".join(joint) or "–"]
    measured = show(metrics["speedup"], "{:.2f}x")
    if model is None:
        return [*cells, "–", "–", measured, "–", "–", "–"]
    off = "" if model["residual"] is None else f" ({model['residual']:+.0%})"
    return [
        *cells,
        " / ".join(f"{share:.0%}".rstrip("%") for share in model["shares"].values()) + " %",
        show(model["predicted_speedup"], "{:.2f}x") + _around(model.get("predicted_speedup_ci95")),
        measured + off,
        show(model["bound"], "{:.2f}x"),
        show(model["break_even"], "{:.0%}"),
        str(model["best_k"]),
    ]


def terminal(runs: Sequence[Run]) -> Table:
    """One group of runs as a table for the terminal."""
    table = numbers(COLUMNS)
    for run, label in zip(runs, labels(runs), strict=True):
        table.add_row(*row(run, label), style="red" if run["status"] != "ok" else None)
    table.caption = "plain: tokens/s of plain decoding of the same prompts, interleaved"
    return table


def terminal_by_category(run: Run) -> Table:
    """One run's categories as a table for the terminal."""
    table = numbers(CATEGORY_COLUMNS)
    for category, measured in run["by_category"].items():
        table.add_row(category, *_numbers(measured))
    return table


def markdown(runs: Sequence[Run]) -> str:
    """One group of runs as Markdown: a table, one of the details, what is to be doubted, and where it is from; failed
    runs say why."""
    named = list(zip(runs, labels(runs), strict=True))
    lines = [" · ".join(settings.title(runs)), "", *_markdown(COLUMNS, [row(*run) for run in named])]
    lines += ["", PLAIN_IS, ""]
    lines += [*_markdown(DETAILS, [detail(*run) for run in named]), "", DETAILS_ARE, ""]
    lines += [line for run in runs if run["status"] != "ok" for line in (failure(run), "")]
    lines += [f"- {flag}." for flag in flags(runs)] + [""] * any(run["flags"] for run in runs)
    return "\n".join([*lines, f"{origin(runs)}; runs {', '.join(run['id'] for run in runs)}."]) + "\n"


def origin(runs: Sequence[Run]) -> str:
    """On what machine, with what code and when a group of runs was made, in words."""
    made = runs[0]["provenance"]
    commit = (made["git"] or {}).get("commit")
    changed = " with uncommitted changes" if (made["git"] or {}).get("uncommitted_sha256") else ""
    machine = made["machine"]
    days = sorted(run["provenance"]["started"][:10] for run in runs)
    facts = (
        machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads",
        f"torch {made['packages']['torch']}",
        f"commit {commit[:10]}{changed}" if commit else f"specbench {made['specbench']}",
        days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}",
    )
    return "; ".join(facts)


PLAIN_IS = "plain: tokens/s of plain decoding of the same prompts, interleaved in the same run."
DETAILS_ARE = (
    "accepted up to position: share of the rounds that drafted so far whose drafts were all accepted up to it. draft, "
    "verify, accept, rest: shares of a round's time in a profiling pass. predicted: speedup by acceptance and that "
    "pass's costs, with what that pass can tell of them (95 %). bound: speedup were every draft right, at the same "
    "cost, known no better. pays from: the acceptance of each draft, were all alike, above which drafting k tokens "
    "wins. best k: the draft length up to k of the highest predicted speedup."
)


def failure(run: Run) -> str:
    """Why a run failed."""
    return f"{run['drafter']['name']} failed: {run['error']}"


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    aligned = "|" + "|".join("---" if name in TEXT else "---:" for name in columns) + "|"
    cells = (" | ".join(cell.replace("|", "\\|") for cell in each) for each in rows)
    return ["| " + " | ".join(columns) + " |", aligned, *(f"| {each} |" for each in cells)]


def numbers(columns: Sequence[str]) -> Table:
    """An empty table for the terminal, under these columns."""
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, caption_justify="left")  # 80 columns suffice
    for column in columns:
        table.add_column(
            column, justify="left" if column in TEXT else "right", no_wrap=column not in TEXT, overflow="fold"
        )
    return table


def _numbers(measured: Mapping[str, Any]) -> list[str]:
    return [
        show(measured["tokens_per_pass"], "{:.2f}"),
        show(measured["acceptance_rate"], "{:.0%}"),
        speed(measured["decode_tokens_per_s"]),
        speed(measured["baseline_decode_tokens_per_s"]),
        show(measured["speedup"], "{:.2f}x"),
        interval(measured["speedup_ci95"]),
    ]


def flags(runs: Sequence[Run]) -> list[str]:
    """What is to be doubted of a group of runs, a line for each flag and message, with the drafters it is about where
    it is not about all."""
    names = [f"{label} k={run['drafter']['k']}" for run, label in zip(runs, labels(runs), strict=True)]
    told: dict[tuple[str, str], list[int]] = {}
    for i, run in enumerate(runs):
        for flag in run["flags"]:
            told.setdefault((flag["flag"], flag["message"]), []).append(i)
    return [f"{flag}{about(who, runs, names)}: {message}" for (flag, message), who in told.items()]


def flag_names(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """The flags of the runs without their messages, each with the ``names`` of those it is about."""
    told: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        for flag in dict.fromkeys(flag["flag"] for flag in run["flags"]):
            told.setdefault(flag, []).append(i)
    return [f"{flag}{about(who, runs, names)}" for flag, who in told.items()]


def about(who: Sequence[int], runs: Sequence[Run], names: Sequence[str]) -> str:
    """In brackets which of the runs something is about, by place; nothing if it is all. All drafters, and all of a
    batch size, are named together."""
    if len(who) == len(runs):
        return ""
    sizes = [run["config"]["batch_size"] for run in runs]
    several = len(set(sizes)) > 1
    whole = {}
    for size in dict.fromkeys(sizes) if several or len(who) > 2 else ():
        spared = [runs[i]["drafter"]["k"] for i, other in enumerate(sizes) if other == size and i not in who]
        if not any(spared):  # all, or all but plain decoding
            words = ["all", *["drafters"] * bool(spared), *[f"at batch size {size}"] * several]
            whole[size] = " ".join(words)
    rest = [names[i] for i in who if sizes[i] not in whole]
    return f" ({', '.join([*whole.values(), *rest])})"


def interval(limits: Sequence[float] | None) -> str:
    """The limits of an interval, or a dash where there is none."""
    return "–" if limits is None else f"{limits[0]:.2f}–{limits[1]:.2f}"


def _around(limits: Sequence[float] | None) -> str:
    return "" if limits is None else f" ({interval(limits)})"


def speed(value: float | None) -> str:
    """Tokens per second."""
    return show(value, "{:.1f}" if value is None or value < 1000 else "{:.0f}")


def show(value: float | None, form: str) -> str:
    """A number, or a dash where there is none."""
    return "–" if value is None else form.format(value)


def verdict(lossless: Mapping[str, Any]) -> str:
    """Of losslessness, with its count."""
    if lossless["verdict"] == "equal":
        return f"equal {lossless['equal']}/{lossless['prompts']}"
    if lossless["verdict"] == "law":
        return f"by law, p={lossless['p_value']:.2g}"
    if lossless["verdict"] == "untested":
        return "untested"
    if "p_value" in lossless:  # by law
        return f"MISMATCH, p={lossless['p_value']:.2g}" if not lossless["ruled_out"] else "MISMATCH, impossible tokens"
    if lossless["verdict"] == "near-tie":
        return f"near-tie {lossless['near_ties']}/{lossless['prompts']}"
    return f"MISMATCH {lossless['mismatches']}/{lossless['prompts']}"
