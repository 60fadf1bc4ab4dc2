"""Figures of finished runs, PNG and PDF: ``python scripts/make_figures.py results/quick --out results/quick``.

Writes speedup.png and speedup.pdf (numbered where the runs have more than one setting) and prints the paths.
"""

import argparse
import sys
from pathlib import Path

from specbench import plots, results, tables
from specbench.errors import ConfigError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="record folders, or folders that hold some")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    arguments = parser.parse_args()
    try:
        runs = results.runs(arguments.runs)
    except ConfigError as error:
        sys.exit(f"make_figures: {error}")
    groups = tables.by_setting(tables.in_order(runs))
    for number, group in enumerate(groups, start=1):
        name = "speedup" if len(groups) == 1 else f"speedup-{number}"
        for path in plots.speedup_by_drafter(group, arguments.out / name):
            print(path)


if __name__ == "__main__":
    main()
