"""Where a text ends. One rule for every arm, applied to committed tokens one by one, so that a block of accepted
drafts ends exactly where plain decoding would have."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbench.errors import ConfigError

TOKENS_PER_CHARACTER = 4  # a character of UTF-8 is at most four bytes, and a token at least one


@dataclass(frozen=True)
class StopRule:
    """A text ends with the first token that is an end id ("eos"), completes a stop string in the decoded text
    ("stop_string"), is number ``max_new_tokens`` ("length") or fills the context ("context"); checked in that order.
    The ending token is committed.

    decode turns generated token ids into text; it is called only if there are stop strings.
    """

    max_new_tokens: int
    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    context: int | None = None
    decode: Callable[[Sequence[int]], str] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(
                f"max_new_tokens={self.max_new_tokens}: a text of no tokens has nothing to measure; use 1 or more"
            )
        if any(not s for s in self.strings):
            raise ConfigError("stop.strings has an empty string, which every text contains; leave it out")
        if self.strings and self.decode is None:
            raise ValueError("stop strings need a decoder")

    def room(self, prompt_length: int) -> int:
        """Most tokens that may follow a prompt of this length."""
        if self.context is None:
            return self.max_new_tokens
        return max(0, min(self.max_new_tokens, self.context - prompt_length))

    def cut(self, generated: Sequence[int], block: Sequence[int], prompt_length: int) -> tuple[int, str | None]:
        """How many tokens of ``block`` are kept after ``generated``, and why the text ends there (None: it goes on)."""
        room = self.room(prompt_length) - len(generated)
        stop_at = self._first_stop_string(generated, block[:room])
        for i, token in enumerate(block):
            if token in self.token_ids:
                return i + 1, "eos"
            if i == stop_at:
                return i + 1, "stop_string"
            if i + 1 == room:
                return i + 1, "length" if len(generated) + i + 1 == self.max_new_tokens else "context"
        return len(block), None

    def trim(self, text: str) -> str:
        """``text`` up to the first stop string."""
        ends = [text.find(s) for s in self.strings if s in text]
        return text[: min(ends)] if ends else text

    def _first_stop_string(self, generated: Sequence[int], block: Sequence[int]) -> int | None:
        """Index in ``block`` of the first token whose text completes a stop string, wherever that string began.

        Looked for token by token, as decoded text need not grow by appending (an unfinished character changes with
        the next token), and in the last tokens alone, enough for every character of the string to take several.
        """
        if not self.strings or self.decode is None:
            return None
        window = TOKENS_PER_CHARACTER * (max(map(len, self.strings)) + 1)
        for i in range(len(block)):
            text = self.decode([*generated, *block[: i + 1]][-window:])
            if any(s in text for s in self.strings):
                return i
        return None
