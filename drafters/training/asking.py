"""Prompts in a target's own words: it is given the beginning of a user's turn and writes the rest.

What a model was taught to answer it can also ask, so prompts for training need no data set (Xu et al. 2024, "Magpie:
Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing"). Beginnings of many kinds keep it from
asking one kind of question; a word drawn from a list varies each of them.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

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


WORDS = {
    "topic": [
        "cooking",
        "gardening",
        "sleep",
        "travel by train",
        "a job interview",
        "learning the piano",
        "old photographs",
        "the ocean",
        "personal finance",
        "birds",
        "a difficult neighbour",
        "volcanoes",
        "bread",
        "cycling",
        "school",
        "the human heart",
        "bridges",
        "electric cars",
        "a family holiday",
        "chess",
        "the stars",
        "coffee",
        "public libraries",
        "running",
        "a small business",
        "bees",
        "painting a room",
        "a lost key",
        "climate",
        "the Roman empire",
        "friendship",
        "robots",
        "rivers",
        "a power cut",
        "vaccines",
        "maps",
        "moving house",
        "a wedding speech",
        "insects",
        "tea",
        "computers",
        "mountains",
        "sport",
        "music",
        "dogs",
        "winter",
        "history",
        "medicine",
    ],
    "language": ["French", "Spanish", "German", "Italian", "Portuguese", "English", "Dutch", "Polish"],
    "code": ["Python", "Python", "Python", "JavaScript", "SQL", "Java", "C", "Bash", "HTML", "Go"],
    "data": [
        "names",
        "dates",
        "places",
        "prices",
        "phone numbers",
        "products",
        "ingredients",
        "events",
        "amounts",
        "people and their roles",
    ],
    "text": [
        "news article",
        "email",
        "product review",
        "letter",
        "blog post",
        "report",
        "story",
        "interview",
        "set of meeting notes",
        "announcement",
        "encyclopedia entry",
        "travel guide",
        "speech",
        "recipe introduction",
    ],
    "form": [
        "poem",
        "short story",
        "dialogue",
        "letter",
        "speech",
        "fable",
        "diary entry",
        "limerick",
        "product description",
        "song",
    ],
    "thing": [
        "apples",
        "euros",
        "kilometres",
        "tickets",
        "litres",
        "hours",
        "students",
        "boxes",
        "marbles",
        "pages",
        "metres",
        "coins",
    ],
}

KINDS = {
    "chat": Kind(
        18,
        (
            "",
            "How do I",
            "I need advice about {topic}.",
            "My friend",
            "Can you explain",
            "What is the best way to",
            "Give me",
            "I am writing about {topic} and",
            "Help me",
            "Write a {form} about {topic}",
            "Write a {form}",
            "Explain {topic} to",
            "Draft an email to",
        ),
    ),
    "question": Kind(
        14,
        (
            "What",
            "Why",
            "When was",
            "Who",
            "Which",
            "How does",
            "What is the difference between",
            "Describe",
            "Name three",
            "What causes",
            "In a few sentences, explain why",
            "Where",
            "How is {topic}",
        ),
    ),
    "code": Kind(
        14,
        (
            "Write a {code} function that",
            "Write a {code} program to",
            "Explain what this {code} code does:\n\n```",
            "Find the bug in this {code} code:\n\n```",
            "Write a regular expression",
            "How can I in {code}",
            "Given the following {code} function, write tests for it:\n\n```",
            "Write a {code} class",
            "Rewrite this {code} code so that it is shorter:\n\n```",
            "Implement",
            "Write a SQL query",
        ),
    ),
    "math": Kind(
        13,
        (
            "Solve",
            "A farmer has",
            "Calculate",
            "If",
            "A train",
            "What is the value of",
            "Find the",
            "There are {thing}",
            "A shop sells {thing}",
            "How many {thing}",
            "Anna has 12 {thing}",
            "The sum of",
            "A rectangle",
            "What is the probability",
            "Show step by step how to",
        ),
    ),
    "summary": Kind(
        12,
        (
            "Summarise the following {text} in three sentences.\n\n",
            "Summarize this {text} about {topic}:\n\n",
            "Give the main points of the {text} below as a list.\n\n",
            "In one sentence, what does this {text} say?\n\n",
            "Write a headline and a short summary for this {text}:\n\n",
        ),
        passage=True,
    ),
    "extraction": Kind(
        10,
        (
            "Extract the {data} from the following {text}.\n\n",
            "List all {data} mentioned in this {text} about {topic}:\n\n",
            "Turn the {text} below into JSON with the {data}.\n\n",
            "Make a table of the {data} in this {text}:\n\n",
        ),
        passage=True,
    ),
    "reading": Kind(
        10,
        (
            "Read the {text} and answer the question.\n\n",
            "Answer the question from the passages only.\n\nQuestion:",
            "Using only the {text} below about {topic}, answer:",
            "[1] ",
        ),
        passage=True,
    ),
    "translation": Kind(
        9,
        (
            'Translate into {language}: "',
            "Translate the following sentence into {language}:",
            "Translate this text about {topic} into {language}:\n\n",
            "How do you say in {language}:",
            "Translate from {language} to English:",
            "Correct the grammar of this sentence:",
            "Rewrite this more politely:",
        ),
    ),
}


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
