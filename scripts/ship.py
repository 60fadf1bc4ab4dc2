"""Put trained drafters, and the data they were trained on, where they come with the project.

    python scripts/ship.py results/training/SmolLM2-135M-Instruct --set smollm2

Refuses a checkpoint that its card does not describe, one above 15 MiB, and data above 10 MiB.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from drafters import shipped
from drafters.training import card, corpus
from specbench.packaged import file_sha256

FOLDERS = ("data=", "out=", "streams=")
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
        without_places(home / found["family"])
        print(f"{home / found['family']}: {size / 2**20:.1f} MiB")
    (home / "data").mkdir(parents=True, exist_ok=True)
    shutil.copy(data / corpus.TABLE, home / "data" / corpus.TABLE)
    manifest["made_by"]["command"] = without_folders(manifest["made_by"]["command"])
    (home / "data" / corpus.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    (home / shipped.TARGET).write_text(json.dumps(manifest["target"], indent=1) + "\n")


def without_places(folder: Path) -> None:
    """Leave out of a shipped checkpoint where things lay on the machine that made it, which says nothing to others."""
    found = card.read(folder)
    name = found["target"]["name"]
    config = json.loads((folder / "config.json").read_text(), object_hook=lambda entry: named(entry, name))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    found["files"]["config.json"] = file_sha256(folder / "config.json")
    found["made_by"]["command"] = without_folders(found["made_by"]["command"])
    (folder / card.CARD).write_text(json.dumps(found, indent=1) + "\n")
    (folder / "README.md").write_text(card.in_words(found))


def named(entry: dict[str, Any], name: str) -> dict[str, Any]:
    """A JSON object with the target's ``name`` for a folder that held it."""
    return {
        key: name if isinstance(value, str) and Path(value).is_absolute() else value for key, value in entry.items()
    }


def without_folders(command: list[str]) -> list[str]:
    """A command without the settings that say where something lies."""
    return [word for word in command if not word.startswith(FOLDERS)]


if __name__ == "__main__":
    main()
