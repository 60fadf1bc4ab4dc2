"""What training came to: a table and a figure, of the cards of trained drafters and of runs that measured them.

    python scripts/training_report.py results/trained --cards drafters/pretrained/smollm2 --out results/trained

Writes table.md, with a table per setting of the runs, and acceptance.png and .pdf of the first. With --sizes, folders
of checkpoints of one family that differ in how long they learned, scaling.md, .png and .pdf as well.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafters.training import card
from specbench import plots, record, results, settings, tables
from specbench.errors import ConfigError, RunError

COLUMNS = (
    "drafter",
    "parameters",
    "MiB",
    "tokens seen",
    "minutes",
    "k",
    "tokens/pass held out",
    "tokens/pass measured",
    "95 % CI of that",
    "acceptance by position",
    "speedup",
    "95 % CI",
    "lossless",
)
WORDS = ("drafter", "acceptance by position", "lossless")  # the others hold numbers
ALIGNED = "".join("|---" if name in WORDS else "|---:" for name in COLUMNS) + "|"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="record folders, or folders that hold some")
    parser.add_argument("--cards", type=Path, required=True, help="folder with a folder for each trained drafter")
    parser.add_argument(
        "--sizes", nargs="*", type=Path, default=[], help="checkpoints of one family, by size of training"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    arguments = parser.parse_args()
    try:
        runs = results.runs(arguments.runs)
    except ConfigError as error:
        sys.exit(f"training_report: {error}")
    cards = {path.parent.name: card.read(path.parent) for path in sorted(arguments.cards.glob(f"*/{card.CARD}"))}
    groups = tables.by_setting(runs)
    groups = [group for group in groups if group[0]["status"] == "ok"]  # those without a finished run come last
    groups.sort(key=lambda group: (group[0]["config"]["sampling"]["temperature"], -group[0]["prompts"]["turns"]))
    if not groups or not cards:
        sys.exit("training_report: there is no finished run, or no card; see --help")
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "table.md"
    record.write_file(path, "\n".join(table(group, cards) for group in groups))
    print(path)
    first = [run for run in groups[0] if run["status"] == "ok" and run["drafter"]["k"]]
    expected = {name: validation(found, first[0])["acceptance"] for name, found in cards.items()}
    for file in plots.acceptance_by_position(first, expected, arguments.out / "acceptance"):
        print(file)
    if arguments.sizes:
        for file in scaling([card.read(folder) for folder in arguments.sizes], arguments.out):
            print(file)


def scaling(cards: Sequence[Mapping[str, Any]], out: Path) -> list[Path]:
    """A table and a figure of what more training brought one family."""
    cards = sorted(cards, key=lambda found: found["progress"]["tokens"])
    families = {found["family"] for found in cards}
    if len(families) > 1:
        sys.exit(f"training_report: --sizes are of one family, not of {', '.join(sorted(families))}")
    kinds = list(cards[0]["validation"])
    columns = ("positions learned from", "minutes", *(f"tokens/pass, {kind}" for kind in kinds), f"joint, {kinds[0]}")
    lines = [
        f"{families.pop()}, k={cards[0]['k']}, held-out replies",
        "",
        f"| {' | '.join(columns)} |",
        "|---:|---:" + "|---:" * len(kinds) + "|---|",
    ]
    learned = []
    for found in cards:
        tokens, each = found["progress"]["tokens"], [found["validation"][kind] for kind in kinds]
        per_pass = {kind: v["tokens_per_pass"] for kind, v in zip(kinds, each, strict=True)}
        learned.append(plots.Learned(tokens, per_pass, each[0]["acceptance"]))
        joint = " ".join(f"{share:.3f}" for share in each[0]["acceptance"])
        numbers = " | ".join(f"{v['tokens_per_pass']:.2f}" for v in each)
        lines.append(f"| {tokens:,} | {found['progress']['seconds'] / 60:.1f} | {numbers} | {joint} |")
    record.write_file(out / "scaling.md", "\n".join(lines) + "\n")
    return [out / "scaling.md", *plots.scaling(cards[0]["family"], learned, out / "scaling")]


def validation(found: Mapping[str, Any], run: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a card says of held-out replies at the temperature of ``run``."""
    temperature = run["config"]["sampling"]["temperature"]
    return found["validation"][f"temperature {temperature:g}"]


def table(runs: Sequence[Mapping[str, Any]], cards: Mapping[str, Mapping[str, Any]]) -> str:
    """A group of runs as Markdown."""
    lines = [f"{' · '.join(settings.title(runs))}", "", f"| {' | '.join(COLUMNS)} |", ALIGNED]
    for run in runs:
        name, k = run["drafter"]["name"], run["drafter"]["k"]
        found = cards.get(name)
        own, held_out = ["–"] * 4, "–"
        if found is not None:
            own = [
                f"{found['parameters'] / 1e6:.1f} M",
                f"{found['bytes'] / 2**20:.1f}",
                f"{found['progress']['tokens'] / 1e6:.2f} M",
                f"{found['progress']['seconds'] / 60:.0f}",
            ]
            held_out = f"{validation(found, run)['tokens_per_pass']:.2f}" if found["k"] == k else "–"
        lines.append(f"| {' | '.join([name, *own, str(k), held_out, *measured(run)])} |")
    notes = [tables.failure(run) for run in runs if run["status"] != "ok"] + tables.flags(runs)
    ids = ", ".join(run["id"] for run in runs)
    return "\n".join([*lines, "", *(f"- {note}." for note in notes), "", f"{tables.origin(runs)}; runs {ids}."]) + "\n"


def measured(run: Mapping[str, Any]) -> list[str]:
    """The cells of what a run measured."""
    if run["status"] != "ok":
        return ["–"] * 5 + ["failed"]
    metrics = run["metrics"]
    return [
        tables.show(metrics["tokens_per_pass"], "{:.2f}"),
        tables.interval(metrics["tokens_per_pass_ci95"]),
        " ".join(tables.show(a, "{:.2f}") for a in metrics["acceptance_by_position"]["joint"]) or "–",
        tables.show(metrics["speedup"], "{:.2f}x"),
        tables.interval(metrics["speedup_ci95"]),
        tables.verdict(metrics["lossless"]),
    ]


if __name__ == "__main__":
    try:
        main()
    except RunError as error:
        sys.exit(f"training_report: {error}")
