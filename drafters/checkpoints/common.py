"""What the layouts share: the shape of a block, the draft vocabulary, embeddings, and which residual streams are meant.

HS[i] is the residual stream after i blocks of the target, HS[0] its embeddings: our taps. Published files count in
other ways, and an offset of one is the most common bug of the field; here alone they are converted."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drafters import initial
from drafters.blocks import DEFAULT_THETA, Shape
from drafters.checkpoints.files import Source, Written
from specbench.errors import ConfigError
from specbench.model import CausalLM

SPECULATORS = "0.9.0"  # the version whose layout is written
TARGET_ROWS = "lm_head_of_target"  # said by checkpoints, ours alone, whose output head is rows of the target's

# tensors that say nothing a network needs
UNUSED = ("t2d", "d2t", r"(.*\.)?rotary_emb\.inv_freq", r"verifier_(norm|lm_head)\.weight")


def taps_of_streams(ids: Sequence[int]) -> tuple[int, ...]:
    """Ids that index HS: ``eagle_aux_hidden_state_layer_ids`` of speculators and vLLM."""
    return tuple(int(i) for i in ids)


def taps_of_outputs(ids: Sequence[int]) -> tuple[int, ...]:
    """Ids that mean the output of a block, HS[i+1], -1 the embeddings: ``target_layer_ids`` of z-lab and DeepSpec.

    >>> taps_of_outputs([-1, 1, 14])
    (0, 2, 15)
    """
    return tuple(int(i) + 1 for i in ids)


def shape_of(source: Source, config: Mapping[str, Any], block: str, **changes: Any) -> Shape:
    """The blocks that ``config`` describes in the terms of transformers; ``block``: prefix of the first one's tensors,
    which tell what has a bias or a norm."""
    needed = ("hidden_size", "num_attention_heads", "intermediate_size")
    lacking = [key for key in needed if not isinstance(config.get(key), int)]
    if lacking:
        raise ConfigError(f"drafter.checkpoint={source.name} does not say {', '.join(lacking)}")
    if _slides(config):
        raise ConfigError(f"drafter.checkpoint={source.name} has layers with sliding windows, which are not supported")
    width, heads = config["hidden_size"], config["num_attention_heads"]
    rope = rope_of(config)
    if rope.get("partial_rotary_factor", 1) != 1 or config.get("partial_rotary_factor", 1) not in (None, 1):
        raise ConfigError(f"drafter.checkpoint={source.name} rotates a part of each head only, which is not supported")
    known: dict[str, Any] = {
        "width": width,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_width": config.get("head_dim") or width // heads,
        "inner": config["intermediate_size"],
        "layers": config.get("num_hidden_layers") or 1,
        "eps": float(config.get("rms_norm_eps") or 1e-6),
        "rope": rope,
        "positions": int(config.get("max_position_embeddings") or 4096),
        "head_norms": f"{block}self_attn.q_norm.weight" in source.tensors,
        "qkv_bias": f"{block}self_attn.q_proj.bias" in source.tensors,
        "out_bias": f"{block}self_attn.o_proj.bias" in source.tensors,
        "mlp_bias": f"{block}mlp.down_proj.bias" in source.tensors,
        "activation": config.get("hidden_act") or "silu",
    }
    return Shape(**{**known, **changes})


def _slides(config: Mapping[str, Any]) -> bool:
    """Whether some layer attends to a window: said of each layer, or, as transformers' Qwen models do, of those from
    ``max_window_layers`` on."""
    if config.get("layer_types"):
        return "sliding_attention" in config["layer_types"]
    if not config.get("use_sliding_window") or not config.get("sliding_window"):
        return False
    return (config.get("max_window_layers") or 0) < (config.get("num_hidden_layers") or 1)


def check_count(source: Source, stated: Any, found: int, what: str) -> None:
    """Raise ConfigError where the configuration states more of something than there is."""
    if isinstance(stated, int) and stated > found:
        raise ConfigError(f"drafter.checkpoint={source.name} says {what}={stated} and holds {found}: files are missing")


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the rotary embedding as transformers 5 names them, from either way of writing them."""
    rope = dict(config.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in rope.values()):  # by kind of layer, as in Gemma 3
        rope = dict(rope.get("full_attention") or next(iter(rope.values())))
    if not rope:
        rope = dict(config.get("rope_scaling") or {})
        rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    rope["rope_theta"] = float(rope.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA)
    rope.setdefault("rope_type", "default")
    return rope


