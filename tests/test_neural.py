"""The neural drafters: what they draft step by step is what their networks give for the whole text at once, as in
training, whatever was accepted before; and a bug of each known kind is noticed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from conftest import mutated, prompts, run, tiny
from transformers import AutoModelForCausalLM, OPTConfig

from drafters import blocks, cached, dflash, draft_model, mtp, recursive
from drafters.dflash import DFlash
from drafters.dspark import DSpark
from drafters.eagle import Eagle
from drafters.eagle1 import Eagle1
from drafters.medusa import Medusa
from drafters.mtp import Mtp
from drafters.neural import Neural
from drafters.ngram import NGram
from specbench import testing
from specbench.comparison import Arm
from specbench.decoding import decode
from specbench.drafting import Batch, Request
from specbench.errors import ConfigError, RunError
from specbench.model import CausalLM
from specbench.sampling import Sampling
from specbench.stopping import StopRule
from specbench.targets import byte_tokenizer, load_tiny
from specbench.verification import Verdict

from drafters import dspark, eagle, eagle1, medusa  # isort: skip

# name -> drafter with a new network, largest k tried
FAMILIES: dict[str, tuple[Callable[..., Neural], int]] = {
    "eagle": (lambda **o: Eagle(network=eagle.Options(vocabulary=120), **o), 4),
    "eagle_variant": (
        lambda **o: Eagle(
            network=eagle.Options(
                layers=2,
                taps=[0, 1, 2, 3],
                head_norms=True,
                norm_before_residual=True,
                tap_norms=True,
                norm_output=True,
            ),
            **o,
        ),
        3,
    ),
    "eagle_joint_norm": (lambda **o: Eagle(network=eagle.Options(norm_before_fc=True, rope_theta=500.0), **o), 3),
    "eagle1": (lambda **o: Eagle1(network=eagle1.Options(layers=2), **o), 4),
    "mtp": (lambda **o: Mtp(network=mtp.Options(vocabulary=120), **o), 4),
    "mtp_hidden_first": (lambda **o: Mtp(network=mtp.Options(hidden_first=True, norm_output=False), **o), 3),
    "mtp_modules": (lambda **o: Mtp(network=mtp.Options(modules=3), **o), 3),
    "mtp_depths": (lambda **o: Mtp(depths=4, network=mtp.Options(layers=2, vocabulary=120), **o), 4),
    "medusa": (lambda **o: Medusa(network=medusa.Options(layers=2, vocabulary=120), **o), 4),
    "dflash": (lambda **o: DFlash(network=dflash.Options(taps=[1, 3], block=5, vocabulary=120), **o), 4),
    "dflash_whole": (lambda **o: DFlash(whole_block=True, network=dflash.Options(block=6, layers=1), **o), 3),
    "dspark": (lambda **o: DSpark(network=dspark.Options(block=4, vocabulary=120), **o), 4),
    "dspark_gated": (lambda **o: DSpark(network=dspark.Options(block=5, kind="gated", anchor_first=False), **o), 4),
    "dspark_rnn": (lambda **o: DSpark(network=dspark.Options(block=5, kind="rnn", anchor_first=False), **o), 4),
    "dspark_plain": (lambda **o: DSpark(network=dspark.Options(block=4, rank=0, confidence=False), **o), 4),
}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def stirred(drafter: Neural, target: CausalLM) -> Neural:
    """The drafter, every weight of its network changed, so that each one shows in what it computes."""
    build = drafter.build

    def built(target: CausalLM) -> draft_model.DraftModel:
        model = build(target)
        generator = torch.Generator().manual_seed(5)
        for parameter in model.parameters():
            parameter.data += 0.25 * torch.randn(parameter.shape, generator=generator)
        return model

    drafter.build = built
    drafter.bind(target)
    return drafter


@dataclass
class Round:
    """A row in a round: its text when it drafted, the logits of each draft, and the draft."""

    text: torch.Tensor
    logits: list[torch.Tensor]
    tokens: list[int]


LENGTHS = (7, 3, 12)  # of the prompts; the text goes on behind them
ROUNDS = ((0, 2, 4), (4, 0, 1), (1, 4, 0), (0, 0, 3))  # drafts that are accepted, by row


def drive(
    drafter: Neural, target: CausalLM, k: int, shift: int = 0, ks: Sequence[int] | None = None
) -> Iterator[Round]:
    """Rounds of uneven acceptance on given texts: the target's residual streams where tokens were accepted, junk where
    they were not. ``shift``: of the residual streams, a bug. ``ks``: drafts asked for round by round, at most ``k``."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(3, target.vocab_size, (len(LENGTHS), 48), generator=generator)
    streams = streams_of(target, text, [tap + shift for tap in drafter.taps])
    lengths = np.array([length + 1 for length in LENGTHS])
    tokens = np.zeros(text.shape, dtype=np.int64)
    for row, length in enumerate(lengths):
        tokens[row, :length] = text[row, :length]
    requests = [Request(str(row), text[row, : length - 1].tolist()) for row, length in enumerate(lengths)]
    batch = Batch(
        requests, tokens, lengths, lengths - 1, np.ones(len(lengths), dtype=bool), Sampling(), None, torch.device("cpu")
    )
    drafter.prepare(len(lengths), text.shape[1], k)
    drafter.start(batch, [streams[row, : length - 1] for row, length in enumerate(lengths)])
    for accepted, asked in zip(ROUNDS, ks or [k] * len(ROUNDS), strict=False):
        logits: list[torch.Tensor] = []
        with heard(drafter, logits):
            draft = drafter.propose(batch, asked)
        for row, length in enumerate(lengths):
            yield Round(
                torch.cat([text[row, :length], draft.tokens[row]]),
                [part[row] for part in logits],
                draft.tokens[row].tolist(),
            )
        taps = 10 * torch.randn(len(lengths), asked + 1, *streams.shape[2:], generator=generator)
        counts = [min(a, asked) for a in accepted]
        for row, count in enumerate(counts):
            begin = lengths[row] - 1
            taps[row, : count + 1] = streams[row, begin : begin + count + 1]
            tokens[row, lengths[row] : lengths[row] + count + 1] = text[row, lengths[row] : lengths[row] + count + 1]
        batch.lengths += np.array(counts) + 1
        drafter.observe(batch, Verdict(torch.tensor(counts), torch.zeros(len(counts), dtype=torch.long)), taps)


