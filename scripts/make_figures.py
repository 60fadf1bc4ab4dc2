"""Figures of finished runs, PNG and PDF: ``python scripts/make_figures.py results/quick --out results/quick``.

Makes every figure that the runs allow, removes those of an earlier call that they no longer do, and prints the paths.
Where the runs have more than one setting there is a numbered figure for each. With --verify-cost, a verify_cost.json
that scripts/verify_cost.py wrote, also the free-lunch curve.
"""

import argparse
import sys
from pathlib import Path

from specbench import plots, results
from specbench.errors import ConfigError, RunError
from specbench.what_if import read_curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="record folders, or folders that hold some")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--verify-cost", type=Path, help="a verify_cost.json, for the free-lunch curve")
    arguments = parser.parse_args()
    try:
        runs = results.runs(arguments.runs)
        curve = read_curve(arguments.verify_cost) if arguments.verify_cost else None
        files = plots.draw(runs, arguments.out, curve)
    except (ConfigError, RunError) as error:
        sys.exit(f"make_figures: {error}")
    for path in files:
        print(path)


if __name__ == "__main__":
    main()
