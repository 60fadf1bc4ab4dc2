"""Figures of runs, computed from their records."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

from specbench import cost
from specbench.families import COLOURS, OTHER, colour
from specbench.tables import Run, labels, title

STYLE: Any = {
    "figure.dpi": 150,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "pdf.fonttype": 42,  # text stays text
}
FOOTNOTE: Any = {"fontsize": 7, "color": "#555555"}
FORMATS = ("png", "pdf")


def speedup_by_drafter(runs: Sequence[Run], path: Path) -> list[Path]:
    """Bars of speedup and of tokens per verify pass by drafter, with 95 % intervals, for one group of runs.

    Written as ``path`` with each of ``FORMATS``; returns the files. A failed run has the word in place of a bar.
    """
    panels = [
        ("speedup", "speedup_ci95", "speedup over plain decoding (×)"),
        ("tokens_per_pass", "tokens_per_pass_ci95", "tokens per verify pass"),
    ]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(6.8, 1.1 + 0.42 * len(runs)), sharey=True, layout="constrained")
        names = [f"{label}, k={run['drafter']['k']}" for label, run in zip(labels(runs), runs, strict=True)]
        for axis, (metric, interval, label) in zip(axes, panels, strict=True):
            for y, run in enumerate(runs):
                if run["status"] == "ok":
                    _bar(axis, y, run["metrics"][metric], run["metrics"][interval], colour(run))
                else:
                    axis.annotate("failed", (0, y), xytext=(4, 0), textcoords="offset points", va="center", color="red")
            axis.axvline(1, color="#444444", linewidth=0.8, linestyle="--")
            axis.set_xlabel(label)
            axis.set_xlim(left=0)
            axis.margins(x=0.16)
        axes[0].set_yticks(range(len(runs)), names)
        axes[0].invert_yaxis()
        figure.suptitle(" · ".join(title(runs)), fontsize=8)
        figure.supxlabel("\n".join(["whiskers: 95 % bootstrap interval over prompts", *_flags(runs, 110)]), **FOOTNOTE)
        return _save(figure, path)


def acceptance_by_position(runs: Sequence[Run], expected: Mapping[str, Sequence[float]], path: Path) -> list[Path]:
    """Joint acceptance against the position in the draft, a line per run; ``expected``, by drafter, is what training's
    validation found, dashed. Written as ``path`` with each of ``FORMATS``; returns the files."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
        for label, run in zip(labels(runs), runs, strict=True):
            joint = run["metrics"]["acceptance_by_position"]["joint"]
            axis.plot(range(1, len(joint) + 1), joint, marker="o", markersize=3, color=colour(run), label=label)
            found = expected.get(run["drafter"]["name"], ())
            axis.plot(range(1, len(found) + 1), found, linestyle="--", linewidth=0.9, color=colour(run))
        axis.set_xlabel("position in the draft")
        axis.set_ylabel("share of rounds accepted up to it")
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.legend(frameon=False, fontsize=7)
        figure.suptitle("\n".join(textwrap.wrap(" · ".join(title(runs)), 80)), fontsize=7)
        if expected:
            dashed = "dashed: on held-out replies of the training data"
            figure.supxlabel("\n".join([dashed, *_flags(runs, 75)]), **FOOTNOTE)
        return _save(figure, path)