class heard:  # noqa: N801
    """Listen to the logits from which tokens are chosen."""

    def __init__(self, drafter: Neural, into: list[torch.Tensor]):
        self._into = into

    def __enter__(self) -> None:
        from drafters import proposing

        self._add = proposing.Proposal.add
        into = self._into

        def add(proposal: proposing.Proposal, logits: torch.Tensor) -> torch.Tensor:
            into.append(logits.clone())
            return self._add(proposal, logits)

        proposing.Proposal.add = add

    def __exit__(self, *_: object) -> None:
        from drafters import proposing

        proposing.Proposal.add = self._add


def streams_of(target: CausalLM, text: torch.Tensor, taps: list[int]) -> torch.Tensor:
    taps = [min(max(tap, 0), len(target.blocks)) for tap in taps]
    return target.forward(text, target.new_cache(*text.shape), taps=taps).taps.clone()


def at_once(drafter: Neural, target: CausalLM, made: Round, k: int) -> list[torch.Tensor]:
    """The logits of each draft by the network's form for whole texts."""
    model, spec = drafter._loop._model, drafter.spec
    known = len(made.text) - k  # committed tokens
    streams = streams_of(target, made.text[None, : known - 1], list(drafter.taps))  # [1, n-1, m, D]
    network, head = model.network, model.head
    if isinstance(drafter, Medusa):
        feature = target.norm(streams[:, -1, 0])
        return [head(hidden)[0] for hidden in network(feature, k).unbind(1)]
    if isinstance(drafter, DFlash | DSpark):
        size = spec.block if drafter.whole_block else (k if spec.anchor_first else k + 1)
        block = torch.full((1, 1, size), spec.mask)
        block[..., 0] = made.text[known - 1]
        hidden = network.unroll(model.embedding(block), streams.flatten(2), torch.tensor([[known - 1]]))[0]
        if isinstance(drafter, DSpark):
            before = (
                made.text[known - 1 :][:size]
                if spec.anchor_first
                else made.text[[known - 1, *range(known - 1, known + size - 2)]]
            )
            return list(
                network.sequence(head(hidden), hidden, before[None])[0][0, (0 if spec.anchor_first else 1) :][:k]
            )
        return list(head(hidden)[0, 1 : k + 1])
    if isinstance(drafter, Mtp | Eagle1):
        features = target.norm(streams[:, :, 0]) if getattr(spec, "norm_feature", True) else streams[:, :, 0]
    else:
        features = streams.flatten(2)
    features = torch.nn.functional.pad(features, (0, 0, 0, k + 1))  # of drafted positions there are none
    if isinstance(drafter, Mtp) and spec.way == "recurse":
        network = network.cells[0]
    hidden = network.unroll(model.embedding(made.text)[None], features, k)
    return [head(step[0, known - 2]) for step in hidden]


