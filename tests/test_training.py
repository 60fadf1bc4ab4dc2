"""Training: what a drafter learns from is what decoding will ask of it; a stopped training goes on as if it had not
been; and a bug of each known kind is noticed."""

import csv
import importlib.util
import itertools
import json
import logging
import os
import shutil
import signal
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import mutated, plain_greedy, prompts, run, tiny, untrace
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file
from test_training_data import TEXTS, command_line, make_data, said, some_words, write_prompts
from torch.nn import functional as F

from drafters import cached, dflash, distilled, draft_model, eagle, initial, recursive, shipped
from drafters.checkpoints import common
from drafters.distilled import Options
from drafters.eagle import Eagle
from drafters.neural import Passages, Unrolled
from drafters.none import NoDrafter
from drafters.small_lm import SmallLM
from drafters.training import __main__ as command
from drafters.training import batches as batches_module
from drafters.training import card, corpus, objective, streams, trainer
from drafters.training.batches import Batch, Batches, truths
from drafters.training.calibration import calibrated, calibration_error
from drafters.training.corpus import Conversation, Corpus
from drafters.training.objective import Losses, Objective, Truth
from drafters.training.trainer import Budget, Learner, Trainer, schedule, stop_on_signal
from drafters.training.validation import Tally, Validation, covered, right, walk
from specbench import __main__, cli, record
from specbench.cli import conf_dir
from specbench.decoding import decode
from specbench.drafting import Drafter, Request
from specbench.errors import ConfigError, RunError
from specbench.model import CausalLM
from specbench.packaged import file_sha256
from specbench.sampling import Sampling
from specbench.stopping import StopRule
from specbench.targets import load_tiny
from specbench.tracking import Tracker

FAMILIES = ("eagle", "mtp", "medusa", "dflash", "dspark", "small_lm")
PROJECT = Path(__file__).parent.parent
REPLY = 20  # most tokens
ENDS = frozenset([1, *range(60, 72)])  # of replies; some occur


@pytest.fixture(autouse=True)
def as_it_was(tmp_path, monkeypatch):
    """See test_training_data."""
    monkeypatch.chdir(tmp_path)
    with command_line():
        yield


@cache
def configuration(family: str, *overrides: str) -> DictConfig:
    # a small LM of all blocks would be the target
    smaller = ["drafter.network.blocks=[0,2]", "drafter.network.frozen=1"] if family == "small_lm" else []
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose(
            "training", [f"drafter={family}", "target=tiny", "dtype=float32", "vocabulary=70", *smaller, *overrides]
        )


def steps_of(target: CausalLM, drafter: Drafter, c: Conversation, k: int, length: int = REPLY) -> list:
    stop = StopRule(length, token_ids=ENDS)
    return list(decode(target, drafter, [Request(c.id, c.prompt)], k, Sampling(c.temperature), 0, stop))


@cache
def own_words(kind: str = "llama", count: int = 4) -> tuple[Conversation, ...]:
    """Conversations of a tiny target, each prompt at both temperatures, of uneven lengths."""
    target = tiny(kind)
    made = []
    for i in range(count):
        for temperature in (0.0, 1.0):
            prompt = target.tokenizer(some_words(i, 1 + i)).input_ids
            c = Conversation(f"{i}/{temperature:g}", "chat", temperature, prompt, [], held_out=i == count - 1)
            reply = [t for step in steps_of(target, NoDrafter(), c, 0, REPLY - i) for t in step.committed[0]]
            made.append(Conversation(c.id, c.kind, temperature, prompt, reply, c.held_out))
    return tuple(made)


@dataclass
class Training:
    """A training under way, with all its parts."""

    family: str
    cfg: DictConfig
    target: CausalLM
    drafter: Any
    model: Any
    batches: Batches
    trainer: Trainer
    conversations: Sequence[Conversation]

    def learn(self, steps: int | None = None) -> list[dict[str, float]]:
        """So many steps, or all; what was reported of each."""
        reported: list[dict[str, float]] = []
        for progress in self.trainer.run(lambda progress, found: reported.append(dict(found))):
            if progress.step == steps:
                break
        return reported

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def training(
    family: str,
    folder: Path,
    conversations: Sequence[Conversation] | None = None,
    *overrides: str,
    kind: str = "llama",
    question: dict[str, Any] | None = None,
    stored: bool = False,
    **budget: Any,
) -> Training:
    """A new training, or the one that ``folder`` holds; put together as the command does it. ``stored``: the target's
    streams are kept, and not computed for each batch."""
    cfg, target = configuration(family, *overrides), tiny(kind)
    conversations = own_words(kind) if conversations is None else conversations
    data = Corpus(folder, {"table_sha256": "x"}, conversations)
    drafter = command._drafter(cfg, target, family)
    model = drafter.build(target)
    command._choose_vocabulary(model, data, target)
    learner = Learner(drafter, command._trainable(model), target, cli.make(cfg.recipe))
    taps = (*drafter.taps, len(target.blocks))
    source: streams.Source = streams.Recomputed(target, conversations, taps)
    if stored:
        source = streams.keep(target, data, taps, (), folder / "streams", 1 << 40, lambda done, of: None)
    batches = Batches(target, conversations, source)
    usual = {
        "epochs": 4, "minutes": None, "batch_tokens": 100, "save_minutes": 9, "validate_minutes": 9, "seed": 0,
        "clip": 1.0, "weight_decay": 0.01,
    }  # fmt: skip
    made = Trainer(
        learner,
        batches,
        [i for i, c in enumerate(conversations) if not c.held_out],
        Budget(**{**usual, **budget}),
        folder,
        Accelerator(cpu=True),
        question or {},
    )
    return Training(family, cfg, target, drafter, model, batches, made, conversations)


Round = tuple[int, int, list[int]]  # drafts that were proposed and accepted, and the drafts up to the first wrong one


def walks(made: Training, k: int) -> list[list[Round]]:
    """Rounds of each conversation as validation sees them."""
    found: dict[int, list[Round]] = {}
    made.trainer._learner.eval()
    ids = made.model.head.ids
    for numbers in made.batches.epoch(range(len(made.conversations)), 300, "any"):
        batch = made.batches.make(numbers, 1.0, "any")
        with torch.no_grad():
            drafts = made.drafter.unroll(made.model, made.target, batch.passages, k)
            hits = right(drafts, batch, made.model.head)
        tokens = ids[torch.stack([logits.argmax(dim=-1) for logits in drafts.logits], dim=-1)]  # [B, A, K]
        for row, number, count in zip(range(len(numbers)), numbers, batch.real.sum(dim=1).tolist(), strict=True):
            found[number], position = [], 0
            for proposed, accepted in walk(hits[row, :count].numpy()):
                drafted = tokens[row, position].tolist()[: min(proposed, accepted + 1)]
                found[number].append((proposed, accepted, drafted))
                position += accepted + 1
    return [found[i] for i in range(len(found))]


def rounds_of(steps: Sequence[Any]) -> list[Round]:
    """Rounds as decoding had them."""
    rounds = []
    for step in steps[1:]:
        (proposed,), (accepted,), (drafted,) = step.proposed, step.accepted, step.drafted
        rounds.append((proposed, accepted, drafted[: min(proposed, accepted + 1)]))
    return rounds


def drafter_of(made: Training, folder: Path) -> Drafter:
    """The drafter of the training's checkpoint, written to ``folder``, as a user asks for it."""
    common.without_target_rows(made.drafter.write(made.model, made.target), made.target).save(folder)
    settings = OmegaConf.to_container(made.cfg.drafter, resolve=True)
    settings.pop("network")
    settings["model" if "model" in settings else "checkpoint"] = str(folder)
    drafter = cli.make(OmegaConf.create(settings))
    drafter.bind(made.target)
    return drafter


@dataclass
class Decoded:
    """What decoding made of the conversations with the trained drafter."""

    made: Training
    k: int
    rounds: list[list[Round]]
    committed: int
    replies: list[list[int]]


@cache
def trained(family: str, folder: Path) -> Decoded:
    made = training(family, folder, None, "recipe.rate=0.01", stored=True, epochs=18)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cached, "Traced", lambda network, name: network)  # tracing takes longer than all these texts
        untrace(patch, made.target)
        made.learn()
        drafter, k = drafter_of(made, folder / "checkpoint"), made.cfg.k
        rounds, replies, committed = [], [], 0
        for c in made.conversations:
            steps = steps_of(made.target, drafter, c, k, REPLY - int(c.id[0]))
            rounds.append(rounds_of(steps))
            replies.append([t for step in steps for t in step.committed[0]])
            committed += sum(len(step.committed[0]) for step in steps[1:])
    return Decoded(made, k, rounds, committed, replies)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(params=FAMILIES)
def decoded(request, home) -> Decoded:
    """Trained once for all tests, and decoded."""
    folder = home / request.param
    folder.mkdir(exist_ok=True)
    return trained(request.param, folder)


# what is validated is what decoding does


def test_walking_a_text_is_decoding_it_round_by_round(decoded):
    assert decoded.replies == [list(c.reply) for c in decoded.made.conversations]
    assert walks(decoded.made, decoded.k) == decoded.rounds


def test_some_drafts_are_accepted_and_some_are_not_and_some_replies_end_early(decoded):
    """Else the test above would say little."""
    rounds = [r for rounds in decoded.rounds for r in rounds]
    assert 10 < sum(accepted for _, accepted, _ in rounds) < sum(proposed for proposed, _, _ in rounds)
    assert any(reply[-1] in ENDS and len(reply) < 17 for reply in decoded.replies)


def test_validation_is_the_tally_of_decoding(decoded):
    found: Validation = decoded.made.trainer.validate(range(len(decoded.made.conversations)), decoded.k)
    rounds = [r for rounds in decoded.rounds for r in rounds]
    assert found.tokens_per_pass == pytest.approx(decoded.committed / len(rounds))
    counts = [[sum(r[what] > i for r in rounds) for i in range(decoded.k)] for what in (0, 1)]
    assert found.acceptance == pytest.approx([a / max(1, p) for p, a in zip(*counts, strict=True)])


def test_training_changes_what_is_to_be_trained_and_nothing_else(decoded, tmp_path):
    made = decoded.made
    new = training(made.family, tmp_path).weights
    learning = made.trainer._learner.trained()
    assert learning
    for name, weight in made.weights.items():
        if not name.endswith("embed_tokens.weight"):  # a small LM has the target's
            assert torch.equal(weight, new[name]) == (name not in learning), name
    frozen = {name for name in new if name.startswith("head.")}
    assert frozen
    assert not frozen & learning.keys()


def test_a_trained_drafter_drafts_better_than_a_new_one(decoded, tmp_path):
    made = decoded.made
    new = training(made.family, tmp_path)
    before, after = (t.validate(made.trainer._training, decoded.k) for t in (new.trainer, made.trainer))
    assert after.loss < before.loss
    assert after.tokens_per_pass > before.tokens_per_pass


def test_drafts_at_some_positions_are_those_at_all(decoded):
    """So what a step trains does not depend on which positions it drew."""
    made, k = decoded.made, decoded.k
    everywhere, some = (made.batches.make([0, 3, 4], share, "x") for share in (1.0, 0.4))
    assert 0 < some.positions < everywhere.positions
    with torch.no_grad():
        whole, part = (made.drafter.unroll(made.model, made.target, b.passages, k) for b in (everywhere, some))
    for row in range(3):
        columns = torch.searchsorted(everywhere.passages.at[row][everywhere.real[row]], some.passages.at[row])
        real = some.real[row]
        for one, other in zip(whole.logits, part.logits, strict=True):
            torch.testing.assert_close(other[row][real], one[row][columns[real]], atol=1e-4, rtol=1e-4)
        if part.confidence is not None:
            torch.testing.assert_close(
                part.confidence[row][real], whole.confidence[row][columns[real]], atol=1e-4, rtol=1e-4
            )


