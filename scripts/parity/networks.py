"""Are our networks those of others? speculators and dflash compute a reference anew, and ours are compared with it.

    make parity                                             # makes the others' environment, then runs this
    python scripts/parity/networks.py --python PYTHON       # of an environment with requirements*.txt beside this file

Runs reference.py there, into a temporary folder, and what the tests do with its stored results (tests/parity.py) on the
new ones. Prints, for every case, the largest absolute difference of what the networks put out, and whether the stored
reference says the same as the new one; writes both to --out. The exit code is 1 where something is not close.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from specbench import provenance, record

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from parity import CLOSE, STORED, Reference, answers, folders  # noqa: E402  of tests/

HEAD = ["case", "computed by", "what", "largest", "differs by at most", "stored reference off by", "verdict"]

out, err = Console(), Console(stderr=True)


def rows(folder: Path) -> list[dict[str, Any]]:
    """A row for each thing that a case tells."""
    reference = Reference(folder)
    kept = Reference(STORED / folder.name) if (STORED / folder.name).exists() else None
    moved = None if kept is None else max(distance(kept.at(name), new) for name, new in reference.tensors.items())
    return [
        {
            "case": folder.name,
            "package": f"{reference.meta['package']} {reference.meta['version']}",
            "what": name,
            "largest": theirs.abs().max().item(),
            "difference": distance(ours, theirs),
            "stored": moved,
            "close": torch.allclose(ours, theirs, **CLOSE),
        }
        for name, (ours, theirs) in answers(folder).items()
    ]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference; infinite between different shapes."""
    return (a.double() - b.double()).abs().max().item() if a.shape == b.shape else float("inf")


def cells(found: list[dict[str, Any]]) -> list[list[str]]:
    """The table as text."""
    return [
        [
            row["case"],
            row["package"],
            row["what"],
            f"{row['largest']:.2f}",
            f"{row['difference']:.1e}",
            "–" if row["stored"] is None else f"{row['stored']:.1e}",
            "close" if row["close"] else "differs",
        ]
        for row in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="Python of an environment with speculators and dflash")
    parser.add_argument("--out", type=Path, default=Path("results/parity"), help="folder to write to")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    script = Path(__file__).with_name("reference.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as scratch, err.status("the others' networks"):
        command = [args.python, str(script), "--out", scratch]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            sys.exit(f"networks: reference.py failed: {' '.join(done.stderr[-400:].split())}")
        found = [row for folder in folders(Path(scratch)) for row in rows(folder)]
    table, text = Table(*HEAD), cells(found)
    for row in text:
        table.add_row(*row)
    out.print(table)
    rule = ["---", "---", "---", "---:", "---:", "---:", "---"]
    markdown = "".join(f"| {' | '.join(row)} |\n" for row in (HEAD, rule, *text))
    origin = {**provenance.collect(), "command": ["python", "scripts/parity/networks.py"], "ended": provenance.now()}
    record.write_file(args.out / "networks.md", markdown)
    content = {"tolerance": CLOSE, "rows": found, "provenance": origin}
    record.write_file(args.out / "networks.json", json.dumps(content, indent=1) + "\n")
    out.print(str(args.out), highlight=False)
    wrong = sorted({row["case"] for row in found if not row["close"]})
    if wrong:
        sys.exit(f"networks: not close: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