def differences(drafter: Neural, target: CausalLM, k: int, shift: int = 0) -> float:
    """Largest difference between step by step and at once, over all rounds and rows, in units of the logits' spread."""
    worst = 0.0
    for made in drive(drafter, target, k, shift):
        for ours, expected in zip(made.logits, at_once(drafter, target, made, k), strict=True):
            worst = max(worst, ((ours - expected).abs().max() / expected.std()).item())
    return worst


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_drafting_step_by_step_is_the_network_at_once(family, kind, monkeypatch):
    make, k = FAMILIES[family]
    if kind != "llama":
        monkeypatch.setattr(cached, "Traced", lambda network, name: network)  # a trace is the same for all targets
    target = tiny(kind)
    assert differences(stirred(make(), target), target, k) < 5e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_network_drafts_the_same(family):
    make, k = FAMILIES[family]
    target = CausalLM(load_tiny("llama").model, tiny("llama").tokenizer, name="recorded", record=True)
    drafter = stirred(make(), target)
    assert differences(drafter, target, k) < 5e-4
    assert differences(drafter, target, k) < 5e-4  # on the recordings of the first time


@pytest.mark.parametrize("family", ["eagle", "mtp", "mtp_modules", "dflash", "dspark"])
def test_nothing_is_recorded_while_a_clock_runs(family):
    """Also not when texts of two sizes take turns."""
    make, k = FAMILIES[family]
    target = CausalLM(load_tiny("llama").model, tiny("llama").tokenizer, name="recorded", record=True)
    drafter = make()
    drafter.bind(target)
    for tokens in 2 * [prompts(target, 1)[0], 16 * prompts(target, 1)[0]]:
        made: set[int] = set()
        for step in decode(target, drafter, [Request("p", tokens)], k, Sampling(), 0, StopRule(12)):
            made.add(len(drafter._loop._cache.recordings))
            assert len(made) == 1, f"round {step.round} recorded"
    assert len(drafter._loop._run._spare) == 2
    assert min(made) > 0


def test_rotary_frequencies_stay_exact_in_bfloat16():
    target = load_tiny("llama", dtype="bfloat16")
    for make, _ in FAMILIES.values():
        drafter = make()
        drafter.bind(target)
        buffers = dict(drafter._loop._model.network.named_buffers())
        assert all(b.dtype is torch.float32 for name, b in buffers.items() if name.endswith("inv_freq"))


