"""Train all families on equal terms, and gather what came of it: ``python scripts/train_all.py target=smollm2``.

Several families learn at a time, each in one process of a few threads: threads that wait for each other waste their
cores. The target's residual streams are computed first, by all of them together, and kept.
Arguments are those of ``python -m drafters.training`` and go to each. What is finished is not done again, what was
interrupted goes on. The output of each family is in results/training/<target>/<family>/log.txt.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# glibc gives memory of this size back to the kernel, and asks for it again, at every operation; kept, it saves a tenth
# of a step
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
FAMILIES = ("dspark", "dflash", "eagle", "mtp", "small_lm", "medusa")  # the slowest first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="of python -m drafters.training, for instance target=smollm2")
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--jobs", type=int, default=None, help="families at a time; without it, one per two cores or 2")
    parser.add_argument("--out", type=Path, required=True, help="folder, with a folder for each family")
    arguments = parser.parse_args()
    cores = os.cpu_count() or 1
    jobs = arguments.jobs or min(2, cores)
    environment = {**KEEP_MEMORY, **os.environ, "OMP_NUM_THREADS": str(max(1, cores // jobs))}

    def train(family: str) -> int:
        folder = arguments.out / family
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "drafters.training", f"drafter={family}", f"out={folder}", *arguments.settings]
        with (folder / "log.txt").open("a") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode
        last = (folder / "log.txt").read_text().strip().splitlines()[-3:]
        print(f"{family}: {'done' if code == 0 else f'exit code {code}'}\n  " + "\n  ".join(last), flush=True)
        return code

    with ThreadPoolExecutor(jobs) as pool:
        codes = list(pool.map(train, arguments.families))
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
