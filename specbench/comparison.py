"""The paired experiment: a baseline and one or more methods continue the same prompts, taking turns prompt by prompt.

Within a batch every arm runs once, in an order that changes from batch to batch, so that slow drifts of the machine
fall on all arms alike. All of it is done as often as repeats are asked for, each with drafters that have forgotten the
one before. A later turn of a conversation is asked after the baseline's reply, for every arm, so that arms
stay paired; all turns of the conversations that run together are one unit of the statistics. Warm-up prompts are never
measured.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbench.decoding import Step, decode
from specbench.drafting import Drafter, Request
from specbench.energy import EnergyMeter
from specbench.errors import ConfigError, RunError
from specbench.memory import PeakMemory
from specbench.model import CausalLM
from specbench.prompts import Conversation
from specbench.sampling import Sampling
from specbench.stopping import StopRule

log = logging.getLogger(__name__)

MAX_BATCH = 64
WARM_UP_TOKENS = 12
WARM_UP_TEXT = "The baker wrote the list twice: flour, salt, water, yeast. Flour, salt, water, yeast, and a little oil."


@dataclass(frozen=True)
class Settings:
    """What all arms share: how tokens are drawn, where texts end, how many run together, how often each is measured."""

    batch_size: int
    sampling: Sampling
    seed: int
    stop: StopRule
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"repeats={self.repeats} measures nothing; give 1 or more")
        if not 1 <= self.batch_size <= MAX_BATCH:
            raise ConfigError(f"batch_size={self.batch_size} is not in 1..{MAX_BATCH}")


@dataclass(eq=False)  # two of the same name are two
class Arm:
    """A drafter at a draft length, and what it did: a row per (round, prompt) and an outcome per prompt. changed:
    prompts whose repeats differ in their text."""

    name: str
    drafter: Drafter
    k: int
    steps: list[dict[str, Any]] = field(default_factory=list)
    replies: dict[str, list[int]] = field(default_factory=dict)
    finish: dict[str, str] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    peak_memory_bytes: int = 0
    joules: float | None = None
    error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Take no further part. The traceback goes: it would keep the caches of the failed round alive."""
        log.debug("arm %s failed", self.name, exc_info=error)
        self.error = error.with_traceback(None)

    @property
    def sampled(self) -> bool:
        """Whether any draft was drawn from a law and judged by the accept/residual rule: then the text has the
        target's law but is not, token for token, what plain sampling says."""
        return any(row["sampled"] for row in self.steps)

    def __post_init__(self) -> None:
        if self.k < 0:
            raise ConfigError(f"k={self.k} is negative; k is the number of drafted tokens per round, 0 for none")
        self.check_k()

    def bind(self, target: CausalLM) -> None:
        """Bind the drafter. Raises ConfigError if it fits neither the target nor k: some know only now what they can
        draft."""
        self.drafter.bind(target)
        self.check_k()

    @property
    def beyond(self) -> bool:
        """Whether k is more than the drafter can draft, as far as it knows yet."""
        return self.drafter.max_k is not None and self.k > self.drafter.max_k

    def check_k(self) -> None:
        """Raise ConfigError if k is more than the drafter can draft."""
        if self.beyond:
            raise ConfigError(
                f"k={self.k} is above what drafter {self.name} can draft; use k={self.drafter.max_k} or less"
            )


@dataclass(frozen=True)
class Turn:
    """One request with where it came from: turn ``number`` (from 1) of a conversation."""

    conversation: Conversation
    number: int
    prompt: str
    request: Request


@dataclass(frozen=True)
class Outcome:
    """Turns that were decoded, by the batches they were decoded in, and uids of those left out because they do not fit
    the context."""

    batches: list[list[Turn]]
    too_long: list[str]

    @property
    def turns(self) -> list[Turn]:
        """All of them, in order."""
        return [turn for members in self.batches for turn in members]


Progress = Callable[[Arm, Step], None]


