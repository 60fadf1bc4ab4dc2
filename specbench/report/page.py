"""The page: everything that is shown of many runs, computed, and put with the scripts that draw it into one file."""

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import specbench
from specbench import compare, provenance, settings, tables
from specbench.errors import ConfigError
from specbench.families import COLOURS, colour
from specbench.raw import Run, table
from specbench.record import STEPS
from specbench.report import figures, origin, pieces, replies, rows, summary

SCRIPTS = ("dom.js", "charts.js", "table.js", "replies.js", "app.js")
BUDGET = 40_000  # rounds of replies on a page, about 5 MB: beyond it fewer prompts are shown, down to one
TIMES = ("unit", "arm", "batch", "round", "uid", "committed", "seconds")


@dataclass(frozen=True)
class Page:
    """``html``, and what its maker should know of it."""

    html: str
    notes: list[str]


def make(runs: Sequence[Run], prompts: int, tokenizers: Sequence[Path] = ()) -> Page:
    """The page of ``runs`` (each with its ``folder``), with replies to so many prompts of each setting.

    ``tokenizers``: files, or folders of them, to look for those of the targets in.
    """
    runs = distinct(runs)
    groups = tables.by_setting(runs)
    shown = min(prompts, _affordable(runs))
    shown_settings = [_setting(group, shown, tokenizers) for group in groups]
    notes = []
    if shown < prompts:
        few = "1 prompt of each setting is" if shown == 1 else f"{shown} prompts of each setting are"
        notes.append(f"{few} shown token by token, not {prompts}: there are many runs.")
    wordless = [s["target"] for s in shown_settings if s["replies"]["prompts"] and s["pieces"] is None]
    notes += [f"{target}: {NO_TOKENIZER}" for target in dict.fromkeys(wordless)]
    targets = list(dict.fromkeys(run["target"]["name"] for run in runs))
    data: dict[str, Any] = {
        "title": f"Drafting for {targets[0]}" if len(targets) == 1 else f"Drafting for {len(targets)} targets",
        "made": f"{_count(len(runs), 'run')} in {_count(len(groups), 'setting')}, put together on "
        f"{provenance.now()[:10]} by specbench {specbench.__version__}",
        "notes": notes,
        "definitions": next((run["conventions"] for run in runs if "conventions" in run), {}),
        "settings": shown_settings,
        "batch_sizes": [found for group in tables.by_setting(runs, varying=("batch_size",)) for found in _sweep(group)],
    }
    return Page(fill(data), notes)


def distinct(runs: Sequence[Run]) -> list[Run]:
    """The runs, each once, with ids of their own: a question that was answered in two folders is two runs."""
    folders = {Path(run["folder"]).resolve(): run for run in runs}
    seen: Counter[str] = Counter()
    found: list[Run] = []
    for run in folders.values():
        seen[run["id"]] += 1
        again = f" ({seen[run['id']]})" if seen[run["id"]] > 1 else ""
        found.append({**run, "id": f"{run['id']}{again}"})
    return found


NO_TOKENIZER = (
    "the tokenizer of this target is not on this machine, so tokens are shown by their numbers; "
    "give its tokenizer.json with --tokenizer."
)


def fill(data: Mapping[str, Any]) -> str:
    """The HTML file that shows ``data``. Nothing in it is fetched, and nothing but its own scripts can run."""
    style = _source("style.css")
    script = "\n".join(_source(name) for name in SCRIPTS)
    return Template(_source("template.html")).substitute(
        title=escape(data["title"]),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=embedded(data),
    )


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that can stand in an HTML page: no text of it can end the element that it is in."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _source(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """By which the page's security policy knows its own script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _affordable(runs: Sequence[Run]) -> int:
    """Of how many prompts all runs' replies fit on a page."""
    rounds = 0.0  # of one prompt, over all runs
    for run in runs:
        if run["status"] == "ok":
            asked = run["prompts"]["turns"] * run["config"].get("repeats", 1)
            rounds += sum(run["metrics"]["accepted_length_histogram"]) / asked
    return max(1, int(BUDGET / rounds)) if rounds else 0


def _setting(runs: Sequence[Run], prompts: int, tokenizers: Sequence[Path]) -> dict[str, Any]:
    called = summary.names(runs)
    first = summary.contenders(runs)
    shown = replies.of_group([*first, *(run for run in runs if run not in first)], prompts)
    tokenizer = pieces.find(runs[0], tokenizers) if shown["prompts"] else None
    target, *rest = settings.title(runs)
    return {
        "target": target,
        "facts": rest,
        "summary": [asdict(sentence) for sentence in summary.sentences(runs, _versus(runs))],
        "runs": {
            run["id"]: {"name": called[run["id"]], "colour": colour(run), "failed": run["status"] != "ok"}
            for run in runs
        },
        "table": rows.of_group(runs),
        "figures": figures.of_group(runs),
        "flags": tables.flags(runs),
        "origin": origin.of_group(runs),
        "replies": shown,
        "pieces": tokenizer and pieces.pieces(tokenizer, sorted(replies.tokens_of(shown))),
    }


def _sweep(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """What runs of several batch sizes show together, if they do."""
    drawn = figures.of_batch_sizes(runs)
    if drawn:
        target, *facts = settings.shared(runs)
        shown = {}
        for run, label in zip(runs, tables.labels(runs), strict=True):
            name = f"{label} k={run['drafter']['k']}, batch {run['config']['batch_size']}"
            shown[run["id"]] = {"name": name, "colour": colour(run)}
        for size in {run["config"]["batch_size"] for run in runs}:
            plain = figures.plain_at(size)
            shown[plain] = {"name": plain, "colour": COLOURS["none"]}
        yield {"target": target, "facts": facts, "runs": shown, "figures": drawn}


def _versus(runs: Sequence[Run]) -> summary.Versus:
    """Compares two of the runs by their steps."""
    read: dict[str, Any] = {}

    def steps(run: Run) -> Any:
        if run["id"] not in read:
            read[run["id"]] = table(run, STEPS, TIMES)
        return read[run["id"]]

    def versus(a: Run, b: Run) -> Mapping[str, Any] | None:
        first, second = steps(a), steps(b)
        if first is None or second is None:
            return None
        try:
            return compare.compare(first, second)
        except ConfigError:  # other prompts were decoded together
            return None

    return versus


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
