"""Put trained drafters, and the data they were trained on, where they come with the project.

    python scripts/ship.py results/training/SmolLM2-135M-Instruct --set smollm2

Refuses a checkpoint that its card does not describe, one above 15 MiB, and data above 10 MiB.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

from drafters import shipped
from drafters.training import card, corpus

LARGEST, LARGEST_DATA = 15 << 20, 10 << 20  # bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trained", type=Path, help="folder with a folder for each family, as train_all.py leaves it")
    parser.add_argument("--data", type=Path, help="folder of the data; without it, <trained>/data")
    parser.add_argument("--set", required=True, help="name of the set: a folder in drafters/pretrained")
    arguments = parser.parse_args()
    home = shipped.HOME / arguments.set
    data = arguments.data or arguments.trained / "data"
    manifest = json.loads((data / corpus.MANIFEST).read_text())
    if (data / corpus.TABLE).stat().st_size > LARGEST_DATA:
        sys.exit(f"ship: {data / corpus.TABLE} is above {LARGEST_DATA >> 20} MiB")
    for file in sorted(arguments.trained.glob(f"*/checkpoint/{card.CARD}")):
        folder, found = file.parent, card.read(file.parent)
        size = sum(path.stat().st_size for path in folder.iterdir())
        if not card.intact(folder) or size > LARGEST:
            sys.exit(f"ship: {folder} is damaged, or its {size / 2**20:.1f} MiB are above {LARGEST >> 20}")
        if found["data"]["table_sha256"] != manifest["table_sha256"]:
            sys.exit(f"ship: {folder} was trained on other data than {data}")
        shutil.copytree(folder, home / found["family"], dirs_exist_ok=True)
        print(f"{home / found['family']}: {size / 2**20:.1f} MiB")
    (home / "data").mkdir(parents=True, exist_ok=True)
    for name in (corpus.TABLE, corpus.MANIFEST):
        shutil.copy(data / name, home / "data" / name)
    (home / shipped.TARGET).write_text(json.dumps(manifest["target"], indent=1) + "\n")


if __name__ == "__main__":
    main()
