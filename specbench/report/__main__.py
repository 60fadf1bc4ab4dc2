"""A report page of finished runs: ``python -m specbench.report results/quick --out report.html``.

One HTML file with everything in it, which opens from disk with no network: what the runs show in words, tables, figures
with their data, what is to be doubted, where it is from, and the replies token by token.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from specbench import cli, record, results
from specbench.errors import ConfigError, RunError
from specbench.report import page


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page of the records that are named, and print its path."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m specbench.report", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="record folders, or folders that hold some")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="file to write (default: report.html)")
    parser.add_argument("--prompts", type=int, default=12, help="prompts to show token by token (default: 12)")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        action="append",
        default=[],
        help="a target's tokenizer.json, or the folder it is in, where it is not found by itself; it is used for the "
        "targets whose record has its hash",
    )
    asked = parser.parse_args(arguments)
    cli.quiet()
    try:
        if asked.prompts < 0:
            raise ConfigError(f"--prompts={asked.prompts} is negative; give the number of prompts to show, 0 for none")
        made = page.make(results.runs(asked.runs), asked.prompts, asked.tokenizer)
        record.write_file(asked.out, made.html)
    except ConfigError as error:
        return cli.fail(str(error), cli.BAD_CONFIG)
    except RunError as error:
        return cli.fail(str(error), cli.FAILED)
    for note in made.notes:
        cli.out.print(f"Note: {note}", highlight=False, soft_wrap=True)
    cli.out.print(str(asked.out), highlight=False, soft_wrap=True)
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
