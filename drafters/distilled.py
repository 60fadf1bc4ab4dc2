"""A small language model made of a few of its target's blocks, between the target's own embeddings and output head.

    h = emb(token);  h = block_i(h) for i in blocks;  logits = head(norm(h))          head: rows of the target's

The first ``frozen`` blocks stay the target's as they are and the others are trained, so a checkpoint holds those alone;
what it leaves out is taken from the target when it is read. It is the target's configuration with fewer layers, and so
of whatever kind the target is.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from drafters import initial
from drafters.checkpoints import common, files
from drafters.checkpoints.files import Written
from drafters.draft_model import OutputHead
from drafters.neural import Passages, Sum, gathered
from specbench.errors import ConfigError
from specbench.model import CausalLM

FROZEN = "blocks_of_target"  # said by a checkpoint: which of the target's blocks its first ones are
KEPT = "vocab_size_of_target"


@dataclass(frozen=True)
class Options:
    """Of a new small LM. blocks: the target's blocks it is made of, by number from 0; None for the first two and the
    last two. frozen: so many of the first are not trained. vocabulary: size of the draft vocabulary, None for all."""

    blocks: Sequence[int] | None = None
    frozen: int = 2
    vocabulary: int | None = None

    def chosen(self, target: CausalLM) -> list[int]:
        """The blocks. Raises ConfigError for what cannot be."""
        count = len(target.blocks)
        blocks = (
            list(self.blocks)
            if self.blocks is not None
            else sorted({0, min(1, count - 1), max(0, count - 2), count - 1})
        )
        wrong = [i for i in blocks if not 0 <= i < count]
        if wrong or not blocks:
            raise ConfigError(f"drafter.network.blocks={blocks}: {target.name} has blocks 0 to {count - 1}")
        if not 0 <= self.frozen < len(blocks):
            raise ConfigError(
                f"drafter.network.frozen={self.frozen} is not in 0..{len(blocks) - 1}: one is to be trained"
            )
        return blocks


class SmallModel(nn.Module):
    """The model as it is trained. ``network`` holds what is trained, ``backbone`` all blocks and the final norm."""

    def __init__(self, config: Any, frozen: Sequence[int], rows: int, target: CausalLM):
        """``frozen``: the target's blocks that the first ones are."""
        super().__init__()
        self.config, self.frozen = config, list(frozen)
        self.backbone = AutoModel.from_config(config, dtype=torch.float32)
        if not hasattr(self.backbone, "layers") or not hasattr(self.backbone, "norm"):
            raise ConfigError(f"a small LM is made of blocks like Llama's, which {target.name} does not have")
        self.backbone.set_input_embeddings(nn.Embedding(1, 1))  # the target's are used
        self.network = nn.ModuleList([*self.backbone.layers[len(frozen) :], self.backbone.norm])
        self.head = OutputHead(target.width, rows)
        with torch.no_grad():
            for block, number in zip(self.backbone.layers, self.frozen, strict=False):
                copy_block(block, target.blocks[number], target)

    def hidden(self, embeddings: Tensor) -> Tensor:
        """Embedded tokens [B, T, D] -> what the head reads, [B, T, D]."""
        return self.backbone(inputs_embeds=embeddings, use_cache=False).last_hidden_state


def build(options: Options, target: CausalLM) -> SmallModel:
    """A new small LM: the target's blocks, its final norm, and rows of its head."""
    blocks = options.chosen(target)
    initial.check_vocabulary(options.vocabulary, target)
    _check_embeddings(target)
    config = shortened(target.model.config, blocks)
    model = SmallModel(config, blocks[: options.frozen], options.vocabulary or target.vocab_size, target)
    with torch.no_grad():
        for i in range(options.frozen, len(blocks)):  # those before are the target's already
            copy_block(model.backbone.layers[i], target.blocks[blocks[i]], target)
        if target.final_norm is not None:
            copy_block(model.backbone.norm, target.final_norm, target)
        initial.start_head(model.head, target)
    return model.to(target.device, target.dtype).eval().requires_grad_(False)


def _check_embeddings(target: CausalLM) -> None:
    """Raise ConfigError for a target that does more with a token than to look up its embedding."""
    if initial.scales_embeddings(target):
        raise ConfigError(f"{target.name} scales its embeddings, which a small LM made of its blocks does not know of")


