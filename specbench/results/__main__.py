"""List, show and export finished runs: ``python -m specbench.results ls``, ``show ID``, ``export RUNS… --out FILE``.

Exit codes: 0 done, 1 a file could not be written, 2 what was asked for is not there.
"""

import argparse
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from specbench import cli, record, results, tables
from specbench.errors import ConfigError, RunError, nearest
from specbench.results.show import show

HOME = Path("results")
# what most runs of a folder share: said once above the list where they do, and a column of it where they do not
SHARED = (
    "target",
    "dtype",
    "quant",
    "device",
    "dataset",
    "turns",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "batch_size",
    "seed",
    "repeats",
)
COUNTED = ("turns",)  # a failed run has not
NONE = "–"
WIDE = 1000  # characters
FEW = 3  # runs that an error names
FILTERS = ("drafter", "k", "status", "lossless", *SHARED)


def listing(found: pd.DataFrame, width: int) -> tuple[str, Table]:
    """What all runs share, in words, and a table with a line for each run, newest last. To fit into ``width``
    characters only the reasons of failed runs are cut."""
    found = found.sort_values("started", kind="stable", na_position="first")
    words = {name: found[name].map(_word) for name in SHARED}
    known = {name: words[name][found["status"] == "ok"] if name in COUNTED else words[name] for name in SHARED}
    differing = [name for name in SHARED if known[name].nunique() > 1]
    shared = {name: known[name].iloc[0] for name in SHARED if known[name].nunique() == 1}
    rows = []
    for place, run in enumerate(found.to_dict("records")):
        limits = None if pd.isna(run["speedup_low"]) else (run["speedup_low"], run["speedup_high"])
        rows.append(
            (
                run["id"],
                NONE if pd.isna(run["started"]) else f"{run['started']:%Y-%m-%d %H:%M}",
                run["drafter"],
                _word(run["k"]),
                *(words[name].iloc[place] for name in differing),
                _number(run["tokens_per_pass"], "{:.2f}"),
                _number(run["speedup"], "{:.2f}x"),
                tables.interval(limits),
                _word(run["lossless"]) if run["status"] == "ok" else f"failed: {' '.join(run['error'].split())}",
            )
        )
    table = tables.numbers(("id", "started", "drafter", "k", *differing, "tokens/pass", "speedup", "95 % CI", ""))
    for column, cells in zip(table.columns, zip(*rows, strict=True), strict=True):
        column.no_wrap, column.overflow = True, "ellipsis"
        column.width = max(map(len, (str(column.header), *cells)))  # a number that is cut is another number
        if column.header in ("id", "started"):
            column.justify = "left"
    *others, last = (column.width or 0 for column in table.columns)
    table.columns[-1].width = max(len("near-tie"), min(last, width - sum(others) - len(table.columns) - 1))
    for row, status in zip(rows, found["status"], strict=True):
        table.add_row(*row, style=None if status == "ok" else "red")
    return " · ".join(f"{name} {word}" for name, word in shared.items() if word != NONE), table


def chosen(found: pd.DataFrame, wanted: dict[str, str]) -> pd.DataFrame:
    """The runs that have one of the comma-separated values of every column that is ``wanted``. Raises ConfigError for
    a value that none of them has."""
    keep = pd.Series(True, index=found.index)
    for name, text in wanted.items():
        words, values = found[name].map(_word), text.split(",")
        for value in values:
            if value not in set(words):
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} {value}: no such run. {nearest(value, words.unique())}")
        keep &= words.isin(values)
    if not keep.any():
        raise ConfigError(f"no run has {' and '.join(f'{name} {text}' for name, text in wanted.items())}")
    return found[keep]


