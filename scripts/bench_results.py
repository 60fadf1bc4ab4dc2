"""How long many records take to load, and how much memory: ``python scripts/bench_results.py``.

Makes copies of stored records, with as many steps as asked for, in a temporary folder; loads all, as a frame of runs
and all raw steps, in a process of its own, and prints what that took.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from specbench import record

LOAD = """
import sys, time
began = time.perf_counter()
from specbench import results
imported = time.perf_counter()
runs = results.frame(sys.argv[1:])
framed = time.perf_counter()
steps = results.steps(sys.argv[1:])
ended = time.perf_counter()
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(f"{len(runs):,} runs in {framed - imported:.2f} s and {len(steps):,} steps in {ended - framed:.2f} s, "
      f"after {imported - began:.2f} s of imports; at most {int(peak) / 1024:.0f} MiB of memory in all")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of all records together (%(default)s)")
    parser.add_argument(
        "--like", type=Path, default=Path("results/reference/quick"), help="records to copy (%(default)s)"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), record.find([asked.like]), asked.records, asked.steps // asked.records)
        subprocess.run([sys.executable, "-c", LOAD, folder], check=True)


def make(folder: Path, models: list[Path], records: int, steps: int) -> None:
    """So many records with so many steps each."""
    runs = [json.loads((model / record.RUN).read_text(encoding="utf-8")) for model in models]
    tables = [pd.read_parquet(model / record.STEPS) for model in models]
    tables = [table.iloc[np.arange(steps) % len(table)] for table in tables]
    for number in range(records):
        which = number % len(models)
        record.write(folder, {**runs[which], "id": f"{number:012x}"}, tables[which])


if __name__ == "__main__":
    main()