@pytest.mark.parametrize("ks", [(3, 1, 0, 1), (0, 0, 0, 2), (0, 3, 3, 0)])
@pytest.mark.parametrize("record", [False, True])
def test_depths_are_kept_up_where_fewer_drafts_are_asked_for(ks, record):
    """Drafts after rounds of fewer are those of rounds of the same k throughout."""
    target = CausalLM(load_tiny("llama").model, tiny("llama").tokenizer, name="x", record=record)
    drafter = stirred(FAMILIES["mtp_modules"][0](), target)
    for made in drive(drafter, target, 3, ks=ks):
        for ours, expected in zip(made.logits, at_once(drafter, target, made, len(made.tokens)), strict=False):
            assert (ours - expected).abs().max() < 2e-4 * expected.std()


def test_more_depths_than_before_are_refused_within_a_text(llama):
    drafter = stirred(FAMILIES["mtp_modules"][0](), llama)
    with pytest.raises(RunError, match="k=3 after k=1"):
        list(drive(drafter, llama, 3, ks=(1, 3)))


def test_confidences_travel_with_the_draft(llama):
    make, k = FAMILIES["dspark"]
    drafter = stirred(make(), llama)
    drafts = []
    propose = drafter.propose
    drafter.propose = lambda batch, k: drafts.append(propose(batch, k)) or drafts[-1]
    for made in drive(drafter, llama, k):
        network, row = drafter._loop._model.network, len(made.text) - k
        streams = streams_of(llama, made.text[None, : row - 1], list(drafter.taps)).flatten(2)
        block = torch.full((1, 1, k), drafter.spec.mask)
        block[..., 0] = made.text[row - 1]
        hidden = network.unroll(drafter._loop._model.embedding(block), streams, torch.tensor([[row - 1]]))[0]
        expected = network.sequence(drafter._loop._model.head(hidden), hidden, made.text[None, row - 1 : -1])[
            1
        ].sigmoid()
        assert any(torch.allclose(expected, confidence[None], atol=1e-4) for confidence in drafts[-1].confidence)


# Bugs that others shipped. Each must be noticed by the comparison above.