def the_one(name: str, home: Path) -> dict[str, Any]:
    """The record that is named, by its folder or by the beginning of its id, with its ``folder``. Raises ConfigError
    if that is none or several."""
    if Path(name).is_dir():
        folders = list(map(str, record.find([Path(name)])))
    elif not home.is_dir():
        raise ConfigError(f"{name} is no folder, and there is no {home} to look for it in; give --in FOLDER")
    else:
        every = results.frame([home])
        folders = every["folder"][every["id"].str.startswith(name)].tolist()
        if not folders:
            raise ConfigError(f"no run {name} in {home}; python -m specbench.results ls {home} lists those there are")
    if len(folders) > 1:
        more = ", …" if len(folders) > FEW else ""
        raise ConfigError(f"{name} is {len(folders)} runs; give one of {', '.join(folders[:FEW])}{more}")
    return {**record.read(Path(folders[0])), "folder": folders[0]}


def _parquet(found: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    found.to_parquet(buffer, index=False)
    return buffer.getvalue()


def _json(found: pd.DataFrame) -> str:
    """Written here, as pandas would round to 15 digits."""
    rows = found.astype(object).where(found.notna(), None).to_dict("records")
    return json.dumps(rows, indent=1, ensure_ascii=False, default=lambda time: time.isoformat())


# by suffix of the file
FORMATS: dict[str, Callable[[pd.DataFrame], str | bytes]] = {
    ".csv": lambda found: found.to_csv(index=False),
    ".parquet": _parquet,
    ".json": _json,
}


def _ls(asked: argparse.Namespace) -> None:
    wanted = {name: getattr(asked, name) for name in FILTERS if getattr(asked, name) is not None}
    shared, table = listing(chosen(results.frame(asked.runs or [HOME]), wanted), _out().width)
    cli.out.print(shared, style="bold", highlight=False, soft_wrap=True)
    Console(width=WIDE, markup=False).print(table)  # a terminal that is too narrow breaks the lines itself


def _show(asked: argparse.Namespace) -> None:
    for part in show(the_one(asked.run, asked.home)):
        _out().print(part, highlight=False, soft_wrap=isinstance(part, str))


def _export(asked: argparse.Namespace) -> None:
    written = FORMATS.get(asked.out.suffix)
    if written is None:
        raise ConfigError(f"--out {asked.out}: its suffix says the format; give one of {', '.join(FORMATS)}")
    found = (results.steps if asked.steps else results.frame)(asked.runs)
    record.write_file(asked.out, written(found))
    cli.out.print(f"{asked.out}: {len(found):,} {'steps' if asked.steps else 'runs'}", highlight=False, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m specbench.results", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="ls | show | export")
    runs: dict[str, Any] = {"type": Path, "metavar": "RUNS", "help": "record folders, or folders that hold some"}
    ls = commands.add_parser("ls", help="a line for each run, newest last")
    ls.add_argument("runs", nargs="*", **runs)
    for name in FILTERS:
        ls.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE,…", help=f"only runs of this {name}")
    ls.set_defaults(work=_ls)
    one = commands.add_parser("show", help="all that a record says of its run")
    one.add_argument("run", metavar="ID_OR_FOLDER", help="of the record; the beginning of an id suffices")
    one.add_argument("--in", dest="home", type=Path, default=HOME, help="where to look for an id (%(default)s)")
    one.set_defaults(work=_show)
    export = commands.add_parser("export", help="a row for each run in one file")
    export.add_argument("runs", nargs="+", **runs)
    export.add_argument("--out", type=Path, required=True, metavar="FILE", help=f"{', '.join(FORMATS)}, by its suffix")
    export.add_argument("--steps", action="store_true", help="a row for each raw step, without the lists of tokens")
    export.set_defaults(work=_export)
    return parser


def _out() -> Console:
    """The terminal; or, into a pipe or a file, one so wide that every line stays whole."""
    return Console(width=cli.out.width if cli.out.is_terminal else WIDE, markup=False)


def _word(value: Any) -> str:
    """A value as it is listed, and typed to filter by it."""
    if pd.isna(value):
        return NONE
    return f"{value:g}" if isinstance(value, float) else str(value)


def _number(value: float, form: str) -> str:
    return tables.show(None if pd.isna(value) else value, form)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says and return the exit code."""
    asked = _parser().parse_args(arguments)
    cli.quiet()
    try:
        asked.work(asked)
    except ConfigError as error:
        return cli.fail(str(error), cli.BAD_CONFIG)
    except RunError as error:
        return cli.fail(str(error), cli.FAILED)
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
