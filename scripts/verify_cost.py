"""The free lunch and where it ends: time of a verify pass against its tokens per row and the batch size.

    python scripts/verify_cost.py                          # the default target
    python scripts/verify_cost.py target=qwen3_8b batch_sizes=[1,8] tokens=[1,5,9]

Writes verify_cost.json, which feeds predicted speedups, and a figure, to ``out``; prints the tables. Settings are those
of conf/verify_cost.yaml.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.table import Table

from specbench import cli, cost, plots, provenance, record
from specbench.cost import Shape
from specbench.errors import ConfigError, RunError
from specbench.load import MachineLoad
from specbench.model import CausalLM

SCHEMA_VERSION = 1


def measure(cfg: DictConfig) -> dict[str, Any]:
    """What verify_cost.json holds."""
    for name in ("tokens", "batch_sizes", "lengths"):
        numbers = list(cfg[name])
        if not numbers or any(type(n) is not int or n < 1 for n in numbers) or sorted(set(numbers)) != numbers:
            raise ConfigError(f"{name}={numbers} is no rising list of whole numbers from 1 on; write {name}=[1,2,5]")
    if cfg.tokens[0] != 1 or len(cfg.tokens) < 2:
        raise ConfigError(
            f"tokens={list(cfg.tokens)} must hold 1, the plain step that all else is compared with, and more"
        )
    for name in ("cached", "repeats"):
        if type(cfg[name]) is not int or cfg[name] < 1:
            raise ConfigError(f"{name}={cfg[name]} is no whole number from 1 on")
    if not cfg.draft_costs or any(not isinstance(c, int | float) or c < 0 for c in cfg.draft_costs):
        raise ConfigError(f"draft_costs={list(cfg.draft_costs)} is no list of numbers from 0 on; write [0,0.1]")
    target: CausalLM = cli.make(cfg.target)
    context = target.context or sys.maxsize
    if cfg.cached + max(cfg.tokens) > context:
        raise ConfigError(f"cached={cfg.cached} and {max(cfg.tokens)} tokens do not fit the context of {context}")
    lengths = [Shape(1, s, n) for n in cfg.lengths if n + max(cfg.tokens) <= context for s in (1, max(cfg.tokens))]
    groups = [[Shape(batch, s, cfg.cached) for s in cfg.tokens] for batch in cfg.batch_sizes]
    left_out = {}
    seconds = {}
    load = MachineLoad()
    with cli.err.status("") as status, load:
        for shapes in filter(None, [*groups, lengths]):
            status.update(f"batch {shapes[0].batch}: {len(shapes)} shapes, {cfg.repeats} times")
            try:
                seconds |= cost.time_passes(target, shapes, cfg.repeats)
            except (RunError, torch.OutOfMemoryError) as error:  # no memory for it; the others are not lost
                what = "long texts" if shapes is lengths else f"batch {shapes[0].batch}"
                left_out[what] = " ".join(str(error).split())
        bandwidth = cost.read_bandwidth(target.device)
        speed = cost.arithmetic_speed(target.device, target.dtype)
    if not seconds:
        raise RunError(f"nothing could be measured: {next(iter(left_out.values()))}")
    points = [
        {
            **asdict(shape),
            **cost.summary(times),
            "bytes": cost.bytes_read(target, shape),
            "operations": cost.operations(target, shape),
        }
        for shape, times in seconds.items()
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "target": {
            "name": target.name,
            "dtype": str(target.dtype).removeprefix("torch."),
            "quant": target.quant,
            "device": target.device.type,
            "engine": target.engine,
            "parameters": target.parameters,
            "files": target.files,
        },
        "cached": cfg.cached,
        "points": points,
        "left_out": left_out,
        "bandwidth_bytes_per_s": bandwidth,
        "arithmetic_per_s": speed,
        "break_even": cost.break_evens(points, cfg.cached, list(cfg.draft_costs)),
        "machine_load": asdict(load),
        "provenance": {**provenance.collect(), "command": ["python", *sys.argv], "ended": provenance.now()},
    }


def show(found: dict[str, Any]) -> None:
    """Print both tables."""
    curve = Table(title="a verify pass over a plain step (ms), by tokens per row")
    tokens = sorted({p["tokens"] for p in found["points"] if p["cached"] == found["cached"]})
    for name in ("batch", "plain", *map(str, tokens[1:])):
        curve.add_column(name, justify="right")
    for batch, by_tokens in cost.curves(found["points"], found["cached"]).items():
        plain = by_tokens[1]
        cells = [f"{by_tokens[s] / plain:.2f}x" if s in by_tokens else "–" for s in tokens[1:]]
        curve.add_row(str(batch), f"{1e3 * plain:.1f} ms", *cells)
    cli.out.print(curve)
    ends = Table(title="acceptance at which drafting breaks even")
    for name in ("batch", "draft cost", *(f"k={k}" for k in sorted({b["k"] for b in found["break_even"]}))):
        ends.add_column(name, justify="right")
    rows: dict[tuple[int, float], list[str]] = {}
    for entry in found["break_even"]:
        alpha = entry["acceptance"]
        rows.setdefault((entry["batch"], entry["draft_cost"]), []).append("never" if alpha is None else f"{alpha:.0%}")
    for (batch, draft_cost), cells in rows.items():
        ends.add_row(str(batch), f"{draft_cost:g}", *cells)
    cli.out.print(ends)
    for what, reason in found["left_out"].items():
        cli.out.print(f"{what} left out: {reason}", highlight=False, soft_wrap=True)


def work(cfg: DictConfig) -> None:
    """Measure, write, print."""
    found = measure(cfg)
    folder = Path(cfg.out)
    record.write_file(folder / "verify_cost.json", json.dumps(found, indent=1))
    plots.verify_cost(found, folder / "verify_cost")
    show(found)
    cli.out.print(str(folder), highlight=False)


if __name__ == "__main__":
    sys.exit(cli.run_command("verify_cost", work))