def compare(
    target: CausalLM,
    conversations: Sequence[Conversation],
    baseline: Arm,
    methods: Sequence[Arm],
    settings: Settings,
    progress: Progress = lambda arm, step: None,
) -> Outcome:
    """Run ``baseline`` and ``methods`` over all turns; what they did is left in the arms.

    An arm that fails keeps its error and takes no further part; the others go on. Without a baseline nothing can be
    paired, so its failure is raised as RunError.
    """
    arms = [baseline, *methods]
    _warm_up(target, arms, settings)
    too_long: list[str] = []
    fitting = [c for c in conversations if _turn(target, c, 1, baseline, settings.stop, too_long)]
    if not fitting:
        raise ConfigError(f"every prompt is longer than the context of {target.name} ({target.context} tokens)")
    numbers = itertools.count()
    repeats = [_once(target, fitting, repeat, numbers, arms, settings, progress) for repeat in range(settings.repeats)]
    batches, later = repeats[0]
    return Outcome(batches, too_long + later)


def _once(
    target: CausalLM,
    conversations: Sequence[Conversation],
    repeat: int,
    numbers: Iterator[int],
    arms: Sequence[Arm],
    settings: Settings,
    progress: Progress,
) -> tuple[list[list[Turn]], list[str]]:
    """All turns once, in batches with the next ``numbers``: the batches, and uids of later turns that do not fit the
    context."""
    baseline = arms[0]
    batches: list[list[Turn]] = []
    too_long: list[str] = []
    for arm in arms:
        arm.drafter.reset()
    for unit, group in enumerate(_groups(conversations, settings.batch_size)):
        for number in range(1, len(group[0].turns) + 1):
            found = [_turn(target, c, number, baseline, settings.stop, too_long) for c in group]
            members = [turn for turn in found if turn is not None]
            if members:
                batches.append(members)
                _run_batch(target, next(numbers), unit, repeat, members, arms, settings, progress)
            if baseline.error is not None:
                raise RunError(f"the baseline failed: {baseline.error}") from baseline.error
    return batches, too_long


def _groups(conversations: Sequence[Conversation], size: int) -> Iterator[Sequence[Conversation]]:
    """Conversations that are decoded together, turn by turn: of equally many turns, ``size`` at a time."""
    by_turns = sorted(conversations, key=lambda c: len(c.turns))
    for _, alike in itertools.groupby(by_turns, key=lambda c: len(c.turns)):
        same = list(alike)
        for start in range(0, len(same), size):
            yield same[start : start + size]


def _turn(
    target: CausalLM, conversation: Conversation, number: int, baseline: Arm, stop: StopRule, too_long: list[str]
) -> Turn | None:
    """Turn ``number`` of a conversation, after the baseline's replies to those before; None, and named in
    ``too_long``, if it or one before it does not fit the context."""
    uid = _uid(conversation, number)
    if number == 1 or _uid(conversation, number - 1) in baseline.replies:
        messages = []
        for i in range(1, number):
            reply = target.tokenizer.decode(baseline.replies[_uid(conversation, i)], skip_special_tokens=True)
            messages += [
                {"role": "user", "content": conversation.turns[i - 1]},
                {"role": "assistant", "content": stop.trim(reply)},
            ]
        prompt = conversation.turns[number - 1]
        tokens = target.encode([*messages, {"role": "user", "content": prompt}])
        if stop.room(len(tokens)) > 0:
            return Turn(conversation, number, prompt, Request(uid, tokens))
    too_long += [_uid(conversation, n) for n in range(number, len(conversation.turns) + 1)] if number == 1 else [uid]
    return None


def _run_batch(
    target: CausalLM,
    batch: int,
    unit: int,
    repeat: int,
    members: Sequence[Turn],
    arms: Sequence[Arm],
    settings: Settings,
    progress: Progress,
) -> None:
    """Each arm once over the batch."""
    baseline = arms[0]
    for place, arm in enumerate(in_turns(arms, batch)):
        if arm.error is not None:
            continue
        requests = requests_of(arm, members, baseline)
        stored = len(arm.steps)
        memory, energy = PeakMemory(target.device), EnergyMeter(target.device)
        try:
            with memory, energy:
                for step in _decode(target, arm, requests, settings, settings.stop):
                    arm.steps += _rows(step, requests, batch, unit, repeat, place)
                    progress(arm, step)
        except Exception as error:  # whatever a drafter does wrong is that arm's failure, not the others'
            arm.fail(error)
            continue
        arm.peak_memory_bytes = max(arm.peak_memory_bytes, memory.peak_bytes)
        if energy.joules is not None:
            arm.joules = (arm.joules or 0.0) + energy.joules
        _remember(arm, arm.steps[stored:])


