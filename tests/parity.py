"""Our networks on the cases of scripts/parity/reference.py: shared by test_parity.py, which reads the stored ones, and
scripts/parity/networks.py, which reads new ones.

Each case is a checkpoint in its package's layout with what that package computes from it. It is read by our readers, so
names, index conventions and arithmetic are tested at once.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from drafters.dflash import DFlash
from drafters.dspark import DSpark
from drafters.eagle import Eagle
from drafters.mtp import Mtp
from specbench.model import CausalLM
from specbench.targets import byte_tokenizer

STORED = Path(__file__).parent / "fixtures" / "parity"
CLOSE = {"atol": 1e-4, "rtol": 1e-4}

Pairs = dict[str, tuple[Tensor, Tensor]]  # by name: ours, and theirs


class Reference:
    """A case: ``at("logits")`` and so on, and ``meta``."""

    def __init__(self, folder: Path):
        self.folder = folder
        with safe_open(folder / "reference.safetensors", "pt") as file:
            self.meta: dict[str, Any] = json.loads(file.metadata()["meta"])
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    def at(self, name: str) -> Tensor:
        return self.tensors[name]

    def target(self) -> CausalLM:
        """A random target of the right sizes, with the case's embeddings and head."""
        lm = bare_target(len(self.at("embed")), self.at("embed").shape[1], self.meta["target_layers"])
        lm.model.get_input_embeddings().weight.copy_(self.at("embed"))
        if "head" in self.tensors:
            lm.model.get_output_embeddings().weight.copy_(self.at("head"))
        return lm


@cache
def bare_target(vocab: int, width: int, layers: int) -> CausalLM:
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return CausalLM(AutoModelForCausalLM.from_config(config), byte_tokenizer(), name="bare", engine="plain")


def folders(where: Path) -> list[Path]:
    """The cases in a folder."""
    return sorted(path.parent for path in where.glob("*/reference.safetensors"))


@torch.no_grad()
def answers(folder: Path) -> Pairs:
    """Whatever a case tells, beside ours."""
    reference = Reference(folder)
    return FAMILIES[folder.name.split("_")[0]](reference, reference.target())


def eagle3(reference: Reference, target: CausalLM) -> Pairs:
    model = Eagle(checkpoint=str(reference.folder)).build(target)
    return unrolled(reference, model, reference.at("features").flatten(1))


def mtp(reference: Reference, target: CausalLM) -> Pairs:
    model = Mtp(checkpoint=str(reference.folder), depths=len(reference.at("logits"))).build(target)
    return unrolled(reference, model, reference.at("features")[:, 0])


def unrolled(reference: Reference, model: Any, features: Tensor) -> Pairs:
    """Logits of each step of recursion, where they mean something."""
    embeddings = model.embedding(reference.at("tokens"))[None]
    hidden = model.network.unroll(embeddings, features[None], len(reference.at("logits")))
    valid = reference.at("valid")
    ours = torch.stack([model.head(step)[0] for step in hidden])
    return {"logits": (ours[valid], reference.at("logits")[valid])}


def dflash(reference: Reference, target: CausalLM) -> Pairs:
    drafter = DFlash(checkpoint=str(reference.folder))
    model = drafter.build(target)
    hidden = blocks(reference, drafter, model)
    return {
        "hidden": (hidden, reference.at("hidden")),
        "logits": (model.head(hidden), reference.at("logits")),
    }


def dspark(reference: Reference, target: CausalLM) -> Pairs:
    drafter = DSpark(checkpoint=str(reference.folder))
    model = drafter.build(target)
    hidden = blocks(reference, drafter, model)
    steps = torch.arange(drafter.spec.block)
    back = steps if drafter.spec.anchor_first else (steps - 1).clamp(min=0)
    before = reference.at("tokens")[reference.at("anchors")[:, None] + back]
    logits, confidence = model.network.sequence(model.head(hidden), hidden, before)
    return {
        "hidden": (hidden, reference.at("hidden")),
        "logits": (logits, reference.at("logits")),
        "confidence": (confidence, reference.at("confidence_logits")),
    }


def blocks(reference: Reference, drafter: DFlash | DSpark, model: Any) -> Tensor:
    """Hidden states [A, b, D] of the block at each anchor."""
    anchors = reference.at("anchors")
    tokens = torch.full((1, len(anchors), drafter.spec.block), drafter.spec.mask)
    tokens[0, :, 0] = reference.at("tokens")[anchors]
    return model.network.unroll(model.embedding(tokens), reference.at("features").flatten(1)[None], anchors[None])[0]


FAMILIES: dict[str, Callable[[Reference, CausalLM], Pairs]] = {
    "eagle3": eagle3, "mtp": mtp, "dflash": dflash, "dspark": dspark,
}  # fmt: skip
