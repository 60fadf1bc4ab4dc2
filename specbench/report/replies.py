"""Replies token by token: what each round drafted, what of it was kept, and what the target put in its place.

All of it is in the record's steps. Of a prompt that was repeated, the first repeat is shown.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from specbench.raw import Run, table
from specbench.record import PROMPTS, STEPS

LONGEST_PROMPT = 2000  # characters of a prompt that are shown
OF_PROMPTS = ("uid", "category", "turn", "prompt", "lossless", "finish")
OF_STEPS = ("arm", "repeat", "round", "uid", "drafted", "accepted", "tokens")

# where a token of the target's own stands
PREFILL = "prefill"  # the reply's first, given by the pass over the prompt
CORRECTION = "correction"  # in place of a draft that was not accepted
BONUS = "bonus"  # after drafts that were all accepted
PLAIN = "plain"  # nothing was drafted


def of_group(runs: Sequence[Run], count: int) -> dict[str, Any]:
    """Up to ``count`` prompts of runs that share theirs, evenly over categories; and the replies, by run, in the order
    of ``runs``, and by prompt."""
    prompts: list[dict[str, Any]] = []
    replies: dict[str, dict[str, Any]] = {}
    for run in runs:
        if run["status"] != "ok":
            continue
        asked, steps = table(run, PROMPTS, OF_PROMPTS), table(run, STEPS, OF_STEPS)
        if asked is None or steps is None:
            continue
        some: Any = chosen(asked, count).to_dict("records")
        prompts = prompts or [_prompt(row) for row in some]
        first = steps[(steps["arm"] == "method") & (steps["repeat"] == 0)]
        replies[run["id"]] = {
            row["uid"]: {
                "lossless": row["lossless"],
                "finish": row["finish"],
                "rounds": rounds(first[first["uid"] == row["uid"]]),
            }
            for row in some
        }
    return {"prompts": prompts, "replies": replies}


def chosen(prompts: pd.DataFrame, count: int) -> pd.DataFrame:
    """``count`` prompts of as many categories as there are, in their order: the first of each, then the second, …"""
    turn = prompts.groupby("category").cumcount()
    return prompts.loc[sorted(turn.sort_values(kind="stable").index[:count])]


def rounds(steps: pd.DataFrame) -> list[dict[str, Any]]:
    """Of the steps of one reply, for each round, prefill first:

    drafted: tokens. accepted: how many of them were kept, from the first. own: the token that the target added, and
    ``kind`` where it stands; None where the text ended within the accepted drafts.
    And up to and including it: ``tokens`` of the reply, and ``drafts``, rounds that drafted.
    """
    found: list[dict[str, Any]] = []
    tokens = drafts = 0
    for row in steps.sort_values("round").to_dict("records"):
        drafted, accepted = [int(token) for token in row["drafted"]], int(row["accepted"])
        added = [int(token) for token in row["tokens"][accepted:]]
        tokens += len(row["tokens"])
        drafts += bool(drafted)
        found.append(
            {
                "drafted": drafted,
                "accepted": accepted,
                "own": added[0] if added else None,
                "kind": _kind(int(row["round"]), len(drafted), accepted) if added else None,
                "tokens": tokens,
                "drafts": drafts,
            }
        )
    return found


def _kind(round_: int, drafted: int, accepted: int) -> str:
    if round_ == 0:
        return PREFILL
    if not drafted:
        return PLAIN
    return CORRECTION if accepted < drafted else BONUS


def tokens_of(shown: Mapping[str, Any]) -> set[int]:
    """Every token number that occurs in what ``of_group`` found."""
    each = [round_ for replies in shown["replies"].values() for reply in replies.values() for round_ in reply["rounds"]]
    own = {round_["own"] for round_ in each if round_["own"] is not None}
    return own.union(*(round_["drafted"] for round_ in each))


def _prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    text = row["prompt"]
    cut = len(text) > LONGEST_PROMPT
    return {
        "uid": row["uid"],
        "category": row["category"],
        "turn": int(row["turn"]),
        "text": text[:LONGEST_PROMPT] + "…" * cut,
    }
