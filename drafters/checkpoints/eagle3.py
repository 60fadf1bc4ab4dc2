"""EAGLE-3 checkpoints: the reference's layout (``midlayer.*``) with SpecForge's and NVIDIA's nested options, that of
speculators and vLLM, and DeepSpec's (``layers.0.*``)."""

import logging
from typing import Any

import torch

from drafters.checkpoints import common, files
from drafters.checkpoints.files import Loaded, Source, Written
from drafters.draft_model import DraftModel
from specbench.errors import ConfigError
from specbench.model import CausalLM

log = logging.getLogger("specbench.drafters")

LAYER_IDS = ("auto", "streams", "outputs")
DRAFTS = 4  # tokens a round, unless whoever serves it says otherwise
NESTED = ("eagle_config",)


def read(path: str, target: CausalLM, layer_ids: str = "auto") -> Loaded:
    """A checkpoint for ``target``; ``layer_ids``: see ``taps``. Raises ConfigError for one of another kind, or that
    does not fit."""
    source = files.read(path)
    if not source.has(r"(midlayer|layers\.0)\.hidden_norm\.weight"):
        raise common.refuse(source, "EAGLE-3", "midlayer.hidden_norm.weight or layers.0.hidden_norm.weight")
    block = "midlayer." if source.has(r"midlayer\..*") else "layers.0."
    fc = source.tensor("fc.weight")
    if (fc is not None) != bool(source.get("use_aux_hidden_state", True, *NESTED)):
        has = "no fc.weight and does not say" if fc is None else "fc.weight and says"
        raise ConfigError(f"drafter.checkpoint={source.name} has {has} use_aux_hidden_state=false")
    config = source.config.get("transformer_layer_config") or source.config
    shape = common.shape_of(source, config, block, layers=max(1, source.count(r"layers\.(\d+)\.")))
    stated = config.get("draft_num_hidden_layers") or config.get("num_hidden_layers")
    common.check_count(source, stated, shape.layers, "num_hidden_layers")
    target_width = source.get("target_hidden_size") or shape.width
    common.check_width(source, target_width, target)
    common.check_ends(source, shape.width, target)
    vocabulary, ids = common.draft_vocabulary(source, target)
    fields: dict[str, Any] = {
        "shape": shape,
        "taps": taps(source, target, fc.shape[1] // target_width, layer_ids)
        if fc is not None
        else (len(target.blocks),),
        "target_width": target_width,
        "vocabulary": vocabulary,
        "embeddings": common.own_embeddings(source, target),
        "norm_before_residual": bool(source.get("norm_before_residual", False, *NESTED)),
        "norm_before_fc": "input_norm.weight" in source.tensors or bool(source.get("norm_before_fc", False, *NESTED)),
        "tap_norms": "fc_norm.0.weight" in source.tensors or bool(source.get("fc_norm", False, *NESTED)),
        "norm_output": bool(source.get("norm_output", False, *NESTED)),
        "every_block": "layers.1.hidden_norm.weight" in source.tensors,
        "fuse": fc is not None,
        "fc_bias": "fc.bias" in source.tensors,
        # only NVIDIA's may lack these: elsewhere they are missing
        "token_norm": f"{block}input_layernorm.weight" in source.tensors or "eagle_config" not in source.config,
        "final_norm": "norm.weight" in source.tensors or bool(source.get("use_last_layernorm", True, *NESTED)),
    }
    return Loaded(source, fields, names(block), ids, common.UNUSED)


def names(block: str = "layers.0.") -> dict[str, str]:
    """Our names and theirs; ``block``: what the first block is called."""
    return {
        "network.layers.0.": block,
        "network.": "",
        "head.": "",
        "embedding.table.": "embed_tokens.",
    }


def taps(source: Source, target: CausalLM, count: int, layer_ids: str) -> tuple[int, ...]:
    """Which residual streams the ``count`` parts of ``fc`` read.

    ``eagle_config`` leaves open what its ids mean: SpecForge and ModelOpt write block outputs, some published files
    write streams, and vLLM reads streams. ``layer_ids`` settles it; ``auto`` takes them for streams, as vLLM does,
    unless they are the trainers' default, (2, N/2, N-3) written as outputs."""
    blocks = len(target.blocks)
    default = (2, blocks // 2, blocks - 3)
    outputs = source.get("target_layer_ids")
    if outputs is not None:
        return common.taps_of_outputs(outputs)
    nested = (source.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if nested is not None:
        if layer_ids == "auto":
            layer_ids = "outputs" if common.taps_of_outputs(nested) == default else "streams"
            other = "streams" if layer_ids == "outputs" else "outputs"
            log.warning(
                "%s does not say what its eagle_aux_hidden_state_layer_ids %s mean; they are taken for %s. If "
                "acceptance is low, try drafter.layer_ids=%s",
                *(source.name, nested, layer_ids, other),
            )
        return common.taps_of_outputs(nested) if layer_ids == "outputs" else common.taps_of_streams(nested)
    streams = source.get("eagle_aux_hidden_state_layer_ids")
    if streams is not None:
        return common.taps_of_streams(streams)
    if count != len(default):
        raise ConfigError(
            f"drafter.checkpoint={source.name} reads {count} residual streams and does not say which "
            "(eagle_aux_hidden_state_layer_ids)"
        )
    return default


def write(model: DraftModel, spec: Any, target: CausalLM) -> Written:
    """In the speculators layout, which vLLM serves. It reads taps in rising order, so that is how they are written."""
    common.inexpressible(
        "speculators",
        **{"every_block": spec.every_block, "fuse=false": not spec.fuse, "fc_bias": spec.fc_bias},
        **{"token_norm=false": not spec.token_norm, "final_norm=false": not spec.final_norm},
    )
    tensors = files.as_published(model, names()) | common.vocabulary_tensors(model.head.ids, target)
    order = sorted(range(len(spec.taps)), key=lambda i: spec.taps[i])
    for name in ("fc.weight", "input_norm.weight"):
        if name in tensors:
            parts = tensors[name].chunk(len(order), dim=-1)
            tensors[name] = torch.cat([parts[i] for i in order], dim=-1)
    norms = {
        f"fc_norm.{place}.weight": tensors[f"fc_norm.{i}.weight"] for place, i in enumerate(order) if spec.tap_norms
    }
    config = {
        "architectures": ["Eagle3DraftModel"],
        **common.speculators_config("eagle3", spec.shape, target, DRAFTS),
        "draft_vocab_size": spec.vocabulary or target.vocab_size,
        "target_hidden_size": None if spec.target_width == spec.shape.width else spec.target_width,
        "eagle_aux_hidden_state_layer_ids": [spec.taps[i] for i in order],
        "num_aux_hidden_states": len(order),
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.tap_norms,
        "norm_output": spec.norm_output,
    }
    return Written(config, tensors | norms)
