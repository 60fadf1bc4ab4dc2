"""Which texts say what others say already, by the word n-grams they share."""

import re
from collections.abc import Iterable, Iterator, Sequence

REPEATED = 0.5  # share of a prompt's n-grams seen before, above which it is a repetition
REPEATED_NGRAM = 5  # words
SHARED_NGRAM = 8  # words; prompts that share so many in a row are not independent


def words(text: str) -> list[str]:
    """The words of ``text``, without case and punctuation."""
    return re.findall(r"\w+", text.casefold())


def ngrams(text: str, n: int) -> set[tuple[str, ...]]:
    """The word ``n``-grams of ``text``; all of it, if it is shorter."""
    found = words(text)
    return {tuple(found[i : i + n]) for i in range(max(1, len(found) - n + 1))}


def overlapping(texts: Sequence[str], reserved: Iterable[str]) -> list[bool]:
    """Of each text whether it shares an n-gram of ``SHARED_NGRAM`` words with any of the ``reserved``.

    A reserved text shorter than that counts where it occurs as a whole.
    """
    by_length: dict[int, set[tuple[str, ...]]] = {}
    for text in reserved:
        for gram in ngrams(text, SHARED_NGRAM):
            by_length.setdefault(len(gram), set()).add(gram)
    return [any(ngrams(text, n) & grams for n, grams in by_length.items()) for text in texts]


def repetitions(texts: Iterable[str]) -> Iterator[bool]:
    """Of each text whether earlier ones, which were not themselves repetitions, have said most of it."""
    seen: set[int] = set()
    for text in texts:
        grams = {hash(gram) for gram in ngrams(text, REPEATED_NGRAM)}
        repeated = len(grams & seen) > REPEATED * len(grams)
        if not repeated:
            seen |= grams
        yield repeated