def scaling(family: str, points: Mapping[str, Sequence[tuple[float, float]]], path: Path) -> list[Path]:
    """Tokens per verify pass against the positions that a drafter has learned from, a line for each kind of text.
    Written as ``path`` with each of ``FORMATS``; returns the files."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(4.2, 3.0), layout="constrained")
        for (name, found), line in zip(points.items(), ("-", "--", ":"), strict=False):
            own = COLOURS.get(family, OTHER)
            axis.plot(
                *zip(*sorted(found), strict=True), marker="o", markersize=3, color=own, linestyle=line, label=name
            )
        axis.set_xscale("log")
        axis.set_xticks([tokens for tokens, _ in next(iter(points.values()))])
        axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1e6:.2g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel("positions learned from (millions)")
        axis.set_ylabel("tokens per verify pass")
        axis.legend(frameon=False, fontsize=7)
        figure.suptitle(f"{family}, held-out replies", fontsize=9)
        return _save(figure, path)


def verify_cost(found: Mapping[str, Any], path: Path) -> list[Path]:
    """The free-lunch curve of what scripts/verify_cost.py found: time of a pass against tokens per row, a line per
    batch size, with the time that memory or arithmetic alone would take; and the acceptance that breaks even against
    k. Written as ``path`` with each of ``FORMATS``; returns the files."""
    by_batch = cost.curves(found["points"], found["cached"])
    shades = plt.get_cmap("viridis")
    colours = {batch: shades(0.9 * i / max(1, len(by_batch) - 1)) for i, batch in enumerate(by_batch)}
    with plt.rc_context(STYLE):
        figure, (times, ends) = plt.subplots(1, 2, figsize=(6.8, 3.2), layout="constrained")
        for batch, by_tokens in by_batch.items():
            points = [p for p in found["points"] if (p["batch"], p["cached"]) == (batch, found["cached"])]
            measured = [1e3 * p["seconds"] for p in points]
            limits = [
                1e3 * max(p["bytes"] / found["bandwidth_bytes_per_s"], p["operations"] / found["arithmetic_per_s"])
                for p in points
            ]
            tokens = list(by_tokens)
            times.plot(tokens, measured, marker="o", markersize=3, color=colours[batch], label=str(batch))
            times.plot(tokens, limits, color=colours[batch], linewidth=0.8, linestyle=":")
        times.set(xlabel="tokens per row in a pass", ylabel="time of a pass (ms)", yscale="log")
        times.set_title("dotted: flat while reading memory takes longer,\nrising once arithmetic does", fontsize=7)
        cheapest = min(entry["draft_cost"] for entry in found["break_even"])
        for batch in by_batch:
            line = [e for e in found["break_even"] if (e["batch"], e["draft_cost"]) == (batch, cheapest)]
            won = [e for e in line if e["acceptance"] is not None]
            ends.plot(
                [e["k"] for e in won], [e["acceptance"] for e in won], marker="o", markersize=3, color=colours[batch]
            )
        ends.set(
            xlabel="draft length k", ylabel="acceptance that breaks even", ylim=(0, 1.02),
        )  # fmt: skip
        price = f"each at {cheapest:g} of a plain step's time" if cheapest else "that cost no time"
        ends.set_title(f"for drafts {price}", fontsize=7)
        times.set_xticks(sorted({t for by_tokens in by_batch.values() for t in by_tokens}))
        times.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        times.yaxis.set_major_formatter(ScalarFormatter())
        times.yaxis.set_minor_formatter(NullFormatter())
        ends.set_xticks(sorted({e["k"] for e in found["break_even"]}))
        handles, names = times.get_legend_handles_labels()
        ends.legend(
            handles, names, title="batch size", frameon=False, fontsize=7, title_fontsize=7, ncols=2, loc="upper left"
        )
        target = found["target"]
        precision = target["dtype"] if target["quant"] is None else f"{target['dtype']}, {target['quant']} weights"
        figure.suptitle(f"{target['name']} · {precision} on {target['device']} · {found['cached']} cached", fontsize=9)
        return _save(figure, path)


def _flags(runs: Sequence[Run], width: int) -> list[str]:
    """Lines, of so many characters, that name the flags of the runs and whom they are about, if that is not all."""
    told: dict[str, list[str]] = {}
    for run, label in zip(runs, labels(runs), strict=True):
        for flag in dict.fromkeys(flag["flag"] for flag in run["flags"]):
            told.setdefault(flag, []).append(label)
    named = [flag if len(who) == len(runs) else f"{flag} ({', '.join(who)})" for flag, who in told.items()]
    return textwrap.wrap(f"flags: {'; '.join(named)}", width) if named else []


def _bar(axis: Axes, y: int, value: float | None, interval: list[float] | None, colour: str) -> None:
    if value is None:
        return  # nothing was proposed, or no pass was made
    spread = None if interval is None else [[max(0, value - interval[0])], [max(0, interval[1] - value)]]
    axis.barh(y, value, height=0.62, color=colour, xerr=spread, error_kw={"elinewidth": 1, "capsize": 2.5})
    end = value if interval is None else max(value, interval[1])
    axis.annotate(f"{value:.2f}", (end, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)


def _save(figure: Figure, path: Path) -> list[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_suffix(f".{form}") for form in FORMATS]
    for file in files:
        figure.savefig(file)
    plt.close(figure)
    return files