def draft_vocabulary(source: Source, target: CausalLM) -> tuple[int | None, Tensor | None]:
    """Rows of the checkpoint's own output head (None: it has none) and their ids in the target (None: all, in order).

    Raises ConfigError for a vocabulary that does not fit the target.
    """
    offsets, marks = source.tensor("d2t", 1), source.tensor("t2d", 1)
    if source.get(TARGET_ROWS) and "lm_head.weight" not in source.tensors:
        source.tensors["lm_head.weight"] = _target_rows(source, offsets, target)
    head = source.tensor("lm_head.weight")
    if marks is not None and len(marks) != target.vocab_size:
        raise ConfigError(
            f"drafter.checkpoint={source.name} was made for a vocabulary of {len(marks)} tokens, and {target.name} has "
            f"{target.vocab_size}"
        )
    if head is None:
        if offsets is not None:
            raise ConfigError(f"drafter.checkpoint={source.name} has a draft vocabulary (d2t) and no lm_head.weight")
        return None, None
    rows = len(head)
    if offsets is None:
        if rows != target.vocab_size:
            raise ConfigError(
                f"drafter.checkpoint={source.name} has an output head of {rows} tokens and no d2t to say which; "
                f"{target.name} has {target.vocab_size}"
            )
        return rows, None
    ids = _ids(offsets, rows)
    if len(ids) != rows or len(ids.unique()) != rows or not 0 <= int(ids.min()) <= int(ids.max()) < target.vocab_size:
        raise ConfigError(
            f"drafter.checkpoint={source.name}: d2t names {len(ids.unique())} different tokens from {int(ids.min())} "
            f"to {int(ids.max())}, for {rows} rows and the {target.vocab_size} tokens of {target.name}"
        )
    if marks is not None and not (int(marks.sum()) == rows and bool(marks[ids].all())):
        raise ConfigError(f"drafter.checkpoint={source.name}: d2t and t2d contradict each other")
    whole = rows == target.vocab_size and torch.equal(ids, torch.arange(rows))
    return rows, None if whole else ids


def _ids(offsets: Tensor | None, size: int) -> Tensor:
    """Target ids of a draft vocabulary by its ``d2t``; without one those of all ``size`` tokens."""
    return torch.arange(size) if offsets is None else torch.arange(len(offsets)) + offsets.long()


def _target_rows(source: Source, offsets: Tensor | None, target: CausalLM) -> Tensor:
    """The rows of the target's output head that a checkpoint's draft vocabulary names."""
    table = initial.output_rows(target).cpu()
    ids = _ids(offsets, len(table))
    if not 0 <= int(ids.min()) <= int(ids.max()) < len(table):
        raise ConfigError(f"drafter.checkpoint={source.name}: d2t names tokens that {target.name} does not have")
    return table[ids]


def without_target_rows(written: Written, target: CausalLM) -> Written:
    """``written`` without its output head, where that is rows of the target's: they are found there when it is read.

    A head over 8192 tokens would be more than half of a small checkpoint."""
    head, offsets = written.tensors.get("lm_head.weight"), written.tensors.get("d2t")
    if head is None:
        return written
    table = initial.output_rows(target).cpu()
    if not torch.equal(table[_ids(offsets, len(table))].to(head.dtype), head):
        return written
    tensors = {name: value for name, value in written.tensors.items() if name != "lm_head.weight"}
    return Written({**written.config, TARGET_ROWS: True}, tensors)