def _remember(arm: Arm, rows: Sequence[dict[str, Any]]) -> None:
    """Keep what an arm said to each prompt; of a repeat, whether it is the same."""
    said: dict[str, list[int]] = {}
    for row in rows:
        said.setdefault(row["uid"], []).extend(row["tokens"])
        if row["finish"]:
            arm.finish.setdefault(row["uid"], row["finish"])
    arm.changed |= {uid for uid, reply in said.items() if arm.replies.setdefault(uid, reply) != reply}


def requests_of(arm: Arm, members: Sequence[Turn], baseline: Arm) -> list[Request]:
    """What an arm is asked: with the baseline's replies, if it needs them."""
    requests = [turn.request for turn in members]
    if arm.drafter.needs_reference:
        requests = [Request(r.uid, r.tokens, baseline.replies[r.uid]) for r in requests]
    return requests


def _decode(
    target: CausalLM, arm: Arm, requests: Sequence[Request], settings: Settings, stop: StopRule
) -> Iterator[Step]:
    return decode(target, arm.drafter, requests, arm.k, settings.sampling, settings.seed, stop)


def in_turns(arms: Sequence[Arm], batch: int) -> list[Arm]:
    """Who goes when: rotated from batch to batch and reversed every other time around, so that each arm stands equally
    often at each place, and not always behind the same one. Arms that need the baseline's reply come after all."""
    free = [arm for arm in arms if not arm.drafter.needs_reference]
    shift, turned = batch % len(free), (batch // len(free)) % 2
    order = free[shift:] + free[:shift]
    return (order[::-1] if turned else order) + [arm for arm in arms if arm.drafter.needs_reference]


def _rows(
    step: Step, requests: Sequence[Request], batch: int, unit: int, repeat: int, place: int
) -> list[dict[str, Any]]:
    """A record row per prompt of the round; ``seconds`` is the round's, shared by its rows."""
    return [
        {
            "unit": unit,
            "batch": batch,
            "repeat": repeat,
            "order": place,
            "round": step.round,
            "uid": requests[row].uid,
            "drafted": step.drafted[i],
            "sampled": step.sampled,
            "proposed": step.proposed[i],
            "accepted": step.accepted[i],
            "tokens": step.committed[i],
            "committed": len(step.committed[i]),
            "finish": step.finish[i],
            "seconds": step.seconds,
        }
        for i, row in enumerate(step.rows)
    ]


def _warm_up(target: CausalLM, arms: Sequence[Arm], settings: Settings) -> None:
    """Run every arm briefly on a prompt that is not measured, so that no first-call cost falls on a measured one."""
    tokens = target.tokenizer(WARM_UP_TEXT).input_ids
    if target.context is not None:
        tokens = tokens[: max(1, target.context - WARM_UP_TOKENS)]
    stop = StopRule(max_new_tokens=WARM_UP_TOKENS, context=target.context)
    replies: dict[str, list[int]] = {}
    for arm in arms:
        if arm.error is not None:
            continue
        uids = [f"warm-up-{row}" for row in range(settings.batch_size)]
        requests = [Request(uid, tokens, replies.get(uid)) for uid in uids]
        try:
            for step in _decode(target, arm, requests, settings, stop):
                if arm is arms[0]:
                    for row, committed in zip(step.rows, step.committed, strict=True):
                        replies.setdefault(uids[row], []).extend(committed)
        except Exception as error:
            if arm is arms[0]:
                raise RunError(f"the baseline failed in warm-up: {error}") from error
            arm.fail(error)


def _uid(conversation: Conversation, number: int) -> str:
    return f"{conversation.id}/{number}"
