"""Prompts in a target's own words: it is given the beginning of a user's turn and writes the rest.

What a model was taught to answer it can also ask, so prompts for training need no data set (Xu et al. 2024, "Magpie:
Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing"). Beginnings of many kinds (kinds.yaml)
keep it from asking one kind of question; a word drawn from a list varies each of them.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from omegaconf import OmegaConf

from drafters.training.replies import Task
from specbench.errors import ConfigError
from specbench.model import CausalLM
from specbench.sampling import Sampling

SAMPLING = Sampling(temperature=1.0, min_p=0.05)  # the tail of a small model's law makes no sense
LEAST_WORDS = 5  # of a prompt
PASSAGE_WORDS = 40  # of a prompt that brings a text to work on
PROMPT_TOKENS, PASSAGE_TOKENS = 96, 192  # most that the target writes


@dataclass(frozen=True)
class Kind:
    """A kind of prompt. share: of all prompts, in parts. openings: beginnings, with words of ``WORDS`` in braces.
    passage: it brings a text to work on, which may stop after any sentence; else it is short, and must end by
    itself."""

    share: int
    openings: Sequence[str]
    passage: bool = False


def _kinds() -> tuple[dict[str, list[str]], dict[str, Kind]]:
    """The words and kinds of kinds.yaml."""
    text = files("drafters.training").joinpath("kinds.yaml").read_text(encoding="utf-8")
    found: Any = OmegaConf.to_container(OmegaConf.create(text))
    return found["words"], {name: Kind(**kind) for name, kind in found["kinds"].items()}


WORDS, KINDS = _kinds()


class Asker:
    """Asks a target for prompts."""

    def __init__(self, target: CausalLM):
        """Raises ConfigError for a target without a chat template: there is no user's turn to open."""
        if not target.tokenizer.chat_template:
            raise ConfigError(
                f"{target.name} has no chat template, so it cannot be asked to write prompts; give it some: "
                "dataset@source=jsonl source.path=FILE"
            )
        mark = "\N{OBJECT REPLACEMENT CHARACTER}"
        shown = target.tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
        before, _, after = shown.partition(mark)
        self._target = target
        self._before = target.tokenizer(before, add_special_tokens=False).input_ids
        ends = target.tokenizer(after, add_special_tokens=False).input_ids[:1]  # what the template ends a turn with
        self.stop_ids = target.eos_ids | frozenset(ends)

    def opening(self, index: int, seed: int) -> tuple[str, str]:
        """Kind and beginning of prompt number ``index``."""
        draw = random.Random(f"{seed}/{index}")
        kind = draw.choices(list(KINDS), [kind.share for kind in KINDS.values()])[0]
        words = {name: draw.choice(choices) for name, choices in WORDS.items()}
        return kind, draw.choice(KINDS[kind].openings).format_map(words)

    def task(self, index: int, seed: int) -> Task:
        """What the target is to continue."""
        kind, opening = self.opening(index, seed)
        limit = PASSAGE_TOKENS if KINDS[kind].passage else PROMPT_TOKENS
        tokens = self._target.tokenizer(opening, add_special_tokens=False).input_ids if opening else []
        return Task(f"prompt-{index}", [*self._before, *tokens], SAMPLING, limit)

    def prompt(self, index: int, seed: int, continuation: Sequence[int]) -> str | None:
        """The prompt that a ``continuation`` of the task makes; None if it is of no use: cut short, or too little."""
        kind, opening = self.opening(index, seed)
        passage = KINDS[kind].passage
        complete = continuation[-1] in self.stop_ids
        text = opening + self._target.tokenizer.decode(continuation, skip_special_tokens=True)
        if not complete:
            text = _whole_sentences(text) if passage else ""
        text = text.strip()
        return text if len(text.split()) >= (PASSAGE_WORDS if passage else LEAST_WORDS) else None


def _whole_sentences(text: str) -> str:
    """``text`` up to the end of its last whole sentence.

    >>> _whole_sentences("It rained. We stayed. Then the")
    'It rained. We stayed.'
    """
    ends = [match.end() for match in re.finditer(r"[.!?][\"')\]]?(?=\s)|\n", text)]
    return text[: ends[-1]].rstrip() if ends else ""
