"""What training came to: a table and a figure, of the cards of trained drafters and of runs that measured them.

    python scripts/training_report.py results/training/runs --cards drafters/pretrained/smollm2 --out results/training

Writes table.md, with a table per setting of the runs, and acceptance.png and .pdf of the first. With --sizes, folders
of checkpoints of one family that differ in how long they learned, scaling.md, .png and .pdf as well.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafters.training import card
from specbench import plots, results, tables
from specbench.errors import ConfigError

COLUMNS = (
    "drafter",
    "parameters",
    "MiB",
    "tokens seen",
    "minutes",
    "k",
    "tokens/pass held out",
    "measured",
    "95 % CI",
    "acceptance by position",
    "speedup",
    "95 % CI",
)


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
    groups = tables.by_setting(tables.in_order([run for run in runs if run["status"] == "ok"]))
    groups.sort(key=lambda group: (group[0]["config"]["sampling"]["temperature"], -group[0]["prompts"]["turns"]))
    if not groups or not cards:
        sys.exit("training_report: there is no finished run, or no card; see --help")
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "table.md"
    path.write_text("\n".join(table(group, cards) for group in groups), encoding="utf-8")
    print(path)
    first = [run for run in groups[0] if run["drafter"]["k"]]
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
    points: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for found in cards:
        tokens, each = found["progress"]["tokens"], [found["validation"][kind] for kind in kinds]
        for kind, v in zip(kinds, each, strict=True):
            points[kind].append((tokens, v["tokens_per_pass"]))
        joint = " ".join(f"{share:.3f}" for share in each[0]["acceptance"])
        numbers = " | ".join(f"{v['tokens_per_pass']:.2f}" for v in each)
        lines.append(f"| {tokens:,} | {found['progress']['seconds'] / 60:.1f} | {numbers} | {joint} |")
    (out / "scaling.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [out / "scaling.md", *plots.scaling(cards[0]["family"], points, out / "scaling")]


def validation(found: Mapping[str, Any], run: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a card says of held-out replies at the temperature of ``run``."""
    temperature = run["config"]["sampling"]["temperature"]
    return found["validation"][f"temperature {temperature:g}"]


def table(runs: Sequence[Mapping[str, Any]], cards: Mapping[str, Mapping[str, Any]]) -> str:
    """A group of runs as Markdown."""
    lines = [f"{' · '.join(tables.title(runs))}", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for run in runs:
        name, metrics = run["drafter"]["name"], run["metrics"]
        found = cards.get(name)
        own = ["–"] * 5
        held_out = "–"
        if found is not None:
            own = [
                f"{found['parameters'] / 1e6:.1f} M",
                f"{found['bytes'] / 2**20:.1f}",
                f"{found['progress']['tokens'] / 1e6:.2f} M",
                f"{found['progress']['seconds'] / 60:.0f}",
            ]
            at = found["k"] == run["drafter"]["k"]
            held_out = f"{validation(found, run)['tokens_per_pass']:.2f}" if at else "–"
        joint = " ".join(f"{a:.2f}" for a in metrics["acceptance_by_position"]["joint"])
        lines.append(
            "| "
            + " | ".join(
                [
                    name,
                    *own[:4],
                    str(run["drafter"]["k"]),
                    held_out,
                    f"{metrics['tokens_per_pass']:.2f}",
                    interval(metrics["tokens_per_pass_ci95"]),
                    joint or "–",
                    f"{metrics['speedup']:.2f}x",
                    interval(metrics["speedup_ci95"]),
                ]
            )
            + " |"
        )
    return "\n".join(lines) + "\n"


def interval(found: Sequence[float] | None) -> str:
    """An interval in words."""
    return "–" if found is None else f"{found[0]:.2f}–{found[1]:.2f}"


if __name__ == "__main__":
    main()
