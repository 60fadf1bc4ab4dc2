"""The free lunch and where it ends."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from specbench import cost
from specbench.plots import style
from specbench.settings import precision


def verify_cost(found: Mapping[str, Any], path: Path) -> list[Path]:
    """The free-lunch curve of what scripts/verify_cost.py found: time of a pass against tokens per row, a line per
    batch size, with its quartiles and the time that memory or arithmetic alone would take; and the acceptance that
    breaks even against k.

    Written as ``path`` in each format; returns the files.
    """
    by_batch = cost.curves(found["points"], found["cached"])
    shades = matplotlib.colormaps["viridis"]
    colours = {batch: shades(0.9 * i / max(1, len(by_batch) - 1)) for i, batch in enumerate(by_batch)}
    cheapest = min(entry["draft_cost"] for entry in found["break_even"])
    notes = [
        "left: median of the passes and, shaded, their quartiles; dotted: the time that reading memory or arithmetic "
        "alone would take, flat while it is memory's",
        "right: for drafts " + (f"each at {cheapest:g} of a plain step's time" if cheapest else "that cost no time"),
    ]
    target = found["target"]
    heading = f"{target['name']} · {precision(target)} on {target['device']} · {found['cached']} tokens cached"
    with style.page(style.DOUBLE, heading, notes) as figure:
        times, ends = figure.subplots(1, 2)
        for batch, by_tokens in by_batch.items():
            points = [p for p in found["points"] if (p["batch"], p["cached"]) == (batch, found["cached"])]
            limits = [
                1e3 * max(p["bytes"] / found["bandwidth_bytes_per_s"], p["operations"] / found["arithmetic_per_s"])
                for p in points
            ]
            look: Any = {"color": colours[batch]}
            tokens = list(by_tokens)
            times.plot(tokens, [1e3 * p["seconds"] for p in points], marker="o", label=str(batch), **look)
            low, high = zip(*([1e3 * limit for limit in p["quartiles"]] for p in points), strict=True)
            times.fill_between(tokens, low, high, alpha=0.2, linewidth=0, **look)
            times.plot(tokens, limits, linewidth=0.8, linestyle=":", **look)
            won = [
                (entry["k"], entry["acceptance"])
                for entry in found["break_even"]
                if (entry["batch"], entry["draft_cost"]) == (batch, cheapest) and entry["acceptance"] is not None
            ]
            ends.plot([k for k, _ in won], [acceptance for _, acceptance in won], marker="o", **look)
        times.set(xlabel="tokens per row in a pass", ylabel="time of a pass (ms)", yscale="log")
        times.set_xticks(sorted({tokens for by_tokens in by_batch.values() for tokens in by_tokens}))
        times.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        times.yaxis.set_major_formatter(ScalarFormatter())
        times.yaxis.set_minor_formatter(NullFormatter())
        ends.set(xlabel="draft length k (tokens)", ylabel="acceptance that breaks even", ylim=(0, 1.02))
        ends.set_xticks(sorted({entry["k"] for entry in found["break_even"]}))
        style.legend_beside(ends, [times], title="batch size")
        return style.save(figure, path, 2.2)
