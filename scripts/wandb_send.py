"""Send records to Weights & Biases: ``python scripts/wandb_send.py results/runs --group my-study``.

For records that were made without a tracker. What was sent before is replaced.
"""

import argparse
import sys
from pathlib import Path

from specbench import cli, record, tracking
from specbench.errors import ConfigError, RunError
from specbench.wandb_tracker import MODES, Wandb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="record folders, or folders that hold some")
    parser.add_argument("--project", default="specbench")
    parser.add_argument("--entity", help="user or team; without it, your default one")
    parser.add_argument("--group", help="what the records are part of")
    parser.add_argument("--mode", choices=MODES, help="without it, online if you are logged in")
    parser.add_argument("--figures", action="store_true", help="figures as images")
    parser.add_argument("--artifacts", action="store_true", help="the records' files")
    arguments = parser.parse_args()
    cli.quiet()
    settings = {name: getattr(arguments, name) for name in ("project", "entity", "mode", "figures", "artifacts")}
    tracker = Wandb(**settings)
    code = cli.OK
    try:
        folders = record.find(arguments.runs)
    except ConfigError as error:
        sys.exit(f"wandb_send: {error}")
    for folder in folders:
        try:
            run = record.read(folder)
            tracker.begin(tracking.page(run, arguments.group, folder.parent))
            tracker.end(tracking.ending(run, folder))
            print(folder)
        except (ConfigError, RunError) as error:  # the others can be sent all the same
            code = cli.fail(f"not sent: {error}", cli.FAILED)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
