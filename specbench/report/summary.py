"""What a group of runs shows, in sentences that claim no more than the intervals do."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench import losslessness, tables
from specbench.metrics import MIN_UNITS
from specbench.raw import Run

# of two runs: the speedup of the first over the second and its interval, as ``specbench.compare`` finds them; None
# where they cannot be paired
Versus = Callable[[Run, Run], Mapping[str, Any] | None]
MANY = 12  # runs: more are counted and not named, where nothing is wrong with their text


@dataclass(frozen=True)
class Sentence:
    """About what it is (``speed``, ``text``, ``doubt`` or ``failed``), and what it says."""

    about: str
    text: str


def sentences(runs: Sequence[Run], versus: Versus) -> list[Sentence]:
    """What is to be said of runs of one setting, the most important first."""
    called = names(runs)
    rivals = contenders(runs)
    best = _best_of_each(rivals)
    speed = [*_fastest(rivals, called), *_against(best, called, versus), *_against_plain(best, called)]
    if len(best) > 1:
        lengths = " Of each drafter the fastest draft length is compared." if len(best) < len(rivals) else ""
        speed.append(f"Each interval is at 95 % by itself, not for all comparisons together.{lengths}")
    speed += _limits(runs, called)
    failed = [f"{called[run['id']]} failed: {run['error']}" for run in runs if run["status"] != "ok"]
    said = {"speed": speed, "text": _texts(runs, called), "doubt": _doubts(runs, called), "failed": failed}
    return [Sentence(about, text) for about, texts in said.items() for text in texts]


def names(runs: Sequence[Run]) -> dict[str, str]:
    """What to call each run of a group, by id, which is added where a name would stand for two."""
    labelled = zip(runs, tables.labels(runs), strict=True)
    called = {run["id"]: f"{label} k={run['drafter']['k']}" for run, label in labelled}
    given = Counter(called.values())
    return {id_: name if given[name] == 1 else f"{name} ({id_})" for id_, name in called.items()}


def contenders(runs: Sequence[Run]) -> list[Run]:
    """Runs that can be the fastest, the fastest first: those that drafted, without knowledge of the reply, and left the
    text what it was."""
    ran = [run for run in runs if run["status"] == "ok" and run["metrics"]["speedup"] is not None]
    fair = [run for run in ran if run["drafter"]["k"] and not run["needs_reference"] and not _changed(run)]
    return sorted(fair, key=lambda run: -run["metrics"]["speedup"])


def _best_of_each(rivals: Sequence[Run]) -> list[Run]:
    """Of each drafter with its options the fastest draft length; the fastest first, as ``rivals`` are."""
    best: dict[str, Run] = {}
    for run in rivals:
        best.setdefault(str(run["config"]["drafter"]), run)
    return list(best.values())


def _changed(run: Run) -> bool:
    """Or may have, for all that is known."""
    return not losslessness.holds(run["metrics"]["lossless"])


def _fastest(rivals: Sequence[Run], called: Mapping[str, str]) -> list[str]:
    if not rivals:
        return ["No drafter of this setting has a speedup that counts."]
    best, metrics = rivals[0], rivals[0]["metrics"]
    of = f" of {len(rivals)}" if len(rivals) > 1 else ""
    first = f"Highest measured speedup{of}: {called[best['id']]}, {metrics['speedup']:.2f} times plain decoding's speed"
    limits = metrics["speedup_ci95"]
    if limits is None:
        units = f"{metrics['units']} conversations or groups of them; {MIN_UNITS} are needed"
        told = f". There is no interval ({units}), so it is not shown to be faster than plain decoding."
    else:
        verdict = {
            "above": "It is faster than plain decoding on these prompts.",
            "below": "It is slower than plain decoding on these prompts, and no other measured higher.",
            "around": "The interval includes 1: it is not shown to be faster than plain decoding.",
        }[_side(limits)]
        told = f" (95 % interval {_span(limits)}). {verdict}"
    chance = " As the highest of several it is more likely over- than underestimated." if len(rivals) > 1 else ""
    return [first + told + chance]


def _against(rivals: Sequence[Run], called: Mapping[str, str], versus: Versus) -> list[str]:
    """The fastest against each of the others."""
    sides: dict[str, list[str]] = {"above": [], "around": [], "untold": []}
    for other in rivals[1:]:
        found, name = versus(rivals[0], other), called[other["id"]]
        limits = found["speedup_ci95"] if found else None
        if not found or limits is None:
            sides["untold"].append(name)
            continue
        side = "above" if _side(limits) == "above" else "around"
        sides[side].append(f"{name} ({found['speedup']:.2f} times its speed, {_span(limits)})")
    words = {
        "above": "Paired by prompt, {} is faster than {}.",
        "around": "Paired by prompt, {} cannot be told apart in speed from {}.",
        "untold": "{} cannot be compared with {}, as there is no interval.",
    }
    return [form.format(called[rivals[0]["id"]], _list(sides[side])) for side, form in words.items() if sides[side]]


def _against_plain(rivals: Sequence[Run], called: Mapping[str, str]) -> list[str]:
    if len(rivals) < 2:
        return []
    sides: dict[str, list[str]] = {"above": [], "around": [], "below": [], "untold": []}
    for run in rivals:
        limits = run["metrics"]["speedup_ci95"]
        sides["untold" if limits is None else _side(limits)].append(called[run["id"]])
    words = {
        "above": "Faster than plain decoding, their intervals being above 1: {}.",
        "around": "Not told apart from plain decoding, their intervals including 1: {}.",
        "below": "Slower than plain decoding, their intervals being below 1: {}.",
        "untold": "Without an interval, so that nothing is shown: {}.",
    }
    return [form.format(_list(sides[side])) for side, form in words.items() if sides[side]]


def _limits(runs: Sequence[Run], called: Mapping[str, str]) -> list[str]:
    """What frames the numbers: plain decoding against itself, and drafters that know the reply."""
    lines, bounds = [], []
    for run in runs:
        if run["status"] != "ok" or run["metrics"]["speedup"] is None:
            continue
        limits = run["metrics"]["speedup_ci95"]
        speedup = f"{run['metrics']['speedup']:.2f}" + (f" ({_span(limits)})" if limits else "")
        if run["drafter"]["k"] == 0:
            off = limits and _side(limits) != "around"
            doubt = "; its interval leaves out 1, so that the others may be too narrow" if off else ""
            lines.append(f"Plain decoding measured against itself came to {speedup}, where 1 is right{doubt}.")
        elif run["needs_reference"]:
            bounds.append(f"{called[run['id']]} at {speedup}")
    return lines + ([f"Told the reply beforehand, and so no drafter but a bound: {_list(bounds)}."] if bounds else [])


def _texts(runs: Sequence[Run], called: Mapping[str, str]) -> list[str]:
    """Whether the replies are those of plain decoding."""
    verdicts: dict[str, list[Run]] = {}
    done = [run for run in runs if run["status"] == "ok"]
    for run in done:
        verdicts.setdefault(run["metrics"]["lossless"]["verdict"], []).append(run)
    if list(verdicts) == ["equal"]:
        prompts = sorted({run["metrics"]["lossless"]["prompts"] for run in done})
        each = f"all {prompts[0]} prompts" if len(prompts) == 1 else "all their prompts"
        return [f"Every run gave plain decoding's text, token for token, to {each}."]
    words = {
        "mismatch": "Changed the text, so that the speedup is not a lossless method's and does not count above: {}.",
        "near-tie": "Plain decoding's text, but for places where the target is undecided within its precision: {}.",
        "law": "Drafts were sampled, and no deviation from the target's law was found: {}.",
        "untested": "Drafts were sampled, of too few tokens to test whether they have the target's law: {}.",
        "equal": "Plain decoding's text, token for token: {}.",
    }
    told = []
    for verdict, form in words.items():
        found = verdicts.get(verdict, [])
        if len(found) > MANY and verdict in ("near-tie", "equal"):
            told.append(form.format(f"{len(found)} runs, by the table"))
        elif found:
            told.append(form.format(_list([f"{called[run['id']]} ({_verdict(run)})" for run in found])))
    return told


def _verdict(run: Run) -> str:
    """Of a table's row."""
    return tables.row(run, "")[tables.COLUMNS.index("lossless")]


def _doubts(runs: Sequence[Run], called: Mapping[str, str]) -> list[str]:
    lines = []
    told = tables.flag_names(runs, [called[run["id"]] for run in runs])
    if told:
        lines.append(f"To be doubted: {'; '.join(told)}.")
    learning = [called[run["id"]] for run in runs if run["status"] == "ok" and run["stateful_drafter"]]
    if learning:
        lines.append(f"Numbers that depend on the order of the prompts, as earlier ones teach: {_list(learning)}.")
    left_out = max((len(run["prompts"]["too_long"]) for run in runs if run["status"] == "ok"), default=0)
    if left_out:
        lines.append(f"{left_out} prompts were left out, as they do not fit the target's context.")
    return lines


def _side(limits: Sequence[float]) -> str:
    """Where an interval lies of 1."""
    return "above" if limits[0] > 1 else "below" if limits[1] < 1 else "around"


def _span(limits: Sequence[float]) -> str:
    return f"{limits[0]:.2f}–{limits[1]:.2f}"


def _list(words: Sequence[str]) -> str:
    """
    >>> _list(["a", "b", "c"])
    'a, b and c'
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
