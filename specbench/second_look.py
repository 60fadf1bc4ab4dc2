"""What is looked at after all is measured, on the same prompts: where a round's time goes, whether sampled text has the
target's law, and what is to be known of the prompts."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pandas as pd

from specbench import law, profiling
from specbench.comparison import Arm, Outcome, Settings, Turn, requests_of
from specbench.model import CausalLM
from specbench.prompts import overlap

log = logging.getLogger(__name__)

SURPRISES = 8  # prompts read to see whether they are text


@dataclass
class SecondLook:
    """What was seen after all was measured: rounds with a clock between their parts, and the test of sampled text, by
    arm; and what failed in it, which costs an arm that and no more."""

    rounds: dict[Arm, pd.DataFrame] = field(default_factory=dict)
    laws: dict[Arm, law.Evidence] = field(default_factory=dict)
    failures: dict[Arm, list[str]] = field(default_factory=dict)
    seen: dict[Arm, list[str]] = field(default_factory=dict)  # uids of turns whose prompts it may have learned from
    surprise: float | None = None  # nats by which a token of the prompts surprises the target

    def fail(self, arm: Arm, message: str) -> None:
        """Something could not be seen of an arm."""
        self.failures.setdefault(arm, []).append(message)

    def rounds_of(self, arm: Arm, baseline: Arm) -> pd.DataFrame | None:
        """Those of an arm and of the baseline, told apart by column ``arm``."""
        if arm not in self.rounds or baseline not in self.rounds:
            return None
        both = {"baseline": self.rounds[baseline], "method": self.rounds[arm]}
        return pd.concat([rounds.assign(arm=name) for name, rounds in both.items()], ignore_index=True)


def look_again(
    target: CausalLM, settings: Settings, baseline: Arm, arms: Sequence[Arm], outcome: Outcome, profiled: int
) -> SecondLook:
    """Look at what was measured once more. ``profiled``: batches whose rounds are timed part by part."""
    found = SecondLook()
    try:
        # without the chat template, which would make any prompt look like text
        prompts = [target.tokenizer(turn.prompt).input_ids for turn in outcome.turns[:SURPRISES]]
        found.surprise = law.surprise(target, prompts)
    except Exception:  # a doubt that cannot be looked into costs no measurement
        log.debug("how the prompts surprise the target could not be seen", exc_info=True)
    sound = [arm for arm in arms if arm.error is None]
    for arm, uids in _seen_in_training(sound, outcome.turns):
        if isinstance(uids, Exception):
            found.fail(arm, f"what it learned from could not be read: {uids}")
        else:
            found.seen[arm] = uids
    some = _spread(outcome.batches, profiled)
    if some:
        found.rounds, failures = profiling.profile(target, some, [baseline, *sound], settings)
        for arm, error in failures.items():
            found.fail(arm, f"the parts of its rounds could not be timed: {type(error).__name__}: {error}")
    for arm in sound:
        if not arm.sampled:
            continue
        try:
            asked = [requests_of(arm, members, baseline) for members in outcome.batches]
            found.laws[arm] = law.check(
                target, arm.drafter, asked, arm.k, settings.sampling, settings.seed, settings.stop
            )
        except Exception as error:
            log.debug("the law of %s could not be tested", arm.name, exc_info=True)
            found.fail(arm, f"the law of its text could not be tested: {type(error).__name__}: {error}")
    return found


def _spread(batches: Sequence[list[Turn]], count: int) -> list[list[Turn]]:
    """So many of the batches, from all over them."""
    return [batches[i * len(batches) // count] for i in range(count)] if count < len(batches) else list(batches)


def _seen_in_training(arms: Sequence[Arm], turns: Sequence[Turn]) -> Iterator[tuple[Arm, list[str] | Exception]]:
    """Of each arm, uids of the turns whose prompts its drafter may have learned from; what several learned from is read
    once."""
    texts = [turn.prompt for turn in turns]
    by_data: dict[int, list[str]] = {}
    for arm in arms:
        try:
            learned = arm.drafter.learned_from()
            if id(learned) not in by_data:
                shared = overlap.overlapping(texts, learned)
                by_data[id(learned)] = [turn.request.uid for turn, both in zip(turns, shared, strict=True) if both]
        except Exception as error:
            yield arm, error
        else:
            yield arm, by_data[id(learned)]