BUGS = {
    "a tap off by one": ("eagle", None),
    "a tap off by one, dflash": ("dflash", None),
    "entries of rejected drafts are kept": (
        "eagle",
        (recursive.Recursion, "propose", ("self._cache.rewind(torch.from_numpy(batch.lengths - 1))", "pass")),
    ),
    "recursion on the target's feature": (
        "mtp",
        (
            recursive.Recursion,
            "propose",
            ("hidden, feature = self._step(tokens, feature)", "hidden, _ = self._step(tokens, feature)"),
        ),
    ),
    "drafted tokens stand a position early": (
        "eagle1",
        (
            recursive.Cell,
            "forward",
            ("self.rotary(slots, embeddings)", "self.rotary(slots - (0 if true else 1), embeddings)"),
        ),
    ),
    "the last pair is that of another row": (
        "eagle",
        (recursive.Recursion, "_catch_up", ("output[rows, at]", "output[rows, at.flip(0)]")),
    ),
    "features stand with their own tokens": (
        "eagle",
        (recursive.Recursion, "_catch_up", ("self._cache.lengths[:, None] + 1 + ", "self._cache.lengths[:, None] + ")),
    ),
    "the block is roped one position early": (
        "dflash",
        (
            dflash.Backbone,
            "forward",
            ("rotation = self.rotary(slots, embeddings)", "rotation = self.rotary(slots - 1, embeddings)"),
        ),
    ),
    "the block sees past itself": ("dflash", (dflash.Backbone, "forward", ("(ids < end)", "(ids < end + 1)"))),
    "the block is causal": (
        "dflash",
        (
            dflash.Backbone,
            "forward",
            ("(ids < end)[:, None].expand(-1, embeddings.shape[1], -1)", "ids <= slots[..., None]"),
        ),
    ),
    "the context includes the anchor's place": (
        "dflash",
        (dflash.Backbone, "forward", ("begin = starts + fresh", "begin = starts + fresh + 1")),
    ),
    "the context is normed like the block": (
        "dflash",
        (
            dflash.Backbone,
            "forward",
            ("attention.entries(context, rotation)", "attention.entries(block.input_layernorm(context), rotation)"),
        ),
    ),
    "the next token is read from column 0": (
        "dspark",
        (dspark.SemiAutoregressive, "choose", ("token = proposal.add(row)", "proposal.add(row)")),
    ),
    "the state of the sequential head is forgotten": (
        "dspark_rnn",
        (
            dspark.SequentialHead,
            "forward",
            ("torch.zeros_like(read) if state is None else state", "torch.zeros_like(read)"),
        ),
    ),
    "the anchor's position is left out of the state": (
        "dspark_rnn",
        (dspark.SemiAutoregressive, "choose", ("not self._spec.anchor_first", "False")),
    ),
    "depths share their entries": (
        "mtp_modules",
        (mtp.Depths, "forward", ("kept[depth * layers : (depth + 1) * layers]", "kept[:layers]")),
    ),
    "deeper entries are kept from drafts": (
        "mtp_modules",
        (mtp.DepthByDepth, "propose", ("batch.lengths) - depths -", "batch.lengths) - 1 -")),
    ),
    "each depth reads the target's feature": (
        "mtp_modules",
        (mtp.DepthByDepth, "propose", ("hidden, feature = self._run", "hidden, _ = self._run")),
    ),
    "the second norm is missing": ("eagle", (blocks.Block, "forward", ("self.post_attention_layernorm(x)", "x"))),
    "keys are not turned": (
        "eagle",
        (blocks.Attention, "entries", ("rotate(self.k_norm(keys), rotation)", "self.k_norm(keys)")),
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_a_known_kind_is_noticed(bug, monkeypatch):
    family, change = BUGS[bug]
    make, k = FAMILIES[family]
    target = tiny("llama")
    monkeypatch.setattr(cached, "Traced", lambda network, name: network)  # a trace would keep what is right
    drafter = stirred(make(), target)
    assert differences(drafter, target, k) < 5e-4
    if change is None:
        assert differences(drafter, target, k, shift=-1) > 1e-2
        return
    owner, name, *replacements = change
    right = list(drive(drafter, target, k))
    monkeypatch.setattr(owner, name, mutated(getattr(owner, name), *replacements))
    wrong = list(drive(drafter, target, k))
    # the whole text at once runs some of the same code; so the bug is held against what was right
    worst = max(
        ((a - b).abs().max() / b.std()).item()
        for x, y in zip(right, wrong, strict=True)
        for a, b in zip(x.logits, y.logits, strict=True)
    )
    assert worst > 1e-2


def test_an_entry_of_the_future_that_shows_is_noticed(monkeypatch):
    target = tiny("llama")
    monkeypatch.setattr(cached, "Traced", lambda network, name: network)
    drafter = stirred(FAMILIES["eagle"][0](), target)
    monkeypatch.setattr(recursive, "visible", lambda slots, ids, window=None: slots[..., None] - ids >= -1)
    assert differences(drafter, target, 4) > 1e-2


def test_training_sees_the_context_strictly_before_the_anchor():
    target = tiny("llama")
    drafter = stirred(FAMILIES["dflash"][0](), target)
    network = drafter._loop._model.network
    features = torch.randn(1, 12, len(drafter.taps) * target.width, generator=torch.Generator().manual_seed(0))
    block = torch.randn(1, 2, 5, target.width, generator=torch.Generator().manual_seed(1))
    anchors = torch.tensor([[6, 8]])
    before = network.unroll(block, features, anchors)
    changed = features.clone()
    changed[:, 6:] += 1  # at the first anchor and after it
    after = network.unroll(block, changed, anchors)
    torch.testing.assert_close(after[:, 0], before[:, 0])
    assert (after[:, 1] - before[:, 1]).abs().max() > 1e-2
    other = block.clone()
    other[:, 1] += 1
    torch.testing.assert_close(network.unroll(other, features, anchors)[:, 0], before[:, 0])  # blocks do not see others


# The kit: what every drafter must keep to


@pytest.mark.parametrize("family", ["eagle", "mtp", "mtp_depths", "medusa", "dflash", "dspark"])
def test_drafter_keeps_to_the_contract(family, monkeypatch):
    make, k = FAMILIES[family]
    monkeypatch.setattr(cached, "Traced", lambda network, name: network)  # tracing takes longer than all these texts
    testing.check_drafter(lambda: make(proposal="sample"), k=k)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt_neox"])
def test_greedy_text_is_that_of_plain_decoding(family, kind, monkeypatch):
    """At batch size 1 and 3."""
    make, k = FAMILIES[family]
    if kind != "llama":
        monkeypatch.setattr(cached, "Traced", lambda network, name: network)  # a trace is the same for all targets
    testing.check_greedy_equality(make, tiny(kind), k)


@pytest.mark.parametrize("family", ["eagle", "mtp", "mtp_depths", "medusa", "dflash", "dspark"])
def test_tokens_outside_the_draft_vocabulary_have_no_chance(family):
    make, k = FAMILIES[family]
    target = tiny("llama")
    seen = []
    drafter = make(proposal="sample")
    propose = drafter.propose
    drafter.propose = lambda batch, k: seen.append(propose(batch, k)) or seen[-1]
    requests = [Request(f"p{i}", p) for i, p in enumerate(prompts(target))]
    run(target, drafter, requests, k=k, sampling=Sampling(temperature=1.0))
    for draft in seen:
        assert (draft.probs[..., 120:] == 0).all()
        torch.testing.assert_close(draft.probs.sum(-1), torch.ones(draft.probs.shape[:2]))


# What they are made from, and what they say


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_network_says_that_it_is_not_trained(family, llama):
    drafter = FAMILIES[family][0]()
    drafter.bind(llama)
    assert "not trained" in drafter.warnings()[0]
    said = drafter.describe()
    assert said["parameters"] > 0
    assert said["files"] == {}
    assert said["network"]["taps"] == drafter.taps


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_network_is_the_same_each_time(family, llama):
    torch.manual_seed(1)
    first = FAMILIES[family][0]().build(llama).state_dict()
    torch.manual_seed(2)
    second = FAMILIES[family][0]().build(llama).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("drafter", "k", "most"),
    [
        (Medusa(network=medusa.Options(heads=3)), 4, 3),
        (DFlash(network=dflash.Options(block=5)), 5, 4),
        (DSpark(network=dspark.Options(block=5)), 6, 5),
        (Mtp(network=mtp.Options(modules=2)), 3, 2),
    ],
)
def test_more_drafts_than_a_network_can_make_are_refused(drafter, k, most, llama):
    with pytest.raises(ConfigError, match=f"k={k} is above what drafter x can draft; use k={most} or less"):
        Arm("x", drafter, k).bind(llama)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Eagle(network=eagle.Options(taps=[])), "taps"),
        (lambda: Eagle(network=eagle.Options(taps=[9])), "after block 9, and tiny-llama has 3"),
        (lambda: Eagle(network=eagle.Options(layers=0)), "layers=0"),
        (lambda: Eagle(network=eagle.Options(vocabulary=0)), r"vocabulary=0 is not in 1\.\.259"),
        (lambda: Eagle(network=eagle.Options(vocabulary=260)), r"vocabulary=260 is not in 1\.\.259"),
        (lambda: Eagle(network=eagle.Options(norm_before_fc=True, tap_norms=True)), "exclude each other"),
        (lambda: Eagle(proposal="best"), "proposal=best is unknown"),
        (lambda: Eagle(layer_ids="some"), "layer_ids=some is unknown"),
        (lambda: Mtp(way="up"), "way=up is unknown"),
        (lambda: Mtp(way="recurse", network=mtp.Options(modules=2)), "way=recurse uses a single module"),
        (lambda: Mtp(depths=1, network=mtp.Options(modules=2)), "depths=1 leaves some of the 2 modules out"),
        (lambda: Mtp(network=mtp.Options(modules=0)), "modules=0"),
        (lambda: Medusa(network=medusa.Options(heads=0)), "heads=0"),
        (lambda: DFlash(network=dflash.Options(block=1)), "block=1 drafts nothing"),
        (lambda: DFlash(network=dflash.Options(taps=[])), "taps"),
        (lambda: DSpark(network=dspark.Options(kind="odd")), "kind=odd is unknown"),
        (lambda: DSpark(network=dspark.Options(rank=-1)), "rank=-1"),
        (lambda: Eagle(network=eagle.Options(taps=["a"])), r"taps=\['a'\] is not a list"),
        (lambda: Eagle(network=eagle.Options(layers="abc")), "layers=abc is not a whole number"),
        (lambda: Eagle(network=eagle.Options(rope_theta="abc")), "rope_theta=abc is not a number or null"),
        (lambda: Eagle(network=eagle.Options(vocabulary=1.5)), r"vocabulary=1\.5 is not a whole number or null"),
        (lambda: Eagle(checkpoint=42), "checkpoint=42 is neither a folder nor a hub id"),
        (lambda: Mtp(depths=0), "depths=0 is no depth"),
        (lambda: DFlash(network=dflash.Options(mask=999)), "mask=999 is no token of tiny-llama"),
        (lambda: DFlash(whole_block="maybe"), "whole_block=maybe is neither"),
        (lambda: Eagle(checkpoint="x/y", network=eagle.Options(layers=2)), "brings its own; drop one"),
    ],
)
def test_impossible_options_are_refused(make, said, llama):
    with pytest.raises(ConfigError, match=said):
        make().bind(llama)


