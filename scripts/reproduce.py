"""The tables and figures of README and docs from scratch, and whether the stored numbers hold here.

    make reproduce             # under an hour and a half on 2 cores
    make reproduce quick=1     # a quarter of an hour: fewer prompts and shorter replies, so wider intervals

Writes to --out; what is finished there is not done again. Its check.md has every headline number beside the stored one
of results/reference and results/training, and those that did not come out again are printed: on another machine
speedups differ, tokens per verify pass should not.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench import cli, record, results, settings, tables
from specbench.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
REFERENCE, TRAINING = ROOT / "results/reference", ROOT / "results/training"
CARDS = ROOT / "drafters/pretrained/smollm2"
BRIEF = ("dataset.limit=8", "max_new_tokens=16", "profile=1")  # of a quick reproduction


@dataclass(frozen=True)
class Study:
    """Runs whose numbers are quoted: ``arguments`` of ``python -m specbench``; ``stored`` are those that are quoted."""

    name: str
    arguments: tuple[str, ...]
    stored: Path
    quick: tuple[str, ...] = BRIEF


STUDIES = (
    Study("quick", ("experiment=quick",), REFERENCE / "quick"),
    Study("training", ("experiment=trained",), TRAINING / "runs"),
    Study("training", ("experiment=trained", "sampling=t1"), TRAINING / "runs"),
    Study("sampled", ("experiment=sampled",), REFERENCE / "sampled"),
    Study("draft_length", ("experiment=draft_length",), REFERENCE / "draft_length", (*BRIEF, "k=1,4")),
    Study("batch", ("experiment=batch",), REFERENCE / "batch", (*BRIEF, "batch_size=1,2")),
)
VERIFY_COST = ("lengths=[128,1024]", "batch_sizes=[1,4]", "tokens=[1,2,5,8]", "repeats=3")  # quick


@dataclass(frozen=True)
class Number:
    """A number that is quoted. interval: of the stored one; None where it has none."""

    what: str
    stored: float
    interval: Sequence[float] | None
    here: float | None

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.here is None:
            return "not measured"
        if self.interval is None:
            return "no interval"
        return "inside" if self.interval[0] <= self.here <= self.interval[1] else "outside"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer prompts, shorter replies")
    parser.add_argument("--out", type=Path, default=Path("results/reproduce"), help="folder to write to")
    arguments = parser.parse_args()
    out, quick = arguments.out.resolve() / ("quick" if arguments.quick else "full"), arguments.quick
    if out.is_relative_to(ROOT):  # so that records, which keep their command, name no folder of this machine
        os.chdir(ROOT)
        out = out.relative_to(ROOT)
    try:
        failed = not measure(out, quick)
        show(out)
        numbers, origins = list(headlines(out)), list(places(out))
    except ConfigError as error:
        sys.exit(f"reproduce: {error}")
    except KeyboardInterrupt:
        sys.exit("reproduce: interrupted; the same command goes on from here")
    report(numbers, origins, out / "check.md", quick)
    sys.exit(cli.FAILED if failed else cli.OK)


def measure(out: Path, quick: bool) -> bool:
    """All studies; whether all of their cells ended well. What fails is said by the run, and the others go on."""
    well = True
    for study in STUDIES:
        say(f"{study.name}: {' '.join(study.arguments)}")
        asked = [*study.arguments, *(study.quick if quick else ()), f"results_dir={out / study.name / 'runs'}"]
        well &= do("-m", "specbench", *asked)
    say("verify_cost")
    if not (out / "verify_cost/verify_cost.pdf").exists():  # what it writes last
        well &= do("scripts/verify_cost.py", f"out={out / 'verify_cost'}", *(VERIFY_COST if quick else ()))
    return well


def show(out: Path) -> None:
    """Tables, figures and the report of what was measured. Raises ConfigError if one of them fails."""
    for name in dict.fromkeys(study.name for study in STUDIES):
        folder = str(out / name)
        if name == "training":
            made = do("scripts/training_report.py", f"{folder}/runs", "--cards", str(CARDS), "--out", folder)
        else:
            made = do("scripts/make_tables.py", f"{folder}/runs", "--out", folder)
            made &= do("scripts/make_figures.py", f"{folder}/runs", "--out", folder)
        if not made:
            raise ConfigError(f"{folder} could not be shown; the lines above say why")
    runs = [str(out / name / "runs") for name in dict.fromkeys(study.name for study in STUDIES)]
    if not do("-m", "specbench.report", *runs, "--out", str(out / "report.html")):
        raise ConfigError("the report could not be made; the lines above say why")


def headlines(out: Path) -> Iterator[Number]:
    """Speedup and tokens per verify pass of every stored cell, beside those measured here."""
    for name in dict.fromkeys(study.name for study in STUDIES):
        stored = next(study.stored for study in STUDIES if study.name == name)
        here = {cell(run): run for run in runs_in(out / name / "runs") if run["status"] == "ok"}
        for run in tables.in_order(runs_in(stored)):
            if run["status"] != "ok":
                continue
            found = here.get(cell(run))
            drafter, batch = run["drafter"], run["config"]["batch_size"]
            law = "greedy" if not run["config"]["sampling"]["temperature"] else "sampled"
            called = f"{name}: {drafter['name']} k={drafter['k']}, {law}, batch {batch}"
            for metric, words in (("tokens_per_pass", "tokens per pass"), ("speedup", "speedup")):
                value = None if found is None else found["metrics"][metric]
                yield Number(f"{called}: {words}", run["metrics"][metric], run["metrics"][f"{metric}_ci95"], value)


def runs_in(folder: Path) -> list[dict[str, Any]]:
    """Those that can be read; a folder that has none is named, and costs the other studies nothing."""
    try:
        return results.runs([folder])
    except ConfigError as error:
        cli.fail(f"reproduce: {error}", cli.FAILED)
        return []


def cell(run: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a run and its stored twin have in common, however many prompts each had."""
    config = run["config"]
    target, drafter = run["target"], run["drafter"]
    precision = settings.precision(target), run["dataset"]["name"], str(config["sampling"])
    return target["name"], *precision, drafter["name"], drafter["k"], config["batch_size"]


