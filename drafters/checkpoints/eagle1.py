"""EAGLE-1 checkpoints in the reference's layout: ``fc``, ``layers.*`` of which the first has no input norm, usually
with a copy of the target's embeddings."""

from dataclasses import replace
from typing import Any

from drafters.checkpoints import common, files
from drafters.checkpoints.files import Loaded, Written
from drafters.draft_model import DraftModel
from specbench.model import CausalLM

NAMES = {"network.": "", "embedding.table.": "embed_tokens."}


def read(path: str, target: CausalLM) -> Loaded:
    """A checkpoint for ``target``. Raises ConfigError for one of another kind, or that does not fit."""
    source = files.read(path)
    fc = source.tensor("fc.weight")
    if (
        fc is None
        or fc.shape[1] != 2 * fc.shape[0]
        or source.has(r"(midlayer|layers\.0)\.hidden_norm\.weight|norm\.weight")
    ):
        raise common.refuse(source, "EAGLE-1", "fc.weight [d, 2d] with layers.0 and no hidden_norm or norm")
    shape = common.shape_of(source, source.config, "layers.0.", layers=source.count(r"layers\.(\d+)\."))
    common.check_count(source, source.config.get("num_hidden_layers"), shape.layers, "num_hidden_layers")
    common.check_width(source, shape.width, target)
    fields = {
        "shape": shape,
        "taps": (len(target.blocks),),
        "embeddings": common.own_embeddings(source, target),
        "bias": "fc.bias" in source.tensors or source.get("bias") is True,
    }
    return Loaded(source, fields, NAMES, unused=common.UNUSED)


def write(model: DraftModel, spec: Any, target: CausalLM) -> Written:
    """In the reference's layout."""
    shape = spec.shape
    common.inexpressible("EAGLE-1", head_norms=shape.head_norms, out_bias=shape.out_bias, mlp_bias=shape.mlp_bias)
    layers = common.layer_config(replace(shape, qkv_bias=False), target)
    config = {**layers, "architectures": ["LlamaForCausalLM"], "bias": spec.bias, "qkv_bias": shape.qkv_bias}
    return Written(config, files.as_published(model, NAMES))
