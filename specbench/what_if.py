"""Would it pay there? ``python -m specbench.what_if RUN CURVE``: a run's acceptance at the costs of another machine.

CURVE is what scripts/verify_cost.py wrote on that machine, for the same target. What it does not know, the time that a
draft takes there, is taken to be the same multiple of a plain step as here; ``--draft-cost`` says it otherwise.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from specbench import cli, cost, losslessness, record, settings, tables
from specbench.errors import ConfigError
from specbench.prediction import Costs, Prediction, best, elsewhere, survival

CURVE_SCHEMA = 1


def costs_of(run: Mapping[str, Any]) -> Costs:
    """What a run's profile says its rounds cost. Raises ConfigError for a run without one."""
    model = run["model"] if run["status"] == "ok" else None
    if model is None:
        raise ConfigError(
            f"run {run['id']} was not profiled, so what its drafts cost is not known; run it again with profile=8"
        )
    passes = {int(n): seconds for n, seconds in model["pass_seconds"].items()}
    drafts = {int(k): seconds for k, seconds in model["draft_seconds"].items()}
    return Costs(model["plain_seconds"], passes, drafts, model["rest_seconds"])


def read_curve(path: Path) -> Mapping[str, Any]:
    """A verify-cost curve. Raises ConfigError for a file that is none."""
    try:
        curve = json.loads(path.read_text(encoding="utf-8"))
        known = curve["schema_version"] == CURVE_SCHEMA and curve["points"] and curve["cached"] and curve["target"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no verify-cost curve ({error}); make one with scripts/verify_cost.py") from error
    if not known:
        raise ConfigError(f"{path} has another schema version than {CURVE_SCHEMA}; make it with this code")
    return curve


def predict(
    run: Mapping[str, Any], curve: Mapping[str, Any], batch: int, draft_cost: float | None = None
) -> list[Prediction]:
    """For each k that can be told. ``draft_cost``: time of drafting a token over that of a plain step there; None for
    as here. Raises ConfigError where the curve is of another target."""
    if curve["target"]["name"] != run["target"]["name"]:
        raise ConfigError(f"the curve is of {curve['target']['name']}, and the run of {run['target']['name']}")
    costs = costs_of(run)
    if draft_cost is not None:
        drafts = {k: k * draft_cost * costs.plain for k in costs.drafts}
        costs = Costs(costs.plain, costs.passes, drafts, costs.rest)
    return elsewhere(survival(run["metrics"]["accepted_length_histogram"]), costs, curve, batch)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the prediction for each k."""
    parser = argparse.ArgumentParser(prog="python -m specbench.what_if", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="folder of a record")
    parser.add_argument("curve", type=Path, help="verify_cost.json of the other machine")
    parser.add_argument(
        "--batch-size", type=int, default=None, help="of the curve; without it, the run's own, and beside it all"
    )
    parser.add_argument("--draft-cost", type=float, default=None, help="a drafted token's time over a plain step's")
    asked = parser.parse_args(arguments)
    try:
        run, curve = record.read(asked.run), read_curve(asked.curve)
        if asked.draft_cost is not None and not asked.draft_cost >= 0:
            raise ConfigError(f"--draft-cost={asked.draft_cost} is no time; give 0 or more, for instance 0.1")
        batch = run["config"]["batch_size"] if asked.batch_size is None else asked.batch_size
        found = predict(run, curve, batch, asked.draft_cost)
    except ConfigError as error:
        return cli.fail(str(error), cli.BAD_CONFIG)
    target, drafter = curve["target"], run["drafter"]
    cli.out.print(
        f"{drafter['name']} for {target['name']} · {settings.precision(target)} on {target['device']} · batch {batch}",
        style="bold",
        highlight=False,
        soft_wrap=True,
    )
    cli.out.print(_table(found))
    if asked.batch_size is None:
        cli.out.print(_by_batch({size: predict(run, curve, size, asked.draft_cost) for size in batch_sizes(curve)}))
    if settings.precision(target) != settings.precision(run["target"]):
        theirs = settings.precision(run["target"])
        cli.out.print(f"Note: the run was in {theirs}; acceptance may differ.", highlight=False, soft_wrap=True)
    told = {p.k for p in found}
    unknown = [k for k in range(run["drafter"]["k"] + 1) if k not in told]
    for k in unknown:
        cli.out.print(
            f"Note: k={k} cannot be told: the curve has no pass over {k + 1} tokens, or drafting {k} was not timed.",
            highlight=False,
            soft_wrap=True,
        )
    cli.out.print(f"Best draft length{' of these' if unknown else ''}: {best(found).k}.", highlight=False)
    for line in tables.flags([run]):
        cli.out.print(f"Note: {line}.", highlight=False, soft_wrap=True)
    if not losslessness.holds(run["metrics"]["lossless"]):
        cli.out.print("Note: the run is not shown to be lossless.", highlight=False)
    return cli.OK


def batch_sizes(curve: Mapping[str, Any]) -> list[int]:
    """Those at which a plain step was measured."""
    return [size for size, by_tokens in cost.curves(curve["points"], curve["cached"]).items() if 1 in by_tokens]


def _by_batch(found: Mapping[int, Sequence[Prediction]]) -> Table:
    speedups = {size: {p.k: p.speedup for p in each} for size, each in found.items()}
    table = tables.numbers(("k", *(f"batch {size}" for size in speedups)))
    for k in sorted({k for each in speedups.values() for k in each}):
        table.add_row(str(k), *(tables.show(each.get(k), "{:.2f}x") for each in speedups.values()))
    table.caption = "speedup at the batch sizes of the curve, on the same assumptions"
    return table


def _table(found: Sequence[Prediction]) -> Table:
    table = tables.numbers(("k", "tokens/pass", "speedup", "bound", "pays from"))
    for p in found:
        pays = tables.show(p.break_even, "{:.0%}")
        table.add_row(str(p.k), f"{p.tokens_per_pass:.2f}", f"{p.speedup:.2f}x", f"{p.bound:.2f}x", pays)
    table.caption = (
        "predicted from the run's acceptance and the curve's passes; a draft is taken to cost as much of a\n"
    )
    table.caption += "plain step as in the run, whatever the machine and the batch size (--draft-cost sets it)"
    return table


if __name__ == "__main__":
    sys.exit(main())
