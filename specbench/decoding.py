"""The decode loop: one for the baseline and for every drafter.

    last -> drafter.propose -> cat(last, draft) -> target.forward -> verify -> commit -> drafter.observe -> (again)

Plain autoregressive decoding is this loop with drafts of no tokens, so a baseline and a method share every line that
is timed. Legend: B rows, K drafted tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from specbench.cache import RaggedCache
from specbench.drafting import Batch, Drafter, Request
from specbench.errors import RunError
from specbench.model import CausalLM
from specbench.sampling import Noise, Sampling
from specbench.stopping import StopRule
from specbench.verification import Draft, Verdict, verify


@dataclass(frozen=True)
class Step:
    """What one round did to each row that was active when it began.

    Round 0 is the prefill, which yields each row's first token; it is no verify pass. ``seconds`` is the wall time of
    the whole round, from before the draft to after the commit, shared by its rows; ``parts`` splits it where that was
    asked for, in PARTS.
    sampled: the draft came with the law it was drawn from, and was judged by the accept/residual rule.
    rows: indices into the batch. drafted: proposed tokens, before any cut. proposed, accepted: what counts of them;
    of a text that ends in this round nothing past its end counts. committed: tokens added. finish: why the text ended.
    """

    round: int
    seconds: float
    sampled: bool
    rows: list[int]
    drafted: list[list[int]]
    proposed: list[int]
    accepted: list[int]
    committed: list[list[int]]
    finish: list[str | None]
    parts: dict[str, float] | None = None


# draft: proposing; verify: the target's pass; accept: judging the draft by its logits; bookkeeping: the rest
PARTS = ("draft", "verify", "accept", "bookkeeping")


@torch.inference_mode()
def decode(
    target: CausalLM,
    drafter: Drafter,
    requests: Sequence[Request],
    k: int,
    sampling: Sampling,
    seed: int,
    stop: StopRule,
    split: bool = False,
) -> Iterator[Step]:
    """Continue ``requests`` together, drafting ``k`` tokens a round, until each has ended; yields a Step per round.

    ``split`` times the parts of each round, for which the host waits for the device between them: such rounds may be
    longer. Raises RunError, naming the round, if the target's logits are not numbers.
    """
    if drafter.max_k is not None and k > drafter.max_k:
        raise RunError(f"k={k} is above what {type(drafter).__name__} can draft, {drafter.max_k}")
    room = max(len(r.tokens) + stop.room(len(r.tokens)) for r in requests)
    slots = room + k + 1
    cache = target.new_cache(len(requests), slots, steps=k + 1)
    target.prepare(cache, range(1, k + 2), drafter.taps)
    drafter.prepare(len(requests), slots, k)
    laps = _Laps(target.device, split)
    batch = _new_batch(target, requests, slots, sampling, seed)
    logits, taps = _prefill(target, batch, cache, drafter)
    first = sampling.choose(logits, _flat(batch.noise_at(0, 1, "target")), batch.seen)
    nothing = Draft.empty(len(batch), target.device)
    step = _commit(batch, _read(nothing, Verdict(nothing.count, first), logits), stop, 0, sampled=False)
    drafter.start(batch, taps)
    _wait(target.device)
    yield replace(step, seconds=laps.total())

    round_ = 0
    while batch.active.any():
        round_ += 1
        laps = _Laps(target.device, split)
        draft = drafter.propose(batch, k)
        _check_draft(draft, k, batch, target.vocab_size, drafter)
        block = torch.cat([batch.last()[:, None], draft.tokens], dim=1)  # [B, K+1]
        laps.mark("draft")
        output = target.forward(block, cache, taps=drafter.taps)
        laps.mark("verify")
        verdict = verify(
            draft,
            output.logits,
            sampling,
            noise_target=batch.noise_at(0, block.shape[1], "target"),
            noise_accept=batch.noise_at(0, block.shape[1] - 1, "accept"),
            seen=batch.seen_after(draft.tokens),
        )
        laps.mark("accept")
        before = batch.lengths.copy()
        sampled = draft.probs is not None and not sampling.greedy
        step = _commit(batch, _read(draft, verdict, output.logits), stop, round_, sampled)
        cache.advance(torch.from_numpy(batch.lengths - before))
        drafter.observe(batch, verdict, output.taps)
        if not batch.active.any():
            _wait(target.device)  # what is still under way belongs to this round, not to whoever comes next
        laps.mark("bookkeeping")
        yield replace(step, seconds=laps.total(), parts=laps.parts if split else None)
    target.recycle(cache)


class _Laps:
    """The clock of a round."""

    def __init__(self, device: torch.device, split: bool):
        self.parts = dict.fromkeys(PARTS, 0.0)
        self._device, self._split = device, split
        self._began = self._last = perf_counter()

    def mark(self, part: str) -> None:
        """What was done since the last mark was ``part``."""
        if self._split:
            _wait(self._device)
            now = perf_counter()
            self.parts[part] += now - self._last
            self._last = now

    def total(self) -> float:
        """Seconds since the round began, up to the last mark where it is split: then its parts sum to it."""
        return (self._last if self._split and self._last > self._began else perf_counter()) - self._began


def _new_batch(target: CausalLM, requests: Sequence[Request], slots: int, sampling: Sampling, seed: int) -> Batch:
    lengths = np.array([len(r.tokens) for r in requests], dtype=np.int64)
    tokens = np.zeros((len(requests), slots), dtype=np.int64)
    for row, request in enumerate(requests):
        tokens[row, : lengths[row]] = request.tokens
    noise = None if sampling.greedy else Noise(seed, [r.uid for r in requests], slots, target.device)
    seen = None
    if sampling.needs_history:
        seen = torch.zeros(len(requests), target.vocab_size, dtype=torch.bool, device=target.device)
        for row, request in enumerate(requests):
            seen[row, torch.tensor(request.tokens, device=target.device)] = True
    active = np.ones(len(requests), dtype=bool)
    return Batch(requests, tokens, lengths, lengths.copy(), active, sampling, noise, target.device, seen)


def _prefill(
    target: CausalLM, batch: Batch, cache: RaggedCache, drafter: Drafter
) -> tuple[Tensor, list[Tensor] | None]:
    """Fill the cache with the prompts, row by row: no padding, and a row's numbers do not depend on its neighbours.

    Returns the logits [B, V] that yield the first tokens, and the taps [P, m, D] of each row.
    """
    logits, taps = [], []
    for row in range(len(batch)):
        output = target.prefill(torch.from_numpy(batch.text(row)).to(target.device), cache, row, drafter.taps)
        logits.append(output.logits[0, -1])
        if output.taps is not None:
            taps.append(output.taps[0])
    return torch.stack(logits), taps or None


def _read(draft: Draft, verdict: Verdict, logits: Tensor) -> np.ndarray:
    """What the host must know of a round, [B, K+4]: drafted tokens, their count, how many were accepted, the target's
    own token, and whether the logits [B, ..., V] are numbers. Here alone the host waits for the device."""
    # a maximum over NaN is NaN; a minus infinity that rules a token out is not the maximum
    sound = logits.amax(dim=-1).reshape(len(logits), -1).isfinite().all(dim=1)
    columns = (draft.count, verdict.accepted, verdict.next, sound.long())
    return torch.cat([draft.tokens, torch.stack(columns, dim=1)], dim=1).cpu().numpy()


def _commit(batch: Batch, outcome: np.ndarray, stop: StopRule, round_: int, sampled: bool) -> Step:
    """Add to each active row its accepted drafts and the target's own token, up to where the text ends.

    ``outcome`` is what ``_read`` gives; logits that are not numbers fail here, loudly: an argmax over them is a
    plausible-looking token.
    """
    drafted, (count, accepted, following, sound) = outcome[:, :-4].tolist(), outcome[:, -4:].T.tolist()
    _check_numbers(sound, batch, round_)
    step = Step(round_, 0.0, sampled, np.flatnonzero(batch.active).tolist(), [], [], [], [], [])
    for row in step.rows:
        block = [*drafted[row][: accepted[row]], following[row]]
        kept, finish = stop.cut(batch.generated(row).tolist(), block, int(batch.prompt_lengths[row]))
        # of a text that ends here, nothing past its end counts, neither as drafted nor as accepted
        judged = kept if finish else count[row]
        step.drafted.append(drafted[row][: count[row]])
        step.proposed.append(min(count[row], judged))
        step.accepted.append(min(accepted[row], judged))
        step.committed.append(block[:kept])
        step.finish.append(finish)
        batch.tokens[row, batch.lengths[row] : batch.lengths[row] + kept] = block[:kept]
        batch.lengths[row] += kept
        batch.active[row] = finish is None
        if batch.seen is not None:
            batch.seen[row, torch.tensor(block[:kept], device=batch.device)] = True
    return step


def _check_numbers(sound: list[int], batch: Batch, round_: int) -> None:
    bad = [batch.requests[row].uid for row in np.flatnonzero(batch.active).tolist() if not sound[row]]
    if bad:
        where = "the prefill" if round_ == 0 else f"round {round_}"
        raise RunError(f"the target's logits are NaN or infinite in {where} of prompt {', '.join(bad)}")


def _check_draft(draft: Draft, k: int, batch: Batch, vocab_size: int, drafter: Drafter) -> None:
    """Catch what a drafter can get wrong before it becomes a wrong number or takes the device down."""
    name, (rows, width) = type(drafter).__name__, draft.tokens.shape
    if width > k:
        raise RunError(f"{name} drafted {width} tokens where k={k} were asked for")
    if rows != len(batch) or draft.count.shape != (rows,) or draft.tokens.dtype != torch.long:
        raise RunError(f"{name} drafted {draft.tokens.dtype} {[rows, width]} with counts {[*draft.count.shape]}")
    if draft.probs is not None and draft.probs.shape != (rows, width, vocab_size):
        raise RunError(f"{name} handed on probs {[*draft.probs.shape]} where {[rows, width, vocab_size]} were due")
    # looking at values would make the host wait for a GPU; there a wrong id fails in the embedding
    if draft.tokens.device.type == "cpu":
        if width and not 0 <= int(draft.tokens.min()) <= int(draft.tokens.max()) < vocab_size:
            raise RunError(f"{name} drafted a token outside the vocabulary of {vocab_size}")
        if not 0 <= int(draft.count.min()) <= int(draft.count.max()) <= width:
            raise RunError(f"{name} counts {draft.count.tolist()} drafted tokens where it gave {width}")


def _wait(device: torch.device) -> None:
    """Let the device finish, so that a clock read now has seen all the work it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _flat(noise: Tensor | None) -> Tensor | None:
    return None if noise is None else noise[:, 0]
