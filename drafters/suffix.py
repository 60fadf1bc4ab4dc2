"""Suffix decoding: draft by following the most frequent path under the current suffix in a tree of past text.

Oliaro et al. 2024 (SuffixDecoding). The tree holds every substring of up to ``depth`` tokens with its count. For each
suffix of the text found in it, the most frequent child is followed while the path's estimated probability stays above
``min_probability``; the suffix whose path promises the most accepted tokens is used. Long matches draft long.
"""

from dataclasses import dataclass, field

import numpy as np

from drafters.model_free import cut_at_end, draft_rows
from specbench.drafting import Batch, Drafter
from specbench.errors import ConfigError
from specbench.model import CausalLM
from specbench.verification import Draft

MEMORIES = ("request", "run")


@dataclass(slots=True)
class Node:
    """A substring: how often it occurred, and what followed."""

    count: int = 0
    children: dict[int, "Node"] = field(default_factory=dict)


class SuffixTree:
    """Every substring of up to ``depth`` tokens of the text fed to it, with counts; grows by one token at a time."""

    def __init__(self, depth: int):
        self.depth = depth
        self.root = Node()
        self._open: list[Node] = []  # nodes of the suffixes of what was fed last, longest first

    def extend(self, tokens: list[int]) -> None:
        """Feed tokens that follow what was fed before."""
        for token in tokens:
            grown = []
            for node in [*self._open, self.root]:
                child = node.children.get(token)
                if child is None:
                    child = node.children[token] = Node()
                child.count += 1
                grown.append(child)
            # a node at full depth takes no children, so that memory stays linear in the text
            self._open = grown[-(self.depth - 1) :]

    def end(self) -> None:
        """The text is over: what is fed next does not follow it."""
        self._open = []

    def open_matches(self) -> list[tuple[int, Node]]:
        """Suffixes of the text fed so far that this tree holds, longest first: (length, node)."""
        return [(len(self._open) - i, node) for i, node in enumerate(self._open)]

    def matches(self, suffix: list[int]) -> list[tuple[int, Node]]:
        """The same for a text that was not fed here, of which ``suffix`` is the end."""
        found = []
        for start in range(max(0, len(suffix) - self.depth + 1), len(suffix)):
            node: Node | None = self.root
            for token in suffix[start:]:
                node = node.children.get(token) if node else None
            if node is not None:
                found.append((len(suffix) - start, node))
        return found


def best_path(
    matches: list[tuple[int, Node]], k: int, factor: float, min_probability: float
) -> tuple[float, list[int]]:
    """The path of at most ``k`` tokens from one of ``matches`` with the highest expected accepted length, the longer
    match where two promise the same: (expected length, tokens). A match of m tokens drafts at most ``factor * m``."""
    best: tuple[float, list[int]] = (0.0, [])
    for length, node in matches:
        longest = min(k, max(1, int(factor * length)))
        if best[0] >= longest:  # shorter matches draft no longer, so none can promise more
            break
        found = _most_frequent_path(node, longest, min_probability)
        if found[0] > best[0]:
            best = found
    return best


def _most_frequent_path(node: Node, length: int, min_probability: float) -> tuple[float, list[int]]:
    probability, expected = 1.0, 0.0
    path: list[int] = []
    while len(path) < length and node.children:
        total = sum(child.count for child in node.children.values())
        token, child = max(node.children.items(), key=lambda item: item[1].count)
        probability *= child.count / total
        if probability < min_probability:
            break
        expected += probability
        path.append(token)
        node = child
    return expected, path


class Suffix(Drafter):
    """Suffix decoding over a request's own text and, with ``memory="run"``, over the earlier outputs of the run.

    memory: ``request`` forgets everything when a new batch starts. ``run`` keeps one more tree, empty when a run
    begins, to which each batch's outputs are added when the next batch starts; then results depend on the order of
    prompts, and the record says so.
    """

    def __init__(self, depth: int = 24, factor: float = 2.0, min_probability: float = 0.1, memory: str = "request"):
        if depth < 2:
            raise ConfigError(f"drafter.depth={depth}: a tree needs at least 2, one token to match and one to draft")
        if factor <= 0:
            raise ConfigError(f"drafter.factor={factor} must be positive: drafted tokens per matched token")
        if not 0 <= min_probability <= 1:
            raise ConfigError(f"drafter.min_probability={min_probability} is not in [0, 1]")
        if memory not in MEMORIES:
            raise ConfigError(f"drafter.memory={memory} is unknown; choices: {', '.join(MEMORIES)}")
        self.depth = depth
        self.factor = factor
        self.min_probability = min_probability
        self.stateful = memory == "run"
        self._end_ids: frozenset[int] = frozenset()
        self.reset()

    def bind(self, target: CausalLM) -> None:
        """Learn the target's end ids."""
        self._end_ids = target.eos_ids

    def reset(self) -> None:
        """Forget everything, earlier outputs included."""
        self._past = SuffixTree(self.depth)
        self._trees: list[SuffixTree] = []
        self._fed = np.zeros(0, dtype=np.int64)
        self._batch: Batch | None = None

    def start(self, batch: Batch, taps: object) -> None:
        """Grow a tree from each prompt; first, if outputs are to be kept, learn the last batch's."""
        if self.stateful and self._batch is not None:
            for row in range(len(self._batch)):
                self._past.extend(self._batch.generated(row).tolist())
                self._past.end()
        self._batch = batch
        self._trees = [SuffixTree(self.depth) for _ in range(len(batch))]
        self._fed = np.zeros(len(batch), dtype=np.int64)
        for row in range(len(batch)):
            self._feed(batch, row)

    def propose(self, batch: Batch, k: int) -> Draft:
        """Per row, the most promising path; nothing where no suffix occurs earlier."""
        return draft_rows(batch, k, lambda row: self._propose_row(batch, row, k))

    def _propose_row(self, batch: Batch, row: int, k: int) -> list[int]:
        self._feed(batch, row)
        matches = [self._trees[row].open_matches()]
        if self.stateful:
            matches.append(self._past.matches(batch.text(row)[-self.depth :].tolist()))
        paths = [best_path(found, k, self.factor, self.min_probability) for found in matches]
        return list(cut_at_end(max(paths, key=lambda path: path[0])[1], self._end_ids))

    def _feed(self, batch: Batch, row: int) -> None:
        """Grow a row's tree by what was committed since it last grew."""
        text = batch.text(row)
        self._trees[row].extend(text[self._fed[row] :].tolist())
        self._fed[row] = len(text)
