"""Tables of finished runs as Markdown: ``python scripts/make_tables.py results/quick --out results/quick``.

Writes table.md with one table per setting (target, precision, prompts, sampling, batch size) and prints its path.
"""

import argparse
import sys
from pathlib import Path

from specbench import results, tables
from specbench.errors import ConfigError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="record folders, or folders that hold some")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    arguments = parser.parse_args()
    try:
        runs = results.runs(arguments.runs)
    except ConfigError as error:
        sys.exit(f"make_tables: {error}")
    text = "\n".join(tables.markdown(group) for group in tables.by_setting(tables.in_order(runs)))
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "table.md"
    path.write_text(text, encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
