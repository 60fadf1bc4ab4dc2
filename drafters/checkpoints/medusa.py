"""Medusa checkpoints: ``{head}.{layer}.linear.*`` and ``{head}.{layers}.weight``, with or without ``medusa_head.``
before them."""

import re
from typing import Any

from drafters.checkpoints import common, files
from drafters.checkpoints.files import Loaded, Written
from drafters.draft_model import DraftModel
from specbench.errors import ConfigError
from specbench.model import CausalLM


def read(path: str, target: CausalLM) -> Loaded:
    """A checkpoint for ``target``. Raises ConfigError for one of another kind, or that does not fit."""
    source = files.read(path)
    found = next(
        (m for m in (re.fullmatch(r"(medusa_heads?\.)?0\.0\.linear\.weight", n) for n in source.tensors) if m), None
    )
    if found is None:
        raise common.refuse(source, "Medusa", "0.0.linear.weight, with or without medusa_head.")
    prefix = found[1] or ""
    heads = source.count(rf"{re.escape(prefix)}(\d+)\.")
    layers = source.count(rf"{re.escape(prefix)}0\.(\d+)\.linear\.")
    first = source.tensor(found[0])
    assert first is not None
    width = first.shape[0]
    common.check_width(source, width, target)
    stated = source.get("medusa_num_heads")
    if stated is not None and stated > heads:
        raise ConfigError(f"drafter.checkpoint={source.name} says medusa_num_heads={stated} and has {heads} heads")
    output = source.tensor(f"{prefix}0.{layers}.weight")
    if output is not None and len(output) != target.vocab_size:
        raise ConfigError(
            f"drafter.checkpoint={source.name} predicts {len(output)} tokens, and {target.name} has {target.vocab_size}"
        )
    vocabulary, ids = (None, None) if output is not None else common.draft_vocabulary(source, target)
    fields = {
        "width": width,
        "taps": (len(target.blocks),),
        "heads": heads,
        "layers": layers,
        "outputs": None if output is None else len(output),
        "vocabulary": vocabulary,
    }
    return Loaded(source, fields, names(heads, layers, prefix), ids, common.UNUSED)


def names(heads: int, layers: int, prefix: str = "") -> dict[str, str]:
    """Our names and theirs."""
    table = {f"network.heads.{i}.{j}.": f"{prefix}{i}.{j}.linear." for i in range(heads) for j in range(layers)}
    table |= {f"network.outputs.{i}.": f"{prefix}{i}.{layers}." for i in range(heads)}
    return {**table, "head.": ""}


def write(model: DraftModel, spec: Any, target: CausalLM) -> Written:
    """In the reference's layout; heads that share an output matrix have it as ``lm_head.weight``, with ``d2t`` where it
    is one of a draft vocabulary."""
    tensors = files.as_published(model, names(spec.heads, spec.layers))
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": spec.heads,
        "medusa_num_layers": spec.layers,
        "medusa_fc_bias": True,  # else vLLM leaves the biases out
        "hidden_size": spec.width,
        "vocab_size": target.vocab_size,
        "base_model_name_or_path": target.name,
    }
    return Written(config, tensors | common.vocabulary_tensors(model.head.ids, target))
