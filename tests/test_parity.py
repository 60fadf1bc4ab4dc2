"""Our networks against independent implementations: see scripts/parity/reference.py, which wrote the fixtures.

Each fixture is a checkpoint in its package's layout with what that package computes from it. It is read by our readers,
so names, index conventions and arithmetic are tested at once.
"""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig

from drafters.dflash import DFlash
from drafters.dspark import DSpark
from drafters.eagle import Eagle
from drafters.mtp import Mtp
from specbench.model import CausalLM
from specbench.targets import byte_tokenizer

CASES = Path(__file__).parent / "fixtures" / "parity"
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


class Reference:
    """A fixture: ``at("logits")`` and so on, and ``meta``."""

    def __init__(self, case: str):
        self.folder = CASES / case
        with safe_open(self.folder / "reference.safetensors", "pt") as file:
            self.meta = json.loads(file.metadata()["meta"])
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    def at(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def target(self) -> CausalLM:
        """A random target of the right sizes, with the fixture's embeddings and head."""
        lm = bare_target(len(self.at("embed")), self.at("embed").shape[1], self.meta["target_layers"])
        lm.model.get_input_embeddings().weight.copy_(self.at("embed"))
        if "head" in self.tensors:
            lm.model.get_output_embeddings().weight.copy_(self.at("head"))
        return lm


@cache
def bare_target(vocab: int, width: int, layers: int) -> CausalLM:
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return CausalLM(AutoModelForCausalLM.from_config(config), tokenizer, name="bare", engine="plain")


def cases(start: str) -> list[str]:
    return sorted(path.name for path in CASES.iterdir() if path.name.startswith(start))


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("case", cases("eagle3"))
def test_eagle3_is_that_of_speculators(case):
    reference = Reference(case)
    target = reference.target()
    drafter = Eagle(checkpoint=str(reference.folder))
    model = drafter.build(target)
    features = reference.at("features").flatten(1)[None]
    hidden = model.network.unroll(model.embedding(reference.at("tokens"))[None], features, len(reference.at("logits")))
    for j, expected in enumerate(reference.at("logits")):
        valid = reference.at("valid")[j]
        torch.testing.assert_close(model.head(hidden[j])[0, valid], expected[valid], **CLOSE)


def test_mtp_is_that_of_speculators():
    reference = Reference("mtp_qwen3")
    target = reference.target()
    steps = len(reference.at("logits"))
    model = Mtp(checkpoint=str(reference.folder), depths=steps).build(target)
    hidden = model.network.unroll(
        model.embedding(reference.at("tokens"))[None], reference.at("features")[None, :, 0], steps
    )
    for j, expected in enumerate(reference.at("logits")):
        valid = reference.at("valid")[j]
        torch.testing.assert_close(model.head(hidden[j])[0, valid], expected[valid], **CLOSE)


def blocks(reference: Reference, mask: int, size: int) -> torch.Tensor:
    """Token ids of each anchor's block [1, A, b]."""
    made = torch.full((len(reference.at("anchors")), size), mask)
    made[:, 0] = reference.at("tokens")[reference.at("anchors")]
    return made[None]


@pytest.mark.parametrize("case", cases("dflash"))
def test_dflash_is_that_of_speculators_and_of_its_authors(case):
    reference = Reference(case)
    drafter = DFlash(checkpoint=str(reference.folder))
    model = drafter.build(reference.target())
    embeddings = model.embedding(blocks(reference, drafter.spec.mask, drafter.spec.block))
    hidden = model.network.unroll(embeddings, reference.at("features").flatten(1)[None], reference.at("anchors")[None])
    torch.testing.assert_close(hidden[0], reference.at("hidden"), **CLOSE)
    torch.testing.assert_close(model.head(hidden)[0], reference.at("logits"), **CLOSE)


@pytest.mark.parametrize("case", cases("dspark"))
def test_dspark_is_that_of_speculators(case):
    reference = Reference(case)
    drafter = DSpark(checkpoint=str(reference.folder))
    model = drafter.build(reference.target())
    tokens, anchors = reference.at("tokens"), reference.at("anchors")
    embeddings = model.embedding(blocks(reference, drafter.spec.mask, drafter.spec.block))
    hidden = model.network.unroll(embeddings, reference.at("features").flatten(1)[None], anchors[None])[0]
    torch.testing.assert_close(hidden, reference.at("hidden"), **CLOSE)
    steps = torch.arange(drafter.spec.block)
    before = tokens[anchors[:, None] + (steps if drafter.spec.anchor_first else (steps - 1).clamp(min=0))]
    logits, confidence = model.network.sequence(model.head(hidden), hidden, before)
    torch.testing.assert_close(logits, reference.at("logits"), **CLOSE)
    torch.testing.assert_close(confidence, reference.at("confidence_logits"), **CLOSE)
