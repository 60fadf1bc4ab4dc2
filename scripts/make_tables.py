"""Tables of finished runs: ``python scripts/make_tables.py results/quick --out results/quick``.

Writes table.md, all that is to be said of each run, for reading; comparison, the same for papers; categories; and by_k
and by_batch, where drafters were run at several. All but the first come as .md, as .tex, and as .csv with the numbers
as they are. Runs of different settings (target, precision, prompts, sampling, …) stand in
tables of their own, and in groups of their own in a .csv. Prints the paths of what it wrote, and removes files of these
names that an earlier call left and this one has no runs for.
"""

import argparse
import sys
from pathlib import Path

from specbench import record, results, sheets, tables, typeset
from specbench.errors import ConfigError, RunError

SUFFIXES = (".md", ".csv", ".tex")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="record folders, or folders that hold some")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    arguments = parser.parse_args()
    try:
        texts = written(results.runs(arguments.runs))
        for name, text in texts.items():
            record.write_file(arguments.out / name, text)
            print(arguments.out / name)
    except (ConfigError, RunError) as error:
        sys.exit(f"make_tables: {error}")
    for name in (f"{name}{suffix}" for name in sheets.NAMES for suffix in SUFFIXES):
        stale = arguments.out / name
        if name not in texts and stale.exists():
            stale.unlink()
            print(f"make_tables: removed {stale}, for which there are no runs now", file=sys.stderr)


def written(runs: list[tables.Run]) -> dict[str, str]:
    """What to write, by name of the file."""
    texts = {"table.md": "\n".join(map(tables.markdown, tables.by_setting(runs)))}
    for document in sheets.documents(runs):
        texts[f"{document.name}.md"] = typeset.markdown(document)
        texts[f"{document.name}.csv"] = document.numbers.to_csv(index=False)
        texts[f"{document.name}.tex"] = typeset.latex(document)
    return texts


if __name__ == "__main__":
    main()
