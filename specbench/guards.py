"""What must be known before a number of a run is believed: each doubt is a named flag.

A flag is raised by what was measured or is known, never by a guess about the method; it is in run.json, in every table
that has the run, and in figures.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import pandas as pd

from specbench.metrics import MIN_UNITS

UNSTEADY = 1.5  # clock_spread above which timings are doubted
UNEVEN = 1.2  # repeat_spread above which they are
FEW_ROUNDS = 200
NGRAM = 4  # tokens
LONG_ENOUGH = 32  # tokens of a reply that can be judged for repetition
REPETITIVE = 0.5  # share of a reply's n-grams that it has said before, above which it runs in circles
MANY = 0.25  # share of replies that do so, above which the speedup is one of circles
FAIR = 0.95  # of another engine's speed, below which our plain decoding is a slow baseline
SLOWED = 0.9  # of the clock before a run, below which it was held back
HELD_BACK = 0xEC  # NVML's reasons for a lower clock: power cap, slowdown of hardware, heat, power brake
NONSENSE = 0.75  # of the surprise of tokens drawn at random, above which prompts are taken for such


# flags of ``of_results``, which a record can be asked for again
MEASURED = (
    "unsteady-clock",
    "uneven-repeats",
    "few-prompts",
    "few-rounds",
    "repetitive-text",
    "changing-text",
    "changed-text",
    "untested-law",
    "unpredicted",
)


@dataclass(frozen=True)
class Flag:
    """A doubt: its name, and a clause that says what it is about, without a full stop."""

    flag: str
    message: str


def repetition(reply: Sequence[int]) -> float:
    """Share of the n-grams of a reply that occurred in it before.

    >>> repetition([1, 2, 3, 4, 5, 1, 2, 3, 4, 6])
    0.14285714285714285
    """
    grams = Counter(tuple(reply[i : i + NGRAM]) for i in range(len(reply) - NGRAM + 1))
    total = sum(grams.values())
    return 1 - len(grams) / total if total else 0.0


def of_results(found: Mapping[str, Any], prompts: pd.DataFrame) -> Iterator[Flag]:
    """Of what was measured. ``found``: ``metrics``, ``model`` and counts of ``prompts``, as the record has them."""
    metrics, model, counts = found["metrics"], found["model"], found["prompts"]
    spread, uneven = metrics["clock_spread"], metrics["repeat_spread"]
    if spread is not None and spread >= UNSTEADY:
        yield Flag(
            "unsteady-clock",
            f"the machine is unsteady: plain decoding's rounds, all alike, vary {spread:.1f}-fold in time (95th to 5th "
            "percentile); intervals see that only in part",
        )
    if uneven is not None and uneven >= UNEVEN:
        yield Flag("uneven-repeats", f"the same plain decoding took up to {uneven:.2f} times as long when repeated")
    if metrics["units"] < MIN_UNITS:
        yield Flag(
            "few-prompts",
            f"{metrics['units']} conversations (groups of them above batch size 1) are too few for an interval; "
            f"{MIN_UNITS} are needed",
        )
    if metrics["rounds"] < FEW_ROUNDS:
        yield Flag("few-rounds", f"{metrics['rounds']} verify passes are few; more prompts or longer replies say more")
    circles = [reply for reply in prompts["baseline_tokens"] if len(reply) >= LONG_ENOUGH]
    caught = sum(repetition(list(reply)) > REPETITIVE for reply in circles)
    if circles and caught > MANY * len(circles):
        yield Flag(
            "repetitive-text",
            f"{caught} of {len(circles)} replies of plain decoding mostly repeat themselves, which flatters every "
            "drafter; use other prompts, shorter replies or a temperature",
        )
    if counts["changed_by_repeats"]:
        yield Flag("changing-text", f"repeats of {len(counts['changed_by_repeats'])} prompts differ in their text")
    if metrics["lossless"]["verdict"] == "mismatch":
        yield Flag("changed-text", "it changed the text: its speedup is not that of a lossless method")
    if metrics["lossless"]["verdict"] == "untested":
        yield Flag("untested-law", "whether sampled text has the target's law is not known: too few tokens, or no test")
    if model is not None and model["explanation"] is not None:
        yield Flag("unpredicted", model["explanation"])


def of_prompts(surprise: float | None, vocabulary: int, shared: Sequence[str]) -> Iterator[Flag]:
    """``surprise``: nats by which a token of the prompts surprises the target, of ``vocabulary`` tokens; ``shared``:
    uids of prompts that a drafter may have learned from."""
    if surprise is not None and surprise > NONSENSE * math.log(vocabulary):
        yield Flag(
            "synthetic-prompts",
            f"the prompts surprise the target by {surprise:.1f} nats a token, nearly as random tokens would "
            f"({math.log(vocabulary):.1f}); acceptance on them says nothing of real text",
        )
    if shared:
        few = ", ".join([*shared[:3], *["…"][: len(shared) > 3]])
        yield Flag("seen-in-training", f"{len(shared)} prompts share 8 words in a row with its training data ({few})")


def of_engine(engine: str | None, device: str) -> Iterator[Flag]:
    """A baseline that is slower than it has to be flatters every drafter. ``engine``: what was asked for."""
    if engine == "plain":
        yield Flag(
            "slow-baseline",
            f"target.engine=plain is not the fastest plain decoding on {device}; speedups over it are too high",
        )


def of_peers(benchmark: Mapping[str, Any], weights: str, machine: Mapping[str, Any]) -> Iterator[Flag]:
    """The same, by what scripts/bench_engine.py found of other engines; of another processor, or other threads, it says
    nothing.

    weights: what they are stored in, as the benchmark names it (bfloat16, int8); machine: this one, as records have it.
    """
    measured = benchmark["provenance"]["machine"]
    if any(measured.get(fact) != machine.get(fact) for fact in ("cpu", "threads")):
        return
    ratios: dict[str, float] = {}
    for group, found in benchmark["compared"].items():
        ours = found["seconds"].get(f"specbench {weights}")
        if not group.startswith("plain decoding") or ours is None:
            continue
        for peer, theirs in found["seconds"].items():
            if peer.endswith(f" {weights}"):  # the same weights
                ratios[peer] = median(b / a for a, b in zip(ours, theirs, strict=True))
    slower = min(ratios, key=lambda peer: ratios[peer], default=None)
    if slower is not None and ratios[slower] < FAIR:
        yield Flag(
            "slow-baseline",
            f"plain decoding has {ratios[slower]:.2f} times the speed of {slower} on this processor, by the engine "
            "benchmark; speedups over the fastest plain decoding are lower by as much",
        )


def of_clocks(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Flag]:
    """Of what the machine's clocks were at around a run, as ``provenance.clocks`` reads them."""
    told = []
    if (after.get("cpu_throttled") or 0) > (before.get("cpu_throttled") or 0):
        told.append("the processor was too hot")
    if before.get("cpu_mhz") and (after.get("cpu_mhz") or 0.0) < SLOWED * before["cpu_mhz"]:
        told.append(f"the processor's clock fell from {before['cpu_mhz']:.0f} to {after.get('cpu_mhz') or 0:.0f} MHz")
    reasons = after.get("gpu_clocks_event_reasons.active", "")
    if reasons.startswith("0x") and int(reasons, 16) & HELD_BACK:
        told.append(f"the GPU's clock was held back (reasons {reasons})")
    if told:
        yield Flag("throttled", f"the machine slowed down while this ran: {', '.join(told)}")