def places(out: Path) -> Iterator[str]:
    """Where the stored numbers are from, and those measured here."""
    for study in {study.name: study for study in STUDIES}.values():
        for which, folder in (("stored", study.stored), ("here", out / study.name / "runs")):
            for words in dict.fromkeys(tables.origin(group) for group in settings.groups(runs_in(folder))):
                yield f"{study.name}, {which}: {words}."


def report(numbers: Sequence[Number], origins: Sequence[str], path: Path, quick: bool) -> None:
    """Write the numbers with where they are from, and print those that did not come out again."""
    columns = ("number", "stored", "95 % CI", "here", "")
    rows = [
        (
            n.what,
            f"{n.stored:.2f}",
            "–" if n.interval is None else f"{n.interval[0]:.2f}–{n.interval[1]:.2f}",
            tables.show(n.here, "{:.2f}"),
            n.verdict,
        )
        for n in numbers
    ]
    lines = [f"| {' | '.join(columns)} |", "|---|---:|---:|---:|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    counts = {kind: [n for n in numbers if n.what.endswith(kind)] for kind in ("tokens per pass", "speedup")}
    lines.append("")
    for kind, those in counts.items():
        measured = [n for n in those if n.verdict in ("inside", "outside")]
        inside = sum(n.verdict == "inside" for n in measured)
        lines.append(f"{kind}: {inside} of {len(measured)} inside the stored interval; {len(those)} are stored.")
    if quick:
        lines.append("Of a quick reproduction: fewer prompts and shorter replies than those of the stored numbers.")
    lines += ["", *(f"- {words}" for words in origins)]
    record.write_file(path, "\n".join(lines) + "\n")
    for what, stored, limits, here, verdict in rows:
        if verdict == "outside":
            words = f"{what}: {here}, outside the stored {limits} ({stored})"
            cli.out.print(words, style="yellow", highlight=False, soft_wrap=True)
    for line in lines[lines.index("") + 1 :]:
        cli.out.print(line, highlight=False, soft_wrap=True)
    cli.out.print(f"all numbers: {path}", highlight=False, soft_wrap=True)


def say(what: str) -> None:
    """A heading."""
    cli.out.rule(what, style="dim")


def do(*command: str) -> bool:
    """Run a Python command of this project, and tell whether it ended well."""
    return subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode == 0


if __name__ == "__main__":
    main()