def hidden(model: SmallModel, target: CausalLM, passages: Passages, k: int) -> list[Tensor]:
    """For each of ``k`` drafts what the head reads [B, A, D]: the model's own prediction after each true token."""
    found = model.hidden(target.embed(passages.tokens))
    last = passages.tokens.shape[1] - 1
    return [gathered(found, (passages.at + 1 + j).clamp(max=last)) for j in range(k)]


def last_sum(model: SmallModel) -> Sum:
    """The blocks that are trained, on those that are not."""
    blocks = model.backbone.layers[len(model.frozen) :]
    return Sum(model.backbone.norm, [linear for block in blocks for linear in initial.added(block)])


def write(model: SmallModel, target: CausalLM) -> Written:
    """As a checkpoint: the trained blocks in transformers' layout, and what is to be taken from the target."""
    tensors = {
        f"model.{name}": value.detach().contiguous().cpu()
        for name, value in model.backbone.state_dict().items()
        if not name.startswith("embed_tokens.")
        and not any(name.startswith(f"layers.{i}.") for i in range(len(model.frozen)))
    }
    assert model.head.lm_head is not None
    tensors["lm_head.weight"] = model.head.lm_head.weight.detach().cpu()
    tensors |= common.vocabulary_tensors(model.head.ids, target)
    config = json.loads(model.config.to_json_string(use_diff=False))
    return Written({**config, FROZEN: model.frozen, KEPT: target.vocab_size}, tensors)


def is_one(folder: Path) -> bool:
    """Whether ``folder`` holds such a checkpoint, and not a whole language model."""
    try:
        return FROZEN in json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False


def read(path: str, target: CausalLM, engine: str) -> tuple[CausalLM, Tensor | None]:
    """The small LM of a checkpoint, ready to decode, and the ids [Vd] of its draft vocabulary, None for all.

    Raises ConfigError for one that does not fit the target."""
    source = files.read(path)
    config = AutoConfig.for_model(**dict(source.config))
    common.check_width(source, config.hidden_size, target)
    rows, ids = common.draft_vocabulary(source, target)
    if rows is None:
        raise ConfigError(f"drafter.model={path} has no output head")
    frozen = list(source.config[FROZEN])
    if any(not 0 <= i < len(target.blocks) for i in frozen):
        raise ConfigError(
            f"drafter.model={path} takes blocks {frozen} of its target, and {target.name} has not as many"
        )
    _check_embeddings(target)
    try:
        small = SmallModel(config, frozen, rows, target)
    except (AttributeError, RuntimeError) as error:  # the target's blocks are of another kind or size
        raise ConfigError(f"drafter.model={path} was made of another target's blocks: {error}") from error
    own = {f"model.{name}": value for name, value in small.backbone.state_dict().items()}
    given = {n: v for n, v in source.tensors.items() if n.startswith("model.")}
    left = [f"model.layers.{i}." for i in range(len(frozen))]
    wanted = {n for n in own if not n.startswith(("model.embed_tokens.", *left))}
    off = sorted(wanted ^ given.keys()) or sorted(n for n in wanted if own[n].shape != given[n].shape)
    if off:
        raise ConfigError(f"drafter.model={path} does not fit its own configuration: {', '.join(off[:8])}")
    small.backbone.load_state_dict({n.removeprefix("model."): v for n, v in given.items()}, strict=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.model = small.backbone
    table = target.model.get_input_embeddings()
    model.set_input_embeddings(nn.Embedding.from_pretrained(table.weight.detach().float()))
    model.lm_head = nn.Linear(target.width, rows, bias=False)
    model.lm_head.weight.data.copy_(source.tensors["lm_head.weight"])
    model = model.to(target.device, target.dtype)
    lm = CausalLM(model, target.tokenizer, name=Path(path).name, files=source.files, engine=engine)
    return lm, None if ids is None else ids.to(target.device)


def shortened(config: Any, blocks: Sequence[int]) -> Any:
    """The configuration of a model that has only these ``blocks`` of another."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = len(blocks)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in blocks]
    config.tie_word_embeddings = False
    return config


@torch.no_grad()
def copy_block(own: nn.Module, given: Any, target: CausalLM) -> None:
    """Give ``own`` the weights of a block of the target's, which may be merged or packed for inference already."""
    for name, module in own.named_modules():
        source = given.get_submodule(name)
        if isinstance(module, nn.Linear):
            module.weight.copy_(initial.read_weight(source, module.in_features, target))
            if module.bias is not None:
                module.bias.copy_(initial.read_bias(source, target, module.in_features))
        else:
            for key, parameter in module.named_parameters(recurse=False):
                parameter.copy_(getattr(source, key))