def targets_with_ends_of_their_own():
    from transformers import CohereConfig, Gemma2Config, GraniteConfig

    small = {
        "vocab_size": 259, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 256, "initializer_range": 0.3,
    }  # fmt: skip
    yield GraniteConfig(**small, embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.2)
    yield CohereConfig(**small, logit_scale=0.0625)
    yield Gemma2Config(**small, final_logit_softcapping=5.0, query_pre_attn_scalar=12, sliding_window=8)


@pytest.mark.parametrize("config", targets_with_ends_of_their_own(), ids=lambda config: config.model_type)
def test_embeddings_and_logits_are_those_of_the_target(config):
    torch.manual_seed(0)
    lm = CausalLM(AutoModelForCausalLM.from_config(config, dtype=torch.float32), byte_tokenizer(), name="scaled")
    tokens = torch.arange(10)[None]
    output = lm.forward(tokens, lm.new_cache(1, 10), taps=(0, 3))
    torch.testing.assert_close(lm.embed(tokens), output.taps[:, :, 0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lm.head(lm.norm(output.taps[:, :, 1])), output.logits, atol=1e-4, rtol=1e-4)
    testing.check_greedy_equality(FAMILIES["eagle"][0], lm, 3)


def test_a_target_whose_logits_are_bent_otherwise_is_refused(llama, monkeypatch):
    monkeypatch.setattr(llama, "norm", lambda hidden: hidden)
    with pytest.raises(ConfigError, match="does more than its final norm and output head"):
        Eagle().bind(llama)


def test_a_target_without_a_final_norm_decodes_and_refuses_heads():
    config = OPTConfig(
        vocab_size=259, hidden_size=48, ffn_dim=64, num_hidden_layers=3, num_attention_heads=4,
        do_layer_norm_before=False, word_embed_proj_dim=48, max_position_embeddings=256, init_std=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    lm = CausalLM(AutoModelForCausalLM.from_config(config, dtype=torch.float32), byte_tokenizer(), name="bare")
    testing.check_greedy_equality(NGram, lm, 3)
    with pytest.raises(ConfigError, match="bare has no final norm"):
        Eagle().bind(lm)