def own_embeddings(source: Source, target: CausalLM, name: str = "embed_tokens.weight") -> int | None:
    """Rows of the checkpoint's own embedding table; None where the target's is to be used. A copy of the target's is
    dropped. Raises ConfigError for a table that is too small."""
    table = source.tensor(name)
    if table is None:
        return None
    if len(table) < target.vocab_size:
        raise ConfigError(
            f"drafter.checkpoint={source.name} embeds {len(table)} tokens, and {target.name} has {target.vocab_size}"
        )
    ours = target.model.get_input_embeddings().weight
    scaled = initial.scales_embeddings(target)  # then its table would not be used as a copy is
    if not scaled and table.shape == ours.shape and torch.equal(table.to(ours.device, ours.dtype), ours):
        del source.tensors[name]
        return None
    return len(table)


def check_width(source: Source, width: int, target: CausalLM, what: str = "hidden_size") -> None:
    """Raise ConfigError unless the checkpoint is as wide as the target."""
    if width != target.width:
        raise ConfigError(
            f"drafter.checkpoint={source.name} was made for a target of {what}={width}, and {target.name} is "
            f"{target.width} wide"
        )


def check_ends(source: Source, width: int, target: CausalLM) -> None:
    """Raise ConfigError for a head that is not as wide as the target and lacks embeddings or an output of its own."""
    lacking = [what for what in ("embed_tokens.weight", "lm_head.weight") if what not in source.tensors]
    if width != target.width and lacking:
        raise ConfigError(
            f"drafter.checkpoint={source.name} is {width} wide and {target.name} {target.width}, so that it needs its "
            f"own {' and '.join(lacking)}"
        )


def refuse(source: Source, family: str, signs: str) -> ConfigError:
    """The error for a checkpoint that is not of ``family``, which would be told by ``signs``."""
    said = source.config.get("speculators_model_type") or ", ".join(source.config.get("architectures") or ["unknown"])
    some = ", ".join(sorted(source.tensors)[:4])
    return ConfigError(
        f"drafter.checkpoint={source.name} is not of the kind {family} (no {signs}): its config.json says {said}, its "
        f"first tensors are {some}"
    )


def layer_config(shape: Shape, target: CausalLM, layers: int | None = None) -> dict[str, Any]:
    """``transformer_layer_config``: the blocks in the terms of transformers. Raises ConfigError for blocks that neither
    Llama's nor Qwen3's configuration can describe."""
    biased = {shape.qkv_bias, shape.out_bias}
    if len(biased) > 1 or (shape.head_norms and shape.mlp_bias):
        raise ConfigError("these blocks have biases that the speculators layout cannot describe")
    return {
        "model_type": "qwen3" if shape.head_norms else "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": layers or shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "hidden_act": shape.activation,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.eps,
        "rope_parameters": dict(shape.rope),
        "attention_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "tie_word_embeddings": False,
    }


def speculators_config(
    kind: str, shape: Shape, target: CausalLM, drafts: int, layers: int | None = None
) -> dict[str, Any]:
    """What every configuration in the speculators layout says. ``drafts``: tokens to draft unless asked otherwise."""
    name = getattr(target.config, "_name_or_path", None) or target.name
    return {
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": drafts,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": name, "architectures": [type(target.model).__name__]},
        },
        "transformer_layer_config": layer_config(shape, target, layers),
        "tie_word_embeddings": False,
    }


def vocabulary_tensors(ids: Tensor | None, target: CausalLM) -> dict[str, Tensor]:
    """``d2t`` and ``t2d`` of a draft vocabulary; nothing where it is the whole."""
    if ids is None:
        return {}
    ids = ids.cpu()
    marks = torch.zeros(target.vocab_size, dtype=torch.bool)
    marks[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": marks}


def inexpressible(layout: str, **values: bool) -> None:
    """Raise ConfigError, naming them, if any of the values is true: the layout has no words for them."""
    wrong = [name for name, value in values.items() if value]
    if wrong:
        raise ConfigError(f"the {layout} layout cannot say {', '.join(wrong)}; this network cannot be written in it")
