"""DFlash checkpoints: z-lab's layout (``dflash_config``), that of speculators, and DeepSpec's, which are DSpark's
without a sequential head."""

from typing import Any

import torch
from torch import Tensor

from drafters.checkpoints import common, files
from drafters.checkpoints.files import Loaded, Source, Written
from drafters.draft_model import DraftModel
from specbench.errors import ConfigError
from specbench.model import CausalLM

NESTED = ("dflash_config",)
HEADS = r"(markov_head\.)?markov_w1\.weight|confidence_(head\.)?proj\.weight"  # of DSpark
NAMES = {
    "network.confidence_head.": "confidence_head.proj.",
    "network.": "",
    "head.": "",
    "embedding.table.": "embed_tokens.",
}


def read(path: str, target: CausalLM) -> Loaded:
    """A checkpoint for ``target``. Raises ConfigError for one of another kind, or that does not fit."""
    source = files.read(path)
    if source.has(HEADS):
        raise ConfigError(f"drafter.checkpoint={path} has DSpark's sequential or confidence head; use drafter=dspark")
    fields, ids = backbone(source, target, "DFlash")
    return Loaded(source, fields, NAMES, ids, unused())


def backbone(source: Source, target: CausalLM, family: str) -> tuple[dict[str, Any], Any]:
    """Fields of ``drafters.dflash.Spec``, and the ids of the draft vocabulary."""
    if not {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_proj.weight"} <= source.tensors.keys():
        raise common.refuse(source, family, "fc.weight, hidden_norm.weight and layers.0.self_attn.q_proj.weight")
    config = source.config.get("transformer_layer_config") or source.config
    shape = common.shape_of(source, config, "layers.0.", layers=source.count(r"layers\.(\d+)\."))
    common.check_count(source, config.get("num_hidden_layers"), shape.layers, "num_hidden_layers")
    target_width = source.get("target_hidden_size") or shape.width
    common.check_width(source, target_width, target)
    common.check_ends(source, shape.width, target)
    if source.get("is_causal", source.get("causal", False, *NESTED), *NESTED):
        raise ConfigError(f"drafter.checkpoint={source.name} has is_causal=true: a causal block is not supported")
    block = int(source.need("block_size", *NESTED))
    if block < 2:
        raise ConfigError(f"drafter.checkpoint={source.name}: block_size={block} drafts nothing")
    mask = int(source.need("mask_token_id", *NESTED))
    embeddings = common.own_embeddings(source, target)
    if not 0 <= mask < (embeddings or target.vocab_size):
        raise ConfigError(
            f"drafter.checkpoint={source.name}: mask_token_id={mask} is not among the "
            f"{embeddings or target.vocab_size} tokens that are embedded"
        )
    vocabulary, ids = common.draft_vocabulary(source, target)
    cap = source.get("final_logit_softcapping", None, *NESTED)
    published = "dflash_config" in source.config
    return {
        "shape": shape,
        "taps": taps(source, shape.layers),
        "target_width": target_width,
        "block": block,
        "mask": mask,
        "anchor_first": anchor_first(source),
        "vocabulary": vocabulary,
        "embeddings": embeddings,
        "embedding_scale": float(source.get("input_embedding_scale", 1.0, *NESTED)) if published else None,
        "logit_scale": float(source.get("output_multiplier", 1.0, *NESTED)),
        "logit_cap": float(cap) if cap else None,
    }, ids


def taps(source: Source, layers: int) -> tuple[int, ...]:
    """Which residual streams ``fc`` reads. z-lab's own code fills in ids that are not given, one per layer, by
    ``num_target_layers``."""
    streams = source.get("aux_hidden_state_layer_ids")
    if streams is not None:
        return common.taps_of_streams(streams)
    outputs = source.get("target_layer_ids", None, *NESTED)
    if outputs is None and "dflash_config" in source.config:
        blocks = int(source.need("num_target_layers", *NESTED))
        outputs = [blocks // 2] if layers == 1 else [round(1 + i * (blocks - 4) / (layers - 1)) for i in range(layers)]
    if outputs is None:
        source.need("target_layer_ids", *NESTED)
    return common.taps_of_outputs(outputs)


def anchor_first(source: Source) -> bool:
    """Whether the anchor's position predicts the token after it: as speculators says; always in DeepSpec's files, which
    have their options at the top, and in DSpark heads; not in z-lab's, which have them in ``dflash_config``."""
    if source.config.get("speculators_model_type") is not None:
        default = source.config["speculators_model_type"] == "dspark"
        return bool(source.get("sample_from_anchor", default))
    return "dflash_config" not in source.config or source.get("projector_type", None, *NESTED) == "dspark"


def unused() -> list[str]:
    """What such a checkpoint may hold beyond its network."""
    return [*common.UNUSED, "mask_embedding"]


def write(model: DraftModel, spec: Any, target: CausalLM) -> Written:
    """In the speculators layout, which vLLM serves."""
    tensors, config = write_backbone(model, spec, target, "dflash")
    return Written({"architectures": ["DFlashDraftModel"], **config}, tensors)


def write_backbone(
    model: DraftModel, spec: Any, target: CausalLM, kind: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, with taps in rising order as vLLM reads them, and configuration."""
    common.inexpressible(
        "speculators",
        **{"head_norms=false": not spec.shape.head_norms, "embedding_scale": spec.embedding_scale is not None},
        **{"logit_scale": spec.logit_scale != 1, "logit_cap": spec.logit_cap is not None},
    )
    tensors = files.as_published(model, NAMES) | common.vocabulary_tensors(model.head.ids, target)
    order = sorted(range(len(spec.taps)), key=lambda i: spec.taps[i])
    parts = tensors["fc.weight"].chunk(len(order), dim=1)
    tensors["fc.weight"] = torch.cat([parts[i] for i in order], dim=1)
    # sliding_window_non_causal is left unsaid: there are no sliding windows, and vLLM takes false for all layers causal
    return tensors, {
        **common.speculators_config(kind, spec.shape, target, spec.drafts),
        "draft_vocab_size": spec.vocabulary or target.vocab_size,
        "target_hidden_size": None if spec.target_width == spec.shape.width else spec.target_width,
        "aux_hidden_state_layer_ids": [spec.taps[i] for i in order],
        "block_size": spec.block,
        "mask_token_id": spec.mask,
        "sample_from_anchor": spec.anchor_first,
    }