@pytest.mark.parametrize(("family", "kind"), [("eagle", "gemma3"), ("dspark", "qwen3")])
def test_walking_a_text_of_another_kind_of_target_is_decoding_it(family, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(cached, "Traced", lambda network, name: network)
    made = training(family, tmp_path, None, "recipe.rate=0.01", kind=kind, stored=True, epochs=4)
    if kind != "gemma3":  # which is not traced
        untrace(monkeypatch, made.target)
    made.learn()
    drafter = drafter_of(made, tmp_path / "checkpoint")
    rounds = []
    for c in made.conversations:
        steps = steps_of(made.target, drafter, c, 3, REPLY - int(c.id[0]))
        rounds.append(rounds_of(steps))
    assert walks(made, 3) == rounds
    assert sum(accepted for row in rounds for _, accepted, _ in row) > 0


# bugs of known kinds, each noticed by the comparison above


def shifted(batch: Batch) -> Batch:
    """A tap off by one position."""
    passages = batch.passages
    return replace(batch, passages=replace(passages, streams=passages.streams.roll(1, dims=1)))


BUGS = {
    "features of the position before": ("eagle", Batches, "make", shifted),
    "features of the position before, medusa": ("medusa", Batches, "make", shifted),
    "features of the position before, dflash": ("dflash", Batches, "make", shifted),
    "labels of the position after": (
        "small_lm",
        batches_module,
        "truths",
        ("tokens_after(2 + k)", "tokens_after(3 + k)"),
    ),
    "labels of the position before": ("mtp", batches_module, "truths", ("tokens_after(2 + k)", "tokens_after(1 + k)")),
    "blocks see other blocks": (
        "dflash",
        dflash.Backbone,
        "unroll",
        ("(block_of[:, None] == block_of)", "(block_of[:, None] >= 0 * block_of)"),
    ),
    "blocks see the anchor's own feature": (
        "dspark",
        dflash.Backbone,
        "unroll",
        ("[:, None] < anchors", "[:, None] <= anchors"),
    ),
    "positions see other positions' own drafts": (
        "eagle",
        recursive.Cell,
        "unroll",
        ("torch.eye(at.shape[1], dtype=torch.bool", "torch.ones(at.shape[1], at.shape[1], dtype=torch.bool"),
    ),
    "a recursion stands a position early": (
        "mtp",
        recursive.Cell,
        "unroll",
        ("self.rotary(at + j,", "self.rotary(at,"),
    ),
    "the sequential head reads the token itself": ("dspark", None, None, None),
    "the last token is not looked at": ("small_lm", Batches, "make", ("len(text) - 2)", "len(text) - 3)")),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_a_known_kind_is_noticed(bug, home, monkeypatch):
    family, owner, name, change = BUGS[bug]
    (home / family).mkdir(exist_ok=True)
    decoded = trained(family, home / family)
    assert walks(decoded.made, decoded.k) == decoded.rounds
    if owner is None:
        after = Passages.tokens_after
        monkeypatch.setattr(Passages, "tokens_after", lambda self, steps: after(self, steps + 1))
    elif callable(change):
        right_way = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: change(right_way(*given)))
    else:
        broken = mutated(getattr(owner, name), change)
        monkeypatch.setattr(owner, name, broken)
        if name == "truths":
            monkeypatch.setattr("drafters.training.validation.truths", broken)
    assert walks(decoded.made, decoded.k) != decoded.rounds


# the objective


VOCABULARY, DRAFTED = 40, 25  # the target's, and of those in the draft vocabulary


@dataclass
class Case:
    """Laws of a target over all its tokens, and what a network makes of them."""

    logits: list[torch.Tensor]
    confidence: torch.Tensor
    laws: list[torch.Tensor]  # [B, A, V], float64
    tokens: list[torch.Tensor]  # [B, A] ids of the true tokens
    known: list[torch.Tensor]
    ids: torch.Tensor

    def truths(self) -> list[Truth]:
        places = torch.full((VOCABULARY,), -1)
        places[self.ids] = torch.arange(len(self.ids))
        return [
            Truth(
                torch.where(known, places[tokens], -1),
                laws[..., self.ids].float(),
                laws.logsumexp(dim=-1).float(),
                places[laws.argmax(dim=-1)] >= 0,
                known,
            )
            for laws, tokens, known in zip(self.laws, self.tokens, self.known, strict=True)
        ]

    def unrolled(self) -> Unrolled:
        return Unrolled(self.logits, self.confidence)


def case(depth: int = 3, shape: tuple[int, int] = (3, 37), dtype: torch.dtype = torch.float32) -> Case:
    """More rows than are done at a time."""
    generator = torch.Generator().manual_seed(2)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    ids = torch.randperm(VOCABULARY, generator=generator)[:DRAFTED].sort().values
    return Case(
        [(2 * draw(*shape, DRAFTED)).to(dtype).requires_grad_() for _ in range(depth)],
        draw(*shape, depth).float().requires_grad_(),
        [2.5 * draw(*shape, VOCABULARY) for _ in range(depth)],
        [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(depth)],
        [torch.rand(shape, generator=generator) > 0.1 * (k + 1) for k in range(depth)],
        ids,
    )


def by_the_book(goal: Objective, given: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss as the formula has it, in float64, over the whole vocabulary; and the shares accepted [K, B, A]."""
    loss, shares = torch.zeros((), dtype=torch.float64), []
    for k in range(goal.depth):
        log_q = given.logits[k].double().log_softmax(dim=-1)  # [B, A, Vd]
        q = torch.zeros(*log_q.shape[:2], VOCABULARY, dtype=torch.float64).index_copy(2, given.ids, log_q.exp())
        p = given.laws[k].softmax(dim=-1)
        can_be_said = torch.isin(given.tokens[k], given.ids)
        place = torch.searchsorted(given.ids, given.tokens[k]).clamp(max=DRAFTED - 1)
        hard = torch.where(can_be_said, -log_q.gather(2, place[..., None])[..., 0], 0)
        over_drafted = given.laws[k][..., given.ids].softmax(dim=-1)
        soft = torch.where(torch.isin(p.argmax(dim=-1), given.ids), -(over_drafted * log_q).sum(dim=-1), 0)
        distance = (p - q).abs().sum(dim=-1)
        accepted = (1 - distance / 2).detach()
        c = given.confidence[..., k].double()
        bce = -(accepted * F.logsigmoid(c) + (1 - accepted) * F.logsigmoid(-c))
        each = goal.hard * hard + goal.soft * soft + goal.distance * distance + goal.confidence * bce
        weight = goal.decay**k / sum(goal.decay**j for j in range(goal.depth))
        loss = loss + weight * each[given.known[k]].mean()
        shares.append(accepted)
    return loss, torch.stack(shares)


GOALS = {
    "hard": Objective(3, hard=1.0),
    "soft": Objective(3, soft=1.0),
    "distance": Objective(3, distance=1.0),
    "hard and confidence": Objective(3, hard=1.0, confidence=1.0),
    "all, the first counting most": Objective(3, decay=0.6, hard=0.3, soft=0.7, distance=1.5, confidence=0.5),
    "dspark": Objective(3, decay=0.7788, hard=0.1, distance=0.9, confidence=1.0),
    "one draft": Objective(1, soft=1.0, hard=0.5),
}


def off_the_book(goal: Objective, given: Case) -> float:
    """Largest difference of loss and gradients, relative to the size of each."""
    wanted, _ = by_the_book(goal, given)
    inputs = [*given.logits[: goal.depth], given.confidence]
    expected = torch.autograd.grad(wanted, inputs, allow_unused=True)
    drafts = Unrolled(given.logits[: goal.depth], given.confidence)
    found = objective.loss(goal, drafts, iter(given.truths()[: goal.depth]))
    gradients = torch.autograd.grad(found, inputs, allow_unused=True)
    worst = abs(found.item() - wanted.item()) / wanted.item()
    for one, other in zip(gradients, expected, strict=True):
        if other is not None and bool(other.abs().max() > 0):
            worst = max(worst, ((one - other).abs().max() / other.abs().max()).item())
    return worst


@pytest.mark.parametrize("goal", GOALS)
def test_the_loss_and_its_gradient_are_those_of_the_formula(goal):
    assert off_the_book(GOALS[goal], case()) < 1e-5


@pytest.mark.parametrize("rows", [1, 7, 48, 500])
def test_how_many_rows_are_done_at_a_time_does_not_matter(rows, monkeypatch):
    monkeypatch.setattr(objective, "ROWS", rows)
    assert off_the_book(GOALS["all, the first counting most"], case()) < 1e-5


def test_half_precision_logits_have_a_gradient_of_their_kind():
    given = case(dtype=torch.bfloat16)
    assert off_the_book(GOALS["all, the first counting most"], given) < 0.02
    found = objective.loss(GOALS["hard"], given.unrolled(), iter(given.truths()))
    (gradient,) = torch.autograd.grad(found, given.logits[:1])
    assert gradient.dtype is torch.bfloat16


def test_what_is_accepted_is_the_overlap_of_the_laws():
    given, goal = case(), GOALS["dspark"]
    _, expected = by_the_book(goal, given)
    for k, truth in enumerate(given.truths()):
        _, accepted = Losses.apply(given.logits[k], truth, goal)
        torch.testing.assert_close(accepted.double(), expected[k], atol=1e-6, rtol=1e-5)


WRONG = {
    "decay is ignored": (objective, "loss", ("weight * each", "1 / 3 * each")),
    "the mean is over what is not known as well": (
        objective,
        "loss",
        (".sum() / truth.known.sum().clamp(min=1)", ".mean()"),
    ),
    "confidence of another draft": (objective, "loss", ("drafts.confidence[..., k]", "drafts.confidence[..., 0]")),
    "confidence learns of distance, not of acceptance": (
        objective,
        "loss",
        ("guess, accepted,", "guess, 1 - accepted,"),
    ),
    "tokens that cannot be said count": (Losses, "forward", ("(label[part] >= 0)", "(label[part] >= -1)")),
    "unlikely tokens count in soft": (Losses, "forward", ("each[part] -= liked *", "each[part] -= goal.soft *")),
    "gradient of soft where there is none": (Losses, "forward", ("liked[:, None] *", "goal.soft *")),
    "p is of the draft vocabulary alone": (
        Losses,
        "forward",
        ("(laws[part].float() - total[part][:, None]).exp_()", "laws[part].float().softmax(-1)"),
    ),
    "what cannot be drafted is no distance": (Losses, "forward", (" + (1 - p.sum(dim=-1)).clamp(min=0)", "")),
    "the sum in the gradient of distance": (
        Losses,
        "forward",
        ("sign.sub_((sign * q).sum(dim=-1, keepdim=True))", "sign"),
    ),
    "the weight of hard in the gradient": (Losses, "forward", ("q.mul_(seen[:, None])", "q.mul_((seen > 0)[:, None])")),
    "the true token in the gradient": (
        Losses,
        "forward",
        ("slope.scatter_add_(1, place, -seen", "slope.scatter_add_(1, place, 0 * seen"),
    ),
    "each position's part in the gradient": (
        Losses,
        "backward",
        ("by_each.flatten().to", "by_each.mean().expand(by_each.numel()).to"),
    ),
}


@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_loss_is_noticed(bug, monkeypatch):
    owner, name, change = WRONG[bug]
    broken = mutated(getattr(owner, name), change)
    monkeypatch.setattr(owner, name, broken if owner is objective else staticmethod(broken))
    assert off_the_book(GOALS["all, the first counting most"], case()) > 1e-3


@pytest.mark.parametrize("depth", [1, 2, 4, 7])
@pytest.mark.parametrize("decay", [0.6, 0.7788, 1.0])
def test_weights_sum_to_one_and_decay(depth, decay):
    weights = Objective(depth, decay=decay, hard=1.0).weights
    assert sum(weights) == pytest.approx(1)
    assert len(weights) == depth
    assert [b / a for a, b in itertools.pairwise(weights)] == pytest.approx([decay] * (depth - 1))


PUBLISHED = {
    "eagle": {"soft": 1.0},
    "mtp": {"hard": 1.0},
    "medusa": {"hard": 1.0},
    "dflash": {"hard": 1.0},
    "dspark": {"hard": 0.1, "distance": 0.9, "confidence": 1.0},
    "small_lm": {"soft": 1.0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_trained_by_its_published_objective(family):
    goal = cli.make(configuration(family).recipe)
    weights = {name: getattr(goal, name) for name in ("hard", "soft", "distance", "confidence")}
    assert {name: weight for name, weight in weights.items() if weight} == PUBLISHED[family]
    assert goal.reads_law == (family in ("eagle", "dspark", "small_lm"))


def test_where_nothing_is_known_nothing_is_learned():
    given = case()
    given.known = [torch.zeros_like(known) for known in given.known]
    found = objective.loss(GOALS["dspark"], given.unrolled(), iter(given.truths()))
    assert found.item() == 0
    assert all(not g.any() for g in torch.autograd.grad(found, given.logits))


def test_logits_where_nothing_is_known_do_not_matter():
    given, goal = case(), GOALS["dspark"]
    found = []
    for size in (0.0, 100.0):
        answers = [
            replace(
                truth,
                logits=torch.where(truth.known[..., None], truth.logits, size),
                total=torch.where(truth.known, truth.total, 0.0),  # as streams have it past a text's end
            )
            for truth in given.truths()
        ]
        found.append(objective.loss(goal, given.unrolled(), iter(answers)).item())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"depth": 0}, "recipe.depth=0"),
        ({"depth": 1.5}, "recipe.depth=1.5"),
        ({"hard": -1.0}, "recipe.hard=-1.0"),
        ({"soft": float("nan")}, "recipe.soft=nan"),
        ({"distance": -0.1}, "recipe.distance=-0.1"),
        ({"confidence": -2}, "recipe.confidence=-2"),
        ({"hard": 0.0}, "hard, soft and distance are all 0"),
        ({"hard": 0.0, "confidence": 1.0}, "hard, soft and distance are all 0"),
        ({"decay": 0.0}, "recipe.decay=0.0"),
        ({"decay": 1.1}, "recipe.decay=1.1"),
        ({"positions": 0}, "recipe.positions=0"),
        ({"positions": 2.0}, "recipe.positions=2.0"),
        ({"rate": 0.0}, "recipe.rate=0.0"),
    ],
)
def test_an_objective_refuses_what_it_cannot_be(wrong, named):
    with pytest.raises(ConfigError, match=named):
        Objective(**{"depth": 3, "hard": 1.0, **wrong})


# what is right


UNEVEN = (  # prompt, reply
    ([5, 6, 7], [10, 200, 12, 13, 14]),
    ([8, 9], [20, 21]),
    ([3, 4, 5, 6, 7, 8], [1]),
    ([30], [99, 98, 97, 96, 95, 94, 93]),
)


@pytest.fixture
def uneven(tmp_path) -> Training:
    conversations = [Conversation(f"{i}/0", "x", 0.0, p, r) for i, (p, r) in enumerate(UNEVEN)]
    return training("medusa", tmp_path, conversations, batch_tokens=1000)


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_right_is_what_the_text_and_the_target_say(uneven, whole):
    target, head, depth = uneven.target, uneven.model.head, 4
    if whole:
        head = draft_model.OutputHead(target.width, target.vocab_size)
        head.lm_head.weight.data.copy_(initial.output_rows(target))
    ids = list(range(target.vocab_size)) if head.ids is None else head.ids.tolist()
    batch = uneven.batches.make([0, 1, 2, 3], 1.0, "x")
    found = list(truths(batch, head, depth, target.scaled))
    laws = [target.forward(torch.tensor([p + r]), target.new_cache(1, len(p + r))).logits[0].float() for p, r in UNEVEN]
    assert batch.real.sum(dim=1).tolist() == [4, 1, 0, 6]
    labels = set()
    for row, (prompt, reply) in enumerate(UNEVEN):
        text = prompt + reply
        for column in range(batch.real.shape[1]):
            for k in range(depth):
                truth = found[k]
                place = len(prompt) - 1 + column + 2 + k  # of the token that is guessed
                real = column < len(reply) - 1
                assert truth.known[row, column] == (real and place < len(text))
                if not truth.known[row, column]:
                    assert truth.label[row, column] == -1
                    continue
                token, law = text[place], laws[row][place - 1]
                assert truth.label[row, column] == (ids.index(token) if token in ids else -1)
                torch.testing.assert_close(truth.logits[row, column], law[ids], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(truth.total[row, column], law.logsumexp(0), atol=1e-4, rtol=1e-4)
                assert truth.likely[row, column] == (int(law.argmax()) in ids)
                labels.add(int(truth.label[row, column]))
    assert len(labels) > 4
    if not whole:
        assert -1 in labels or any(not truth.likely[truth.known].all() for truth in found)


def test_labels_alone_are_the_same(uneven):
    batch = uneven.batches.make([0, 1, 3], 1.0, "x")
    both = [list(truths(batch, uneven.model.head, 3, scaled)) for scaled in (uneven.target.scaled, None)]
    for one, other in zip(*both, strict=True):
        assert other.logits is None
        assert torch.equal(one.label, other.label)


def test_features_of_a_batch_are_the_targets_own(uneven):
    target = uneven.target
    batch = uneven.batches.make([3, 0], 1.0, "x")
    for row, number in enumerate((3, 0)):
        prompt, reply = UNEVEN[number]
        text = prompt + reply
        output = target.forward(torch.tensor([text]), target.new_cache(1, len(text)), taps=(3,))
        torch.testing.assert_close(batch.passages.streams[row, : len(text)], output.taps[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(target.head(batch.hidden[row, : len(text)]), output.logits[0], atol=1e-4, rtol=1e-4)
        assert batch.passages.tokens[row, : len(text)].tolist() == text
    assert batch.lengths.tolist() == [8, 8]


def test_a_share_of_the_positions_is_drawn(uneven):
    whole = uneven.batches.make([0, 3], 1.0, "x")
    assert whole.passages.at[0, :4].tolist() == [2, 3, 4, 5]
    assert whole.passages.at[1][whole.real[1]].tolist() == [0, 1, 2, 3, 4, 5]
    batches = [uneven.batches.make([0, 3], 0.5, str(i)) for i in range(9)]
    drawn = {tuple(batch.passages.at[1][batch.real[1]].tolist()) for batch in batches}
    assert len(drawn) > 3
    for places in drawn:
        assert len(set(places)) == 3
        assert list(places) == sorted(places)
        assert set(places) <= {0, 1, 2, 3, 4, 5}
    again = [uneven.batches.make([0, 3], 0.5, "x").passages.at.tolist() for _ in range(2)]
    assert again[0] == again[1]
    assert uneven.batches.make([0, 1], 0.01, "x").real.sum(dim=1).tolist() == [1, 1]  # at least one


def test_batches_come_in_few_sizes(uneven):
    batch = uneven.batches.make([1, 3], 1.0, "x")
    assert batch.passages.tokens.shape == batch.best.shape == (2, batches_module.TOKENS)
    assert batch.passages.at.shape == batch.real.shape == (2, batches_module.POSITIONS)
    assert batch.real.sum(dim=1).tolist() == [1, 6]


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_of_a_batch_changes_nothing(family, tmp_path, monkeypatch):
    """What a step learns is the same to rounding, however far its sizes are rounded up."""
    found = []
    for tokens, positions in ((1, 1), (64, 32), (100, 41)):
        monkeypatch.setattr(batches_module, "TOKENS", tokens)
        monkeypatch.setattr(batches_module, "POSITIONS", positions)
        made = training(family, tmp_path)
        loss = made.trainer._learner(made.batches.make([0, 3, 5], 1.0, "x"))
        loss.backward()
        found.append((loss.item(), [p.grad for p in made.trainer._learner.trained().values()]))
    for loss, gradients in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        for one, other in zip(gradients, found[0][1], strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_without_anything_to_guess_teaches_nothing(family, tmp_path):
    conversations = [Conversation(f"{i}/0", "x", 0.0, [5, 6, 7 + i], [9]) for i in range(2)]
    made = training(family, tmp_path, [*conversations, *own_words()[:1]], epochs=1)
    batch = made.batches.make([0, 1], 1.0, "x")
    assert batch.positions == 0
    assert made.trainer._learner(batch).item() == 0


def test_an_epoch_is_every_conversation_once(tmp_path):
    made = training("medusa", tmp_path, own_words(count=8))
    numbers = [0, 2, 3, 5, 7, 11, 12, 15]
    first, again, other = (made.batches.epoch(numbers, 100, seed) for seed in "aab")
    assert first == again != other
    for epoch in (first, other):
        assert sorted(i for batch in epoch for i in batch) == numbers
        for batch in epoch:
            assert len(batch) * max(len(made.conversations[i].tokens) for i in batch) <= 100 or len(batch) == 1


def test_places_are_those_of_the_draft_vocabulary():
    places = batches_module.Places(torch.tensor([3, 5, 9]), torch.device("cpu"))
    assert places(torch.tensor([[3, 4, 5], [9, 10, 0]])).tolist() == [[0, -1, 1], [2, -1, -1]]
    assert batches_module.Places(None, torch.device("cpu"))(torch.tensor([7])).tolist() == [7]


# going on


def stopped_and_gone_on(family: str, folder: Path, steps: int = 3, **budget: Any) -> tuple[Training, Training]:
    """Trained at once, and with a stop after some steps; everything built anew."""
    for name in ("once", "twice"):
        (folder / name).mkdir(parents=True)
    once = training(family, folder / "once", None, **budget)
    first = training(family, folder / "twice", None, **budget)
    first.learn(steps)
    first.trainer.save()
    second = training(family, folder / "twice", None, **budget)
    assert second.trainer.progress.step == steps
    assert second.trainer.progress.tokens == first.trainer.progress.tokens
    assert once.learn()[steps:] == second.learn()
    return once, second


def same(one: Training, other: Training) -> bool:
    theirs = other.weights
    return all(torch.equal(w, theirs[n]) for n, w in one.weights.items() if not n.endswith("embed_tokens.weight"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stopped_training_goes_on_exactly(family, tmp_path):
    once, twice = stopped_and_gone_on(family, tmp_path, epochs=3)
    assert once.trainer.progress.step == twice.trainer.progress.step == 6
    assert same(once, twice)


def test_a_finished_training_has_nothing_left_to_do(tmp_path):
    made = training("medusa", tmp_path, epochs=1)
    made.learn()
    made.trainer.save()
    again = training("medusa", tmp_path, epochs=1)
    assert again.trainer.finished
    assert again.learn() == []
    assert same(made, again)


def test_a_finished_training_goes_on_where_more_is_asked_for(tmp_path):
    first = training("medusa", tmp_path, question={"budget": {"epochs": 1, "minutes": None, "seed": 0}}, epochs=1)
    taught = len(first.learn())
    first.trainer.save()
    longer = {"question": {"budget": {"epochs": 3, "minutes": None, "seed": 0}}, "epochs": 3}
    more = training("medusa", tmp_path, **longer)
    assert not more.trainer.finished
    assert more.trainer.progress.extended == [{"epochs": 1, "minutes": None}]
    assert same(first, more)
    rates = [found["rate"] for found in more.learn()]
    assert len(rates) == 2 * taught
    assert rates[0] == 1e-3 * schedule(1 / 3)  # as of the longer training at this place
    more.trainer.save()
    again = training("medusa", tmp_path, **longer)
    assert again.trainer.finished
    assert again.trainer.progress.extended == [{"epochs": 1, "minutes": None}]


@pytest.mark.parametrize(
    ("less", "named"),
    [({"epochs": 2}, "epochs=2 is less than the 3"), ({"minutes": 4.5}, "minutes=4.5 is less than the 5")],
)
def test_a_training_cannot_be_made_shorter(less, named, tmp_path):
    budget = {"epochs": 3, "minutes": 5.0}
    training("medusa", tmp_path, question={"budget": budget}, **budget).trainer.save()
    budget |= less
    with pytest.raises(ConfigError, match=f"{named} of the training in out={tmp_path}; give at least as much"):
        training("medusa", tmp_path, question={"budget": budget}, **budget)


@pytest.mark.parametrize(
    "change",
    [
        ("self._optimizer.state[parameter] =", "_ ="),
        ("torch.tensor(float(self.progress.step)", "torch.tensor(float(0)"),
        ("self.progress = Progress(**facts", "self.progress = Progress(step=3) or dict(**facts"),
        ("parameter.copy_(", "str("),
    ],
)
def test_something_that_is_not_remembered_is_noticed(change, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "_load", mutated(Trainer._load, change))
    with pytest.raises(AssertionError):
        assert same(*stopped_and_gone_on("eagle", tmp_path, epochs=2))


def test_a_state_of_another_question_is_refused_by_name(tmp_path):
    made = training("medusa", tmp_path, question={"data": "x", "share": 1.0, "seed": 0})
    made.trainer.save()
    training("medusa", tmp_path, question={"data": "x", "share": 1.0, "seed": 0})
    with pytest.raises(ConfigError, match="holds a training with other share, more, seed; give another folder"):
        training("medusa", tmp_path, question={"data": "x", "share": 0.5, "more": 1})


def test_a_state_that_was_being_written_is_ignored(tmp_path, monkeypatch):
    scratch = tmp_path / f".{trainer.STATE}"
    scratch.write_bytes(b"half")
    made = training("medusa", tmp_path)
    assert made.trainer.progress.step == 0
    made.learn(2)
    made.trainer.save()
    good = made.weights
    made.learn(4)

    def killed(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "save_file", killed)
        with pytest.raises(KeyboardInterrupt):
            made.trainer.save()
    again = training("medusa", tmp_path)
    assert again.trainer.progress.step == 2
    assert all(torch.equal(weight, good[name]) for name, weight in again.weights.items())


def test_the_rate_rises_and_falls(tmp_path):
    made = training("medusa", tmp_path, None, "recipe.rate=0.002", epochs=10)
    reported = made.learn()
    rates = [found["rate"] for found in reported]
    assert len(rates) == made.trainer.steps
    assert rates == [0.002 * schedule(i / len(rates)) for i in range(len(rates))]
    assert max(rates) == pytest.approx(0.002, rel=0.02)
    assert rates[-1] < 0.05 * max(rates)


def test_schedule():
    shares = np.linspace(0, 1, 201)
    rates = np.array([schedule(share) for share in shares])
    top = int(rates.argmax())
    assert shares[top] == pytest.approx(trainer.SHARE_OF_WARM_UP)
    assert rates[top] == 1
    assert 0 < rates[0] < 0.05
    assert rates[-1] == pytest.approx(0)
    assert (np.diff(rates[: top + 1]) > 0).all()
    assert (np.diff(rates[top:]) < 0).all()


def test_minutes_end_a_training_before_its_epochs(tmp_path, monkeypatch):
    now = iter(range(0, 10**6, 15))
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: float(next(now)))  # a step takes 15 seconds
    made = training("medusa", tmp_path, minutes=1.0, epochs=100)
    rates = [found["rate"] for found in made.learn()]
    assert len(rates) == 4
    assert made.trainer.finished
    assert rates[1:] == [1e-3 * schedule(share) for share in (0.25, 0.5, 0.75)]


def test_a_norm_above_the_limit_is_clipped(tmp_path):
    steps = [training("medusa", tmp_path, clip=clip, epochs=1).learn(1)[0]["gradient"] for clip in (1e9, 1e-9)]
    assert steps[0] == steps[1] > 1e-3  # what is reported is the norm before
    small, large = (training("medusa", tmp_path, clip=clip, epochs=1) for clip in (1e-9, 1e9))
    for made in (small, large):
        made.trainer._optimizer.param_groups[0]["weight_decay"] = 0.0
        made.learn(1)
    moment = lambda made: sum(s["exp_avg"].abs().sum() for s in made.trainer._optimizer.state.values())  # noqa: E731
    assert moment(small) < 1e-6 * moment(large)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": float("nan")}, "epochs=nan"),
        ({"batch_tokens": -5}, "batch_tokens=-5"),
        ({"save_minutes": 0}, "save_minutes=0"),
        ({"validate_minutes": -1}, "validate_minutes=-1"),
        ({"clip": 0.0}, "clip=0.0"),
        ({"minutes": 0}, "minutes=0"),
    ],
)
def test_a_budget_refuses_what_it_cannot_be(wrong, named, tmp_path):
    with pytest.raises(ConfigError, match=named):
        training("medusa", tmp_path, **wrong)


def test_positions_are_drawn_anew_each_time(tmp_path, monkeypatch):
    made = training("dflash", tmp_path, own_words()[:1], "recipe.positions=0.3", epochs=6)
    make, seen = Batches.make, set()

    def heard(self, *given):
        batch = make(self, *given)
        seen.add(tuple(batch.passages.at[0].tolist()))
        return batch

    monkeypatch.setattr(Batches, "make", heard)
    assert len(made.learn()) == 6
    assert len(seen) > 1


# a loss that is no number, and signals


def test_a_loss_that_is_no_number_ends_the_training_and_the_last_good_state_stays(tmp_path, monkeypatch):
    made = training("eagle", tmp_path, epochs=2)
    real, count = objective.loss, []

    def broken(*given):
        count.append(1)
        return real(*given) * (float("nan") if len(count) == 4 else 1)

    monkeypatch.setattr(objective, "loss", broken)
    made.learn(2)
    made.trainer.save()
    with pytest.raises(RunError, match=r"the loss is nan at step 3, on conversations \[.*the last good state is kept"):
        made.learn()
    assert all(torch.isfinite(weight).all() for weight in made.weights.values())
    monkeypatch.setattr(objective, "loss", real)
    again = training("eagle", tmp_path, epochs=2)
    assert again.trainer.progress.step == 2
    again.learn()
    (tmp_path / "once").mkdir()
    once = training("eagle", tmp_path / "once", epochs=2)
    once.learn()
    assert same(once, again)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_an_ask_and_a_second_one_an_order(number):
    before = signal.getsignal(number)
    with stop_on_signal() as asked:
        assert not asked()
        os.kill(os.getpid(), number)
        assert asked()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


# the command


CONFIGURED = ("target=tiny", "dtype=float32", "device=cpu")
STEPS = 4  # of a training


@pytest.fixture(scope="module")
def data_home(tmp_path_factory) -> Path:
    """Data of the tiny target, made by the command."""
    home = tmp_path_factory.mktemp("data")
    with command_line():
        assert make_data(home / "data", write_prompts(home / "prompts.jsonl", TEXTS)) == 0
    return home / "data"


def train(family: str, out: Path, data_home: Path, *arguments: str) -> int:
    """The command, on little; returns the exit code."""
    little = ["epochs=1", "batch_tokens=300", "vocabulary=60", "validate=4"]
    given = [f"drafter={family}", *CONFIGURED, f"data={data_home}", f"out={out}", *little, *arguments]
    return cli.run_command("training", command.run, arguments=given)


@pytest.fixture(scope="module")
def checkpoints(data_home, tmp_path_factory) -> Path:
    """A folder with a finished training of each family."""
    home = tmp_path_factory.mktemp("checkpoints")
    with command_line():
        assert [train(family, home / family, data_home) for family in FAMILIES] == [0] * len(FAMILIES)
    return home


def setting(family: str) -> str:
    """What names the checkpoint of a family."""
    return "drafter.model" if family == "small_lm" else "drafter.checkpoint"


def configured(family: str, *overrides: str) -> Drafter:
    """A drafter as the benchmark's command line asks for it."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return cli.make(compose("config", [f"drafter={family}", *CONFIGURED, *overrides]).drafter)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_makes_a_checkpoint_with_a_card(checkpoints, data_home, family):
    folder = checkpoints / family / "checkpoint"
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "model.safetensors", "card.json", "README.md", "curves.csv",
    }  # fmt: skip
    made, data = card.read(folder), corpus.read(data_home, tiny("llama"))
    assert made["files"] == {name: file_sha256(folder / name) for name in ("config.json", "model.safetensors")}
    assert made["bytes"] == sum((folder / name).stat().st_size for name in made["files"])
    assert card.intact(folder)
    assert made["family"] == family
    assert made["target"] == corpus.identity(tiny("llama"))
    assert made["k"] == configuration(family).k
    assert made["data"]["table_sha256"] == data.sha256
    assert made["settings"]["recipe"]["depth"] == configuration(family).recipe.depth
    assert made["progress"]["step"] == STEPS
    assert made["progress"]["tokens"] > 0
    assert 0 < made["coverage"] < 1
    assert set(made["validation"]) == {"temperature 0", "temperature 1"}
    for found in made["validation"].values():
        assert len(found["acceptance"]) == made["k"]
        assert found["tokens_per_pass"] >= 1
    assert (made["calibration"] is None) == (family != "dspark")
    assert f"drafter={family}" in made["made_by"]["command"]
    words = (folder / "README.md").read_text()
    assert words.startswith(f"# {family} for tiny-llama")
    assert "| temperature 1 |" in words
    assert f"drafter={family}" in words


@pytest.mark.parametrize("family", FAMILIES)
def test_curves_go_up_to_the_last_step(checkpoints, family):
    with (checkpoints / family / "checkpoint" / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert int(rows[-1]["step"]) == STEPS
    assert float(rows[-1]["loss"]) > 0
    assert float(rows[-1]["rate"]) > 0
    assert f"acceptance_{configuration(family).k}" in rows[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_holds_what_was_trained_alone(checkpoints, family, tmp_path):
    folder = checkpoints / family / "checkpoint"
    tensors = load_file(folder / "model.safetensors")
    assert not any("lm_head" in name or "embed_tokens" in name for name in tensors)
    assert not any(name.startswith(("model.layers.0.", "model.layers.1.")) for name in tensors)  # a small LM's frozen
    assert {t.dtype for name, t in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    floats = sum(t.numel() for name, t in tensors.items() if name not in ("d2t", "t2d"))
    assert floats == card.read(folder)["parameters"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_decodes_as_plain_decoding(checkpoints, family, monkeypatch):
    monkeypatch.setattr(cached, "Traced", lambda network, name: network)
    target = tiny("llama")
    untrace(monkeypatch, target)
    drafter = configured(family, f"{setting(family)}={checkpoints / family / 'checkpoint'}")
    requests = [Request(f"p{i}", prompt) for i, prompt in enumerate(prompts(target))]
    replies, steps = run(target, drafter, requests, k=3, stop=StopRule(10))
    assert replies == [plain_greedy(target, request.tokens, 10) for request in requests]
    assert any(any(step.proposed) for step in steps)
    if family != "small_lm":
        assert drafter.warnings() == []
        assert drafter.spec.taps == drafter.taps


def test_checkpoints_run_side_by_side_in_the_benchmark(checkpoints, tmp_path):
    file, families = write_prompts(tmp_path / "prompts.jsonl", TEXTS[:2]), ("medusa", "small_lm")
    arms = [f"+drafter@compare.{family}={family}" for family in families]
    folders = [
        f"compare.{family}.{setting(family).split('.')[1]}={checkpoints / family / 'checkpoint'}" for family in families
    ]
    given = ["drafter=none", "k=3", "max_new_tokens=6", "dataset=jsonl", f"dataset.path={file}", "results_dir=results"]
    assert __main__.main([*CONFIGURED, *given, *arms, *folders]) == 0
    runs = [record.read(folder) for folder in record.find([Path("results")])]
    assert {run["drafter"]["name"]: run["metrics"]["lossless"]["verdict"] for run in runs} == dict.fromkeys(
        ("none", *families), "equal"
    )


def test_confidences_are_calibrated_in_the_checkpoint(checkpoints, monkeypatch):
    folder = checkpoints / "dspark" / "checkpoint"
    found = card.read(folder)["calibration"]
    assert found["error_after"] <= found["error_before"] + 1e-9
    drafter = configured("dspark", f"drafter.checkpoint={folder}")
    drafter.bind(tiny("llama"))
    assert list(drafter.spec.confidence_temperatures) == found["temperatures"]
    confidence = torch.zeros(2, 9)
    expected = [*found["temperatures"], *[found["temperatures"][-1]] * (9 - len(found["temperatures"]))]
    assert drafter._loop._temperatures(confidence).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("family", ["eagle", "small_lm"])
def test_same_command_again_says_that_it_is_there(checkpoints, data_home, family, capsys):
    file = checkpoints / family / "checkpoint" / "model.safetensors"
    before = file.stat().st_mtime_ns
    assert train(family, checkpoints / family, data_home) == 0
    assert f"{checkpoints / family / 'checkpoint'} is there already" in said(capsys)
    assert file.stat().st_mtime_ns == before


@pytest.fixture
def finished(checkpoints, tmp_path) -> Path:
    """A copy of a finished training."""
    shutil.copytree(checkpoints / "medusa", tmp_path / "out" / "medusa")
    return tmp_path / "out" / "medusa"


@pytest.mark.parametrize("harm", ["gone", "damaged", "no card"])
def test_a_checkpoint_that_is_not_whole_is_written_again(finished, data_home, harm, capsys):
    folder = finished / "checkpoint"
    whole = (folder / "model.safetensors").read_bytes()
    if harm == "gone":
        shutil.rmtree(folder)
    elif harm == "damaged":
        (folder / "model.safetensors").write_bytes(whole[:-1] + b"x")
    else:
        (folder / "card.json").unlink()
    assert train("medusa", finished, data_home) == 0
    assert "is there already" not in said(capsys)
    assert (folder / "model.safetensors").read_bytes() == whole
    assert card.intact(folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("recipe.decay=0.5", "recipe"),
        ("batch_tokens=200", "budget"),
        ("share=0.5", "share"),
        ("vocabulary=50", "vocabulary"),
        ("drafter.network.layers=2", "drafter"),
    ],
)
def test_a_training_by_other_settings_is_refused_by_name(finished, data_home, change, named, capsys):
    assert train("medusa", finished, data_home, change) == 2
    assert f"holds a training with other {named}; give another folder" in said(capsys)


def test_a_longer_training_is_written_anew_and_says_what_was_planned_before(finished, data_home, capsys):
    steps = card.read(finished / "checkpoint")["progress"]["step"]
    assert train("medusa", finished, data_home, "epochs=2") == 0
    found = card.read(finished / "checkpoint")
    assert found["progress"]["step"] == 2 * steps
    assert found["progress"]["extended"] == [{"epochs": 1, "minutes": None}]
    assert found["settings"]["budget"]["epochs"] == 2
    assert train("medusa", finished, data_home, "epochs=1") == 2
    assert "epochs=1 is less than the 2 of the training" in said(capsys)
    assert card.read(finished / "checkpoint") == found


def test_another_k_can_be_validated(finished, data_home):
    shutil.rmtree(finished / "checkpoint")
    assert train("medusa", finished, data_home, "k=2") == 0
    assert card.read(finished / "checkpoint")["k"] == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_goes_on_as_if_it_had_not_been(finished, data_home, tmp_path, number, monkeypatch, capsys):
    count: list[int] = []

    def interrupting(share):
        count.append(1)
        if len(count) == 3:
            os.kill(os.getpid(), number)
        return schedule(share)

    out = tmp_path / "stopped" / "medusa"
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "schedule", interrupting)
        assert train("medusa", out, data_home) == 1
    assert "stopped at step 3; the same command goes on from there" in said(capsys)
    assert not (out / "checkpoint").exists()
    assert train("medusa", out, data_home) == 0
    assert f"going on after step 3 of {STEPS}" in said(capsys)
    for name in ("model.safetensors", "config.json"):
        assert (out / "checkpoint" / name).read_bytes() == (finished / "checkpoint" / name).read_bytes()
    found = [card.read(folder / "checkpoint") for folder in (out, finished)]
    assert found[0]["validation"] == found[1]["validation"]


def test_a_loss_that_is_no_number_ends_the_command_and_it_goes_on(finished, data_home, tmp_path, monkeypatch, capsys):
    real, count = objective.loss, []

    def broken(*given):
        count.append(1)
        return real(*given) * (float("nan") if len(count) == 4 else 1)

    out = tmp_path / "nan" / "medusa"
    with monkeypatch.context() as patch:
        patch.setattr(objective, "loss", broken)
        assert train("medusa", out, data_home, "save_minutes=1e-9") == 1
    assert "the loss is nan at step 3" in said(capsys)
    assert train("medusa", out, data_home, "save_minutes=1e-9") == 0
    weights = [(folder / "checkpoint" / "model.safetensors").read_bytes() for folder in (out, finished)]
    assert weights[0] == weights[1]


def test_the_rate_can_be_set_as_the_error_says(data_home, tmp_path):
    assert train("medusa", tmp_path / "out" / "medusa", data_home, "recipe.rate=0.0001") == 0


def test_validation_on_the_way_makes_curves(data_home, tmp_path, capsys):
    out = tmp_path / "out" / "medusa"
    assert train("medusa", out, data_home, "validate_minutes=1e-9") == 0
    assert "medusa, step 1: 1." in said(capsys)
    with (out / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4]
    assert all(float(row["tokens_per_pass"]) >= 1 and float(row["validation_loss"]) > 0 for row in rows)


def test_rows_of_steps_that_are_made_again_are_dropped(tmp_path):
    file, names = tmp_path / "curves.csv", ["step", "loss"]
    curves = card.Curves(file, 0, names, Tracker())
    for step in (1, 2, 3):
        curves.add({"step": step, "loss": 0.1234567 * step, "other": 1.0})
    tracker = Recorder()
    card.Curves(file, 2, names, tracker).add({"step": 3})
    assert file.read_text().split() == ["step,loss", "1,0.123457", "2,0.246913", "3,"]
    assert tracker.rows == [(1, {"loss": 0.123457}), (2, {"loss": 0.246913}), (3, {})]


def test_a_part_of_the_data_can_be_learned_from(data_home, tmp_path):
    assert train("medusa", tmp_path / "out" / "medusa", data_home, "share=0.5") == 0
    whole = len([c for c in corpus.read_table(data_home / corpus.TABLE) if not c.held_out])
    state = card.read(tmp_path / "out" / "medusa" / "checkpoint")
    assert 0 < state["progress"]["tokens"] < 2 * whole * 9 * 0.6


def test_the_whole_vocabulary_can_be_drafted(data_home, tmp_path):
    assert train("eagle", tmp_path / "out" / "eagle", data_home, "vocabulary=null") == 0
    folder = tmp_path / "out" / "eagle" / "checkpoint"
    assert card.read(folder)["coverage"] == 1
    assert not {"d2t", "t2d", "lm_head.weight"} & load_file(folder / "model.safetensors").keys()
    drafter = configured("eagle", f"drafter.checkpoint={folder}")
    drafter.bind(tiny("llama"))
    assert drafter.spec.vocabulary == 259
    assert drafter._loop._model.head.ids is None


def test_streams_that_other_families_read_are_made_along(data_home, tmp_path):
    out = tmp_path / "out" / "medusa"
    assert train("medusa", out, data_home, "also_taps=[0,1]") == 0
    assert {path.name for path in (out.parent / "streams").glob("*.bin")} == {
        "law.bin", "tap-0.bin", "tap-1.bin", "tap-3.bin",
    }  # fmt: skip


def test_streams_that_only_a_deeper_target_has_are_left_out(data_home, tmp_path):
    out = tmp_path / "out" / "medusa"
    assert train("medusa", out, data_home, "also_taps=[0,9]") == 0
    assert {path.name for path in (out.parent / "streams").glob("*.bin")} == {"law.bin", "tap-0.bin", "tap-3.bin"}


def test_streams_that_are_computed_anew_teach_the_same(finished, data_home, tmp_path, capsys):
    out = tmp_path / "anew" / "medusa"
    assert train("medusa", out, data_home, "streams_gb=0") == 0
    assert "computed anew for every batch" in said(capsys)
    one, other = (load_file(folder / "checkpoint" / "model.safetensors") for folder in (out, finished))
    for name in one:
        torch.testing.assert_close(one[name].float(), other[name].float(), atol=2e-3, rtol=2e-2)


def test_half_precision_trains(tmp_path):
    target = cli.make(configuration("dspark", "dtype=bfloat16", "device=cpu").target)  # the one that the command loads
    conversations = [replace(c, held_out=i > 5) for i, c in enumerate(own_words())]
    (tmp_path / "data").mkdir()
    corpus.write(tmp_path / "data", conversations, target, {"source": "made up"})
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        assert train("dspark", tmp_path / "out" / "dspark", tmp_path / "data", "dtype=bfloat16") == 0
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    found = card.read(tmp_path / "out" / "dspark" / "checkpoint")
    assert found["settings"]["precision"] == "bf16"
    assert 0 < found["validation"]["temperature 0"]["loss"] < 100


class Recorder(Tracker):
    """Keeps what the trainings of a test told it."""

    made: ClassVar[list["Recorder"]] = []

    def __init__(self):
        self.pages, self.rows, self.endings = [], [], []
        self.made.append(self)

    def begin(self, page):
        self.pages.append(page)

    def log(self, row, step=None):
        self.rows.append((step, row))

    def end(self, ending):
        self.endings.append(ending)


class Breaks(Tracker):
    def begin(self, page):
        raise OSError("no network")


def test_curves_go_to_a_tracker_that_is_asked_for(data_home, tmp_path, monkeypatch):
    monkeypatch.setattr(Recorder, "made", [])
    out = tmp_path / "out" / "medusa"
    asked = ["tracker._target_=test_training.Recorder", "validate_minutes=1e-9"]
    assert train("medusa", out, data_home, *asked) == 0
    assert train("medusa", out, data_home, *asked) == 0  # it is there already
    first, second = Recorder.made
    assert [step for step, _ in first.rows] == [1, 2, 3, 4]
    assert all("loss" in row and "acceptance_1" in row for _, row in first.rows)
    (page,), (ending,) = first.pages, first.endings
    assert (page.job, page.group, page.config["family"]) == ("training", "medusa", "medusa")
    assert [artifact.folder for artifact in ending.artifacts] == [out / "checkpoint"]
    validation = ending.tables["validation"]
    found = card.read(out / "checkpoint")["validation"]["temperature 0"]
    told = dict(zip(validation.columns, validation.rows[0], strict=True))
    assert (told["tokens_per_pass"], told["acceptance_1"]) == (found["tokens_per_pass"], found["acceptance"][0])
    assert (second.pages, second.rows, second.endings) == ([], [], [])


def test_a_tracker_that_fails_stops_nothing(data_home, tmp_path, capsys):
    breaks = "tracker._target_=test_training.Breaks"
    assert train("medusa", tmp_path / "out" / "medusa", data_home, breaks) == 0
    assert "no longer tracked: no network" in said(capsys)


@pytest.mark.parametrize(
    ("family", "wrong", "named"),
    [
        ("eagle", "share=0", "share=0 "),
        ("eagle", "share=1.5", "share=1.5"),
        ("eagle", "k=0", "k=0"),
        ("eagle", "k=2.5", "k=2.5"),
        ("eagle", "epochs=0", "epochs=0"),
        ("eagle", "minutes=0", "minutes=0"),
        ("eagle", "clip=-1", "clip=-1"),
        ("eagle", "recipe.depth=0", "recipe.depth=0"),
        ("eagle", "recipe.soft=-1", "recipe.soft=-1"),
        ("eagle", "recipe.soft=0", "hard, soft and distance are all 0"),
        ("eagle", "data=nowhere", "data=nowhere holds no finished training data; make some with python -m"),
        ("eagle", "target.seed=1", "with other weights than those of tiny-llama"),
        ("eagle", "drafter.network.layers=0", "layers=0"),
        ("eagle", "target=tinny", "target=tinny is unknown"),
        ("eagle", "recipe=eagel", "recipe=eagel is unknown"),
        ("ngram", "recipe=eagle", "drafter=ngram has nothing to train; use small_lm, eagle, mtp"),
        ("small_lm", "drafter.network.frozen=9", "drafter.network.frozen=9"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(data_home, tmp_path, family, wrong, named, capsys):
    assert train(family, tmp_path / "out" / family, data_home, wrong) == 2
    assert named in said(capsys)
    assert not (tmp_path / "out" / family / trainer.STATE).exists()


def test_a_drafter_without_a_recipe_is_refused(data_home, tmp_path, capsys):
    assert train("ngram", tmp_path / "out", data_home) == 2
    assert "ngram is unknown" in said(capsys)


@pytest.mark.parametrize(("family", "wrong"), [("medusa", "k=5"), ("medusa", "recipe.depth=5"), ("dflash", "k=8")])
def test_more_drafts_than_a_network_makes_are_refused_before_training(data_home, tmp_path, family, wrong):
    assert train(family, tmp_path / "out" / family, data_home, wrong) == 2


# the target's streams


@pytest.fixture
def corpus_of(tmp_path):
    """A corpus on disk, of some conversations."""

    def make(conversations: Sequence[Conversation], target: CausalLM, name: str = "data") -> Corpus:
        (tmp_path / name).mkdir()
        return corpus.write(tmp_path / name, conversations, target, {})

    return make


PLENTY = 1 << 40
TAPS = (1, 3)


def keep(target, data, folder, taps=TAPS, also=(), budget=PLENTY, say=lambda done, of: None):
    return streams.keep(target, data, taps, also, folder, budget, say)


@pytest.fixture
def forwards(monkeypatch):
    """Conversations that the target was run on."""
    counted: list[int] = []
    run_target = streams.run_target

    def counting(target, members, taps):
        counted.append(len(members))
        return run_target(target, members, taps)

    monkeypatch.setattr(streams, "run_target", counting)
    monkeypatch.setattr(streams, "BATCH_TOKENS", 60)
    return counted


def test_what_is_stored_is_what_would_be_computed(corpus_of, tmp_path, forwards):
    target, conversations = tiny("llama"), own_words()
    stored = keep(target, corpus_of(conversations, target), tmp_path / "streams")
    anew = streams.Recomputed(target, conversations, TAPS)
    batches = streams.by_length(conversations, 60)
    assert len(batches) > 2
    for numbers in batches:
        one, other = stored.of(numbers), anew.of(numbers)
        for row, i in enumerate(numbers):
            size = len(conversations[i].tokens)
            assert torch.equal(one.taps[row, :size], other.taps[row, :size])
            assert not one.taps[row, size:].any()
        assert torch.equal(one.total, other.total)
        assert torch.equal(one.best, other.best)


def test_streams_do_not_depend_on_the_company(corpus_of, tmp_path):
    target, conversations = tiny("llama"), own_words()
    stored = keep(target, corpus_of(conversations, target), tmp_path / "streams")
    for i, c in enumerate(conversations):
        alone = streams.Recomputed(target, conversations, TAPS).of([i])
        torch.testing.assert_close(stored.of([i]).taps, alone.taps, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(stored.of([i]).total, alone.total, atol=1e-4, rtol=1e-4)
        assert torch.equal(stored.of([i]).best, alone.best)
        reply = slice(len(c.prompt) - 1, None)
        logits = target.forward(torch.tensor([c.tokens]), target.new_cache(1, len(c.tokens))).logits[:, reply].float()
        torch.testing.assert_close(alone.total[:, reply], logits.logsumexp(-1), atol=1e-4, rtol=1e-4)
        assert torch.equal(alone.best[:, reply], logits.argmax(-1))
        assert not alone.total[:, : len(c.prompt) - 1].any()


def test_streams_are_computed_once(corpus_of, tmp_path, forwards):
    target, conversations = tiny("llama"), own_words()
    data = corpus_of(conversations, target)
    keep(target, data, tmp_path / "streams", also=(0, 2))
    assert sum(forwards) == len(conversations)
    for taps in (TAPS, (0, 3), (2, 1, 3), (3,)):
        stored = keep(target, data, tmp_path / "streams", taps)
        assert isinstance(stored, streams.Stored)
        torch.testing.assert_close(
            stored.of([2]).taps, streams.Recomputed(target, conversations, taps).of([2]).taps, atol=1e-4, rtol=1e-4
        )
    assert sum(forwards) == len(conversations) + 4  # those that were asked for to compare with


def test_a_tap_that_is_wanted_later_is_added(corpus_of, tmp_path, forwards):
    target, conversations = tiny("llama"), own_words()
    data = corpus_of(conversations, target)
    first = keep(target, data, tmp_path / "streams", (1, 3)).of([0, 5])
    second = keep(target, data, tmp_path / "streams", (2, 3))
    assert sum(forwards) == 2 * len(conversations)
    again = keep(target, data, tmp_path / "streams", (1, 3)).of([0, 5])
    assert torch.equal(first.taps, again.taps)
    assert torch.equal(second.of([0, 5]).taps[:, :, 1], again.taps[:, :, 1])


def test_an_interrupted_computation_goes_on_where_it_was(corpus_of, tmp_path, forwards):
    target, conversations = tiny("llama"), own_words()
    data = corpus_of(conversations, target)
    whole = keep(target, data, tmp_path / "whole")
    total = len(forwards)

    def interrupt(done, of):
        assert of == total
        if done == 3:
            raise KeyboardInterrupt

    forwards.clear()
    with pytest.raises(KeyboardInterrupt):
        keep(target, data, tmp_path / "streams", say=interrupt)
    assert len(forwards) == 3
    heard: list[int] = []
    stored = keep(target, data, tmp_path / "streams", say=lambda done, of: heard.append(done))
    assert len(forwards) == total
    assert heard == list(range(4, total + 1))
    everything = range(len(conversations))
    assert torch.equal(stored.of(everything).taps, whole.of(everything).taps)
    assert torch.equal(stored.of(everything).total, whole.of(everything).total)


def test_who_computes_at_the_same_time_shares_the_work(corpus_of, tmp_path, forwards):
    target, conversations = tiny("llama"), own_words()
    data = corpus_of(conversations, target)
    others: list[Any] = []

    def meanwhile(done, of):
        if done == 2 and not others:
            others.append(None)
            others.append(keep(target, data, tmp_path / "streams"))

    stored = keep(target, data, tmp_path / "streams", say=meanwhile)
    assert sum(forwards) == len(conversations)
    whole = keep(target, data, tmp_path / "whole")
    everything = range(len(conversations))
    for source in (stored, others[1]):
        assert torch.equal(source.of(everything).taps, whole.of(everything).taps)
    assert sorted(path.suffix for path in (tmp_path / "streams").iterdir() if path.name != ".lock") == [
        ".bin", ".bin", ".bin", ".json",
    ]  # fmt: skip


def test_an_interrupted_computation_of_other_taps_begins_anew(corpus_of, tmp_path, forwards):
    target, conversations = tiny("llama"), own_words()
    data = corpus_of(conversations, target)

    def interrupt(done, of):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keep(target, data, tmp_path / "streams", say=interrupt)
    forwards.clear()
    stored = keep(target, data, tmp_path / "streams", (2, 3))
    assert sum(forwards) == len(conversations)
    numbers = streams.by_length(conversations, 60)[0]
    anew = streams.Recomputed(target, conversations, (2, 3)).of(numbers)
    for row, i in enumerate(numbers):
        size = len(conversations[i].tokens)
        assert torch.equal(stored.of(numbers).taps[row, :size], anew.taps[row, :size])


def size_of(conversations: Sequence[Conversation], target: CausalLM, taps: int = 2) -> int:
    return sum(len(c.tokens) for c in conversations) * (taps * 4 * target.width + 8)


@pytest.mark.parametrize("lacking", ["budget", "disk"])
def test_where_there_is_no_room_streams_are_computed_anew(corpus_of, tmp_path, lacking, monkeypatch, caplog):
    target, conversations = tiny("llama"), own_words()
    data, size = corpus_of(conversations, target), size_of(conversations, target)
    enough, little = size, size - 1
    usage = shutil.disk_usage(tmp_path)._replace(free=little + streams.SPARE_BYTES)
    if lacking == "disk":
        monkeypatch.setattr(streams.shutil, "disk_usage", lambda folder: usage)
    with caplog.at_level(logging.INFO, "specbench"):
        source = keep(target, data, tmp_path / "streams", budget=PLENTY if lacking == "disk" else little)
    assert isinstance(source, streams.Recomputed)
    assert "computed anew for every batch" in caplog.text
    assert ("is free" if lacking == "disk" else "streams_gb=") in caplog.text
    assert not list((tmp_path / "streams").glob("*.bin"))
    torch.testing.assert_close(source.of([1]).taps, streams.run_target(target, [conversations[1]], TAPS).taps)
    if lacking == "budget":
        assert isinstance(keep(target, data, tmp_path / "streams", budget=enough), streams.Stored)


def test_what_is_held_already_counts_for_the_budget(corpus_of, tmp_path):
    target, conversations = tiny("llama"), own_words()
    data = corpus_of(conversations, target)
    size = size_of(conversations, target)
    keep(target, data, tmp_path / "streams", budget=size)
    assert isinstance(keep(target, data, tmp_path / "streams", budget=0), streams.Stored)  # there is nothing to add
    assert isinstance(keep(target, data, tmp_path / "streams", (2, 3), budget=size), streams.Recomputed)


def test_an_interrupted_computation_goes_on_where_the_budget_holds_it_once(corpus_of, tmp_path):
    target, conversations = tiny("llama"), own_words()
    data, size = corpus_of(conversations, target), size_of(conversations, target)

    def interrupt(done, of):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keep(target, data, tmp_path / "streams", budget=size, say=interrupt)
    assert isinstance(keep(target, data, tmp_path / "streams", budget=size), streams.Stored)


@pytest.mark.parametrize("harm", ["gone", "cut short"])
def test_a_file_that_is_not_whole_is_computed_again(corpus_of, tmp_path, harm):
    target, conversations = tiny("llama"), own_words()
    data = corpus_of(conversations, target)
    before = keep(target, data, tmp_path / "streams").of([7])
    file = tmp_path / "streams" / "tap-1.bin"
    if harm == "gone":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2)
    assert torch.equal(keep(target, data, tmp_path / "streams").of([7]).taps, before.taps)


@pytest.mark.parametrize("other", ["data", "target"])
def test_streams_of_something_else_are_not_mixed(corpus_of, tmp_path, other, forwards):
    target, conversations = tiny("llama"), own_words()
    data = corpus_of(conversations, target)
    keep(target, data, tmp_path / "streams", also=(2,))
    if other == "data":
        conversations = conversations[1:]
        data = corpus_of(conversations, target, "other")
    else:
        target = tiny("llama", seed=1)
    forwards.clear()
    stored = keep(target, data, tmp_path / "streams")
    assert sum(forwards) == len(conversations)
    assert not (tmp_path / "streams" / "tap-2.bin").exists()
    anew = streams.Recomputed(target, conversations, TAPS)
    for i in range(len(conversations)):
        torch.testing.assert_close(stored.of([i]).taps, anew.of([i]).taps, atol=1e-4, rtol=1e-4)


def test_logits_that_are_no_numbers_fail_loudly(corpus_of, tmp_path, monkeypatch):
    target = load_tiny()
    monkeypatch.setattr(target, "head", lambda hidden: torch.full((len(hidden), 259), float("nan")))
    with pytest.raises(RunError, match="NaN or infinite on the training data"):
        keep(target, corpus_of(own_words(), target), tmp_path / "streams")


def test_batches_are_cut_at_so_many_tokens_padding_included():
    conversations = [Conversation(str(i), "x", 0.0, [1], [1] * (n - 1)) for i, n in enumerate((3, 9, 4, 20, 4))]
    assert streams.pack([0, 1, 2, 3, 4], conversations, 12) == [[0], [1], [2], [3], [4]]
    assert streams.pack([0, 2, 4, 1, 3], conversations, 12) == [[0, 2, 4], [1], [3]]
    assert streams.by_length(conversations, 12) == [[0, 2, 4], [1], [3]]


# walks and tallies


HAND_MADE = [
    # right, rounds
    ([[1, 1], [1, 1], [1, 1], [1, 1], [1, 1], [1, 1]], [(2, 2), (2, 2)]),
    ([[1, 1], [1, 1], [1, 1], [1, 1], [1, 1]], [(2, 2), (2, 2)]),  # what ends the text is a draft
    ([[1, 1], [1, 1], [1, 1], [1, 1]], [(2, 2), (1, 1)]),
    ([[0, 1], [0, 1], [0, 0]], [(2, 0), (2, 0), (1, 0)]),
    ([[1, 0], [0, 0], [0, 1], [0, 0]], [(2, 1), (2, 0), (1, 0)]),
    ([[1, 0], [0, 0], [1, 1]], [(2, 1), (1, 1)]),
    ([[1, 1]], [(1, 1)]),
    ([[0, 0]], [(1, 0)]),
    ([[1, 0], [0, 0]], [(2, 1)]),
    ([[0, 1], [1, 0]], [(2, 0), (1, 1)]),
    ([[1], [1], [1]], [(1, 1), (1, 1)]),
]


@pytest.mark.parametrize(("hits", "rounds"), HAND_MADE)
def test_a_walk_by_hand(hits, rounds):
    assert list(walk(np.array(hits, dtype=bool))) == rounds


def test_no_text_is_no_round():
    assert list(walk(np.zeros((0, 3), dtype=bool))) == []


def test_a_tally_by_hand():
    tally = Tally(2)
    for hits, _ in HAND_MADE[3:5]:  # (2, 0) (2, 0) (1, 0); (2, 1) (2, 0) (1, 0)
        tally.add(np.array(hits, dtype=bool))
    assert tally.rounds == 6
    assert tally.committed == 7
    assert tally.tokens_per_pass == pytest.approx(7 / 6)
    assert tally.acceptance == pytest.approx([1 / 6, 0 / 4])
    tally.add(np.array(HAND_MADE[0][0], dtype=bool))
    assert tally.acceptance == pytest.approx([3 / 8, 2 / 6])
    assert tally.tokens_per_pass == pytest.approx(13 / 8)


def test_an_empty_tally_is_nothing():
    assert Tally(3).acceptance == [0, 0, 0]
    assert Tally(3).tokens_per_pass == 0


def test_coverage_is_of_the_tokens_to_be_guessed(uneven):
    batch = uneven.batches.make([0, 1, 2, 3], 1.0, "x")
    # 200 12 13 14, 21, nothing, 98 97 96 95 94 93
    assert covered([batch], torch.tensor([10, 12, 14, 20, 93, 98, 99])) == pytest.approx(4 / 11)
    assert covered([batch, batch], None) == 1
    assert covered([], None) == 0


def test_validating_changes_nothing(uneven):
    before = uneven.weights
    first = uneven.trainer.validate([0, 1, 3], 3)
    assert uneven.trainer.validate([0, 1, 3], 3) == first
    assert uneven.trainer._learner.training
    assert all(torch.equal(weight, before[name]) for name, weight in uneven.weights.items())
    assert first.tokens_per_pass >= 1


# calibration


def confidences(scale: float, positions: int = 6000, depth: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Logits whose truth is sigmoid(c / scale), and whether each draft was accepted."""
    draw = np.random.default_rng(1)
    logits = draw.normal(1.0, 2.5, (positions, depth))
    return logits, 1 / (1 + np.exp(-logits / scale))


def test_confidences_that_say_too_much_are_cooled():
    temperatures, before, after = calibrated(*confidences(2.0))
    assert temperatures == pytest.approx([2.0] * 3, rel=0.08)
    assert after < 0.2 * before
    assert before > 0.05


def test_confidences_that_say_too_little_are_heated():
    temperatures, before, after = calibrated(*confidences(0.5))
    assert temperatures == pytest.approx([0.5] * 3, rel=0.08)
    assert after < 0.2 * before


def test_confidences_that_are_right_stay():
    temperatures, before, after = calibrated(*confidences(1.0))
    assert temperatures == pytest.approx([1.0] * 3, rel=0.06)
    assert after <= before < 0.01


def test_outcomes_calibrate_as_chances_do():
    logits, chance = confidences(2.0, 20000, 2)
    outcomes = (np.random.default_rng(2).random(chance.shape) < chance).astype(float)
    temperatures, before, after = calibrated(logits, outcomes)
    assert temperatures == pytest.approx([2.0] * 2, rel=0.25)
    assert after < 0.5 * before


def test_calibration_error_by_hand():
    said_, found = np.linspace(0, 1, 30), np.linspace(0, 1, 30)
    assert calibration_error(said_, found) == 0
    assert calibration_error(said_, found + 0.25) == pytest.approx(0.25)
    assert calibration_error(np.array([0.5, 0.5]), np.array([1.0, 0.0])) == pytest.approx(0.5)


def test_a_trained_confidence_knows_more_than_nothing(home):
    (home / "dspark").mkdir(exist_ok=True)
    made = trained("dspark", home / "dspark").made
    temperatures, before, after = made.trainer.calibrate(range(len(made.conversations)))
    assert len(temperatures) == made.trainer._learner.goal.depth
    assert after <= before


def test_what_has_no_confidences_is_not_calibrated(uneven):
    assert uneven.trainer.calibrate([0, 1]) is None


def test_a_confidence_that_was_not_trained_is_not_calibrated(tmp_path):
    assert training("dspark", tmp_path, None, "recipe.confidence=0").trainer.calibrate([0, 1]) is None


# a small LM of the target's blocks


def written_small_lm(target: CausalLM, folder: Path, **options: Any) -> distilled.SmallModel:
    """A new one, not trained, as a checkpoint."""
    drafter = SmallLM(network=Options(**options))
    model = drafter.build(target)
    common.without_target_rows(drafter.write(model, target), target).save(folder)
    return model


@pytest.mark.parametrize(("kind", "why"), [("gemma3", "scales its embeddings"), ("gpt_neox", "blocks like Llama's")])
def test_targets_that_no_small_lm_is_made_of_are_refused(kind, why):
    with pytest.raises(ConfigError, match=why):
        SmallLM(network=Options(blocks=[0, 1, 2])).build(tiny(kind))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_small_lm_of_all_blocks_drafts_what_the_target_says(kind, tmp_path):
    target = tiny(kind)
    model = written_small_lm(target, tmp_path / "small", blocks=[0, 1, 2], frozen=2)
    assert len(list(model.network)) == 2  # a block and the final norm
    drafter = SmallLM(model=str(tmp_path / "small"))
    requests = [Request(f"p{i}", prompt) for i, prompt in enumerate(prompts(target))]
    replies, steps = run(target, drafter, requests, k=3, stop=StopRule(13))
    assert replies == [plain_greedy(target, request.tokens, 13) for request in requests]
    assert all(step.accepted == step.proposed for step in steps[1:])
    assert len(steps) == 4  # the prefill and three rounds of four tokens


def test_a_small_lm_holds_its_trained_blocks_alone(tmp_path):
    target = tiny("llama")
    written_small_lm(target, tmp_path / "small", blocks=[0, 2, 1], frozen=1, vocabulary=99)
    tensors = load_file(tmp_path / "small" / "model.safetensors")
    assert {name.split(".")[2] for name in tensors if name.startswith("model.layers.")} == {"1", "2"}
    assert not any("lm_head" in name or "embed" in name for name in tensors)
    weight = tensors["model.layers.1.self_attn.o_proj.weight"]
    assert torch.equal(weight, load_tiny(engine="plain").model.model.layers[2].self_attn.o_proj.weight)
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert (config["num_hidden_layers"], config[distilled.FROZEN], config[distilled.KEPT]) == (3, [0], 259)
    assert distilled.is_one(tmp_path / "small")
    assert not distilled.is_one(tmp_path)


@pytest.mark.parametrize(("blocks", "expected"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (6, [0, 1, 4, 5])])
def test_blocks_are_the_first_and_last_two_unless_given(blocks, expected):
    target = types.SimpleNamespace(blocks=range(blocks), name="x")
    assert Options(frozen=0).chosen(target) == expected
    assert Options(blocks=[0], frozen=0).chosen(target) == [0]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"blocks": [0, 7]}, r"drafter\.network\.blocks=\[0, 7\]: tiny-llama has blocks 0 to 2"),
        ({"blocks": [-1]}, r"blocks=\[-1\]"),
        ({"blocks": []}, r"blocks=\[\]"),
        ({"frozen": 3}, r"frozen=3 is not in 0\.\.2"),
        ({"frozen": -1}, "frozen=-1"),
        ({"vocabulary": 0}, "vocabulary=0"),
        ({"vocabulary": 300}, "vocabulary=300"),
        ({"blocks": "all"}, "blocks=all is not a list"),
        ({"frozen": 1.5}, "frozen=1.5 is not a whole number"),
    ],
)
def test_impossible_small_lms_are_refused(wrong, named, llama):
    with pytest.raises(ConfigError, match=named):
        SmallLM(network=Options(**wrong)).build(llama)


def tampered(folder: Path, tensors: Any = None, **config: Any) -> None:
    if tensors is not None:
        file = folder / "model.safetensors"
        save_file(tensors(load_file(file)), file)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        ({"tensors": lambda t: {n: v for n, v in t.items() if n != NORM}}, NORM),
        ({"tensors": lambda t: {**t, "model.layers.7.x": t[NORM].clone()}}, r"model\.layers\.7\.x"),
        ({"tensors": lambda t: {**t, NORM: t[NORM][:5].clone()}}, NORM),
        ({"tensors": lambda t: {**t, "t2d": t["t2d"][:9].clone()}}, "vocabulary of 9 tokens, and tiny-llama has 259"),
        ({"tensors": lambda t: {**t, "d2t": t["d2t"] + 9999}}, "names tokens that tiny-llama does not have"),
        ({"tensors": lambda t: {NORM: t[NORM]}, common.TARGET_ROWS: False}, "no output head"),
        ({"hidden_size": 96}, "hidden_size=96, and tiny-llama is 48 wide"),
        ({distilled.FROZEN: [9]}, r"takes blocks \[9\] of its target, and tiny-llama has not as many"),
        ({distilled.FROZEN: []}, r"does not fit its own configuration: model\.layers\.0"),
    ],
)
def test_a_small_lm_that_does_not_fit_is_refused_by_name(harm, named, tmp_path, llama):
    written_small_lm(llama, tmp_path / "small", blocks=[0, 1], frozen=1, vocabulary=99)
    tampered(tmp_path / "small", **harm)
    with pytest.raises(ConfigError, match=named) as raised:
        SmallLM(model=str(tmp_path / "small")).bind(llama)
    assert str(tmp_path / "small") in str(raised.value)


def test_a_small_lm_of_a_deeper_target_is_refused(tmp_path):
    written_small_lm(tiny("llama"), tmp_path / "small", blocks=[2, 1], frozen=1)
    with pytest.raises(ConfigError, match=r"takes blocks \[2\] of its target, and tiny-llama has not as many"):
        SmallLM(model=str(tmp_path / "small")).bind(load_tiny(layers=2))


def test_a_small_lm_of_another_kind_of_target_is_refused(tmp_path):
    written_small_lm(tiny("qwen3"), tmp_path / "small", blocks=[0, 1], frozen=1)
    with pytest.raises(ConfigError, match="small"):
        SmallLM(model=str(tmp_path / "small")).bind(tiny("llama"))


def test_a_small_lm_without_a_model_says_how_to_get_one(llama):
    with pytest.raises(ConfigError, match=r"drafter\.model=FOLDER_OR_HUB_ID, or train one: python"):
        SmallLM().bind(llama)


# drafters that come with the project


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_that_does_not_come_with_the_target_says_how_to_train_it(family, llama):
    with pytest.raises(ConfigError, match=f"no {family} comes with specbench for tiny-llama") as raised:
        shipped.find(family, llama, setting(family))
    assert f"python -m drafters.training drafter={family} target=…" in str(raised.value)
    assert f"{setting(family)}=FOLDER" in str(raised.value)


@pytest.mark.parametrize("family", ["eagle", "small_lm"])
def test_the_benchmark_says_how_to_train_what_does_not_come_with_the_target(family, tmp_path, capsys):
    file = write_prompts(tmp_path / "prompts.jsonl", TEXTS[:1])
    given = [f"drafter={family}", "k=2", "dataset=jsonl", f"dataset.path={file}", "results_dir=results"]
    assert __main__.main([*CONFIGURED, *given]) == 2
    assert f"python -m drafters.training drafter={family} target=…" in said(capsys)
    assert not Path("results").exists()


@pytest.fixture
def shelf(checkpoints, data_home, tmp_path, monkeypatch) -> Path:
    """A set that comes with the tiny target."""
    shelf = tmp_path / "pretrained"
    for name, files in (("a-other", {"weights": "0"}), ("b-tiny", dict(tiny("llama").files))):
        (shelf / name).mkdir(parents=True)
        (shelf / name / shipped.TARGET).write_text(json.dumps({"name": "whatever", "files": files}))
    for family in ("eagle", "small_lm"):
        shutil.copytree(checkpoints / family / "checkpoint", shelf / "b-tiny" / family)
    monkeypatch.setattr(shipped, "HOME", shelf)
    return shelf


@pytest.fixture
def ship() -> Any:
    """The script."""
    spec = importlib.util.spec_from_file_location("ship", PROJECT / "scripts" / "ship.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_shipped_says_nothing_of_its_machine(ship, checkpoints, data_home, tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "HOME", tmp_path / "pretrained")
    monkeypatch.setattr(sys, "argv", ["ship.py", str(checkpoints), "--data", str(data_home), "--set", "tiny"])
    ship.main()
    home = tmp_path / "pretrained" / "tiny"
    assert {path.name for path in home.iterdir()} == {*FAMILIES, "data", shipped.TARGET}
    for family in FAMILIES:
        assert card.intact(home / family)
        assert card.read(home / family)["validation"] == card.read(checkpoints / family / "checkpoint")["validation"]
    for path in home.rglob("*"):
        if path.suffix in (".json", ".md", ".csv"):
            assert str(checkpoints) not in path.read_text()
            assert str(data_home) not in path.read_text()


def test_a_folder_of_the_target_gives_way_to_its_name(ship, checkpoints, tmp_path):
    folder = tmp_path / "eagle"
    shutil.copytree(checkpoints / "eagle" / "checkpoint", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "deep": {"name_or_path": "/home/someone/model"}}))
    made = card.read(folder)
    made["made_by"]["command"] = ["python", "-m", "drafters.training", "out=/home/someone/out", "drafter=eagle"]
    (folder / card.CARD).write_text(json.dumps(made))
    ship.without_places(folder)
    assert card.read(folder)["made_by"]["command"] == ["python", "-m", "drafters.training", "drafter=eagle"]
    assert "someone" not in (folder / "README.md").read_text()
    assert json.loads((folder / "config.json").read_text()) == {**config, "deep": {"name_or_path": "tiny-llama"}}
    assert card.intact(folder)


@pytest.mark.parametrize("family", ["eagle", "small_lm"])
def test_what_comes_with_a_target_is_found_by_its_files(shelf, family):
    target = load_tiny()
    target.name = "by-another-name"
    drafter = configured(family)
    drafter.bind(target)
    files = drafter.describe()["files"]
    assert files["model.safetensors"] == file_sha256(shelf / "b-tiny" / family / "model.safetensors")
    assert drafter.warnings() == []


def test_what_comes_with_another_target_is_not_taken(shelf):
    assert shipped.home(tiny("qwen3")) is None
    assert shipped.home(tiny("llama")) == shelf / "b-tiny"
    with pytest.raises(ConfigError, match="no eagle comes with specbench for tiny-qwen3"):
        configured("eagle").bind(tiny("qwen3"))
    with pytest.raises(ConfigError, match="no mtp comes with specbench for tiny-llama"):
        configured("mtp").bind(tiny("llama"))


def test_data_that_come_with_a_target_are_used(shelf, data_home, tmp_path):
    shutil.copytree(data_home, shelf / "b-tiny" / "data")
    assert command._data(None, tiny("llama")) == shelf / "b-tiny" / "data"
    assert command._data("mine", tiny("llama")) == Path("mine")
    assert command._data(None, tiny("qwen3")) == Path("results/training/tiny-qwen3/data")


def test_a_new_network_is_still_to_be_had(llama):
    drafter = configured("eagle", "drafter.checkpoint=null", "drafter.network.layers=2")
    drafter.bind(llama)
    assert "not trained" in drafter.warnings()[0]
    with pytest.raises(ConfigError, match=r"drafter\.checkpoint=shipped brings its own"):
        configured("eagle", "drafter.network.layers=2")


# heads that are the target's


def written_eagle(target: CausalLM, vocabulary: int | None, change: float = 0.0) -> Any:
    """A new head with rows of the target's; ``change``: of one of its weights."""
    drafter = Eagle(network=eagle.Options(vocabulary=vocabulary))
    model = drafter.build(target)
    if vocabulary is not None:
        ids = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(1))[:vocabulary].sort().values
        model.head.ids = ids
        model.head.lm_head.weight.data.copy_(initial.output_rows(target)[ids])
        model.head.lm_head.weight.data[3, 3] += change
    return drafter, model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [100, 259])
def test_rows_of_the_target_are_left_out_and_found_again(vocabulary, dtype, tmp_path, llama):
    drafter, model = written_eagle(llama, vocabulary)
    exact = model.head.lm_head.weight.clone()
    model.to(dtype)
    written = common.without_target_rows(drafter.write(model, llama), llama)
    assert "lm_head.weight" not in written.tensors
    written.save(tmp_path / "head")
    read = Eagle(checkpoint=str(tmp_path / "head"))
    found = read.build(llama)
    assert torch.equal(found.head.lm_head.weight, exact)  # not rounded: they are the target's own
    if vocabulary < 259:
        assert torch.equal(found.head.ids, model.head.ids)


def test_a_head_that_was_changed_is_kept(tmp_path, llama):
    drafter, model = written_eagle(llama, 100, change=0.5)
    written = common.without_target_rows(drafter.write(model, llama), llama)
    assert common.TARGET_ROWS not in written.config
    written.save(tmp_path / "head")
    found = Eagle(checkpoint=str(tmp_path / "head")).build(llama)
    assert torch.equal(found.head.lm_head.weight, model.head.lm_head.weight)


def test_a_checkpoint_without_a_head_stays_as_it_is(llama):
    drafter, model = written_eagle(llama, None)
    written = drafter.write(model, llama)
    assert common.without_target_rows(written, llama) is written


def test_rows_that_the_target_does_not_have_are_refused(tmp_path, llama):
    drafter, model = written_eagle(llama, 100)
    common.without_target_rows(drafter.write(model, llama), llama).save(tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "d2t": tensors["d2t"] + 500}, file)
    with pytest.raises(ConfigError, match="d2t names tokens that tiny-llama does not have"):
        Eagle(checkpoint=str(tmp_path / "head")).build(llama)


# the report


def test_the_report_says_what_training_came_to_and_what_more_of_it_brings(
    checkpoints, data_home, tmp_path, monkeypatch
):
    spec = importlib.util.spec_from_file_location("report", PROJECT / "scripts" / "training_report.py")
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    file = write_prompts(tmp_path / "prompts.jsonl", TEXTS)
    given = ["dataset=jsonl", f"dataset.path={file}", "max_new_tokens=8", "profile=0", f"results_dir={tmp_path}/runs"]
    asked = [
        "drafter=medusa",
        f"k={card.read(checkpoints / 'medusa' / 'checkpoint')['k']}",
        f"drafter.checkpoint={checkpoints / 'medusa' / 'checkpoint'}",
    ]
    assert __main__.main([*CONFIGURED, *asked, *given]) == 0
    cards = tmp_path / "cards"
    shutil.copytree(checkpoints / "medusa" / "checkpoint", cards / "medusa")
    shutil.copytree(cards / "medusa", tmp_path / "longer")
    longer = card.read(tmp_path / "longer")
    longer["progress"]["tokens"] *= 10
    longer["validation"]["temperature 0"]["tokens_per_pass"] = 3.21
    (tmp_path / "longer" / card.CARD).write_text(json.dumps(longer))
    sizes = ["--sizes", str(tmp_path / "longer"), str(cards / "medusa")]
    monkeypatch.setattr(
        sys, "argv", ["report", f"{tmp_path}/runs", "--cards", str(cards), "--out", f"{tmp_path}/out", *sizes]
    )
    report.main()
    found = card.read(cards / "medusa")
    line = next(line for line in (tmp_path / "out/table.md").read_text().splitlines() if line.startswith("| medusa |"))
    assert f"| {found['validation']['temperature 0']['tokens_per_pass']:.2f} |" in line
    assert f"| {found['progress']['tokens'] / 1e6:.2f} M |" in line
    small, large = (tmp_path / "out/scaling.md").read_text().splitlines()[-2:]
    assert small.startswith(f"| {found['progress']['tokens']:,} |")
    assert large.startswith(f"| {10 * found['progress']['tokens']:,} |")
    assert "| 3.21 |" in large
    for name in ("acceptance", "scaling"):
        for form in ("png", "pdf"):
            assert (tmp_path / "out" / f"{name}.{form}").stat().st_size > 1000
