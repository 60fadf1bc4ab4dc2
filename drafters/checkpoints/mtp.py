"""MTP modules: among a target's own weights, in the layouts of DeepSeek-V3, Qwen3-Next and MiMo, and in that of
speculators.

    layout        tensors                                             reads       h and the output, for what comes next
    DeepSeek-V3   model.layers.{N+i}.{enorm,hnorm,eh_proj,...}        [emb; h]    normed
    Qwen3-Next    mtp.{fc,pre_fc_norm_hidden,norm,...}, mtp.layers    [emb; h]    normed
    MiMo          model.mtp_layers.{i}.{hidden_layernorm,...}         [h; emb]    before their norms
    speculators   mtp_layers.{i}, with MiMo's names                   [emb; h]    normed

That is how serving engines run them. All norms of Qwen3-Next are stored as what is added to 1.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drafters import initial
from drafters.checkpoints import common, files
from drafters.checkpoints.files import Loaded, Source, Written
from drafters.draft_model import DraftModel
from specbench.errors import ConfigError
from specbench.model import CausalLM

NAMED = {"token_norm": "token_layernorm", "hidden_norm": "hidden_layernorm", "norm": "final_layernorm"}
DEEPSEEK = {"token_norm": "enorm", "hidden_norm": "hnorm", "input_proj": "eh_proj", "norm": "shared_head.norm"}
QWEN = {
    "token_norm": "pre_fc_norm_embedding",
    "hidden_norm": "pre_fc_norm_hidden",
    "input_proj": "fc",
    "norm": "norm",
}
ENDS = ("lm_head.weight", "d2t", "t2d")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def read(path: str, target: CausalLM) -> Loaded:
    """Modules for ``target``; of a folder that holds a target as well, nothing else is loaded. Raises ConfigError where
    there are none, or they do not fit."""
    source = files.read(path, _kept)
    if source.has(r"mtp_layers\..*"):
        return _plain(source, target, "mtp_layers.", hidden_first=False)
    if source.has(r"model\.mtp_layers\..*"):
        return _plain(source, target, "model.mtp_layers.", hidden_first=True)
    if source.has(r"mtp\..*"):
        return _qwen(source, target)
    if source.has(r"model\.layers\.\d+\.eh_proj\.weight"):
        return _deepseek(source, target)
    raise common.refuse(source, "MTP", "mtp.*, mtp_layers.*, model.mtp_layers.* or model.layers.{N}.eh_proj")


def _kept(config: Mapping[str, Any]) -> str:
    """Names of the tensors that belong to MTP modules: of a target that carries some, nothing else."""
    text = config.get("text_config") or config
    first = text.get("num_hidden_layers") or 0
    further = "|".join(str(first + i) for i in range(text.get("num_nextn_predict_layers") or 1))
    return rf"mtp\..*|(model\.)?mtp_layers\..*|model\.layers\.({further})\..*" if first else ".*"


def _plain(source: Source, target: CausalLM, prefix: str, hidden_first: bool) -> Loaded:
    """Modules with blocks like ours: speculators' and MiMo's."""
    config = source.config.get("transformer_layer_config") or source.config
    shape = common.shape_of(source, config, f"{prefix}0.", layers=1)
    common.check_width(source, shape.width, target)
    count = source.count(rf"{re.escape(prefix)}(\d+)\.")
    common.check_count(source, config.get("num_nextn_predict_layers"), count, "num_nextn_predict_layers")
    names: dict[str, str] = {}
    for i in range(count):
        ours, theirs = f"network.cells.{i}.", f"{prefix}{i}."
        names |= {f"{ours}{mine}.": f"{theirs}{name}." for mine, name in NAMED.items()}
        names |= {f"{ours}layers.0.": theirs, ours: theirs}
    normed = bool(source.get("normed_features", not hidden_first))
    fields = _fields(target, shape, count, hidden_first=hidden_first, norm_feature=normed, norm_output=normed)
    return _loaded(source, target, fields, names, whole_target=hidden_first)


def _qwen(source: Source, target: CausalLM) -> Loaded:
    """A module with a block of the target's kind, whose own norms are stored as an addition to 1."""
    for name, tensor in source.tensors.items():
        if re.fullmatch(r"mtp\.(pre_fc_norm_\w+|norm)\.weight", name):
            source.tensors[name] = tensor + 1
    _fuse_experts(source.tensors)
    layers = source.count(r"mtp\.layers\.(\d+)\.")
    names = {f"network.cells.0.{mine}.": f"mtp.{name}." for mine, name in QWEN.items()}
    names |= {f"network.cells.0.layers.{i}.layer.": f"mtp.layers.{i}." for i in range(layers)}
    fields = _fields(target, initial.target_shape(target, layers=layers), 1, foreign=True)
    return _loaded(source, target, fields, names, whole_target=True)


def _deepseek(source: Source, target: CausalLM) -> Loaded:
    """Modules with blocks of the target's kind, numbered on behind its own."""
    numbers = sorted({int(name.split(".")[2]) for name in source.tensors if name.startswith("model.layers.")})
    if any(name.endswith("_scale_inv") for name in source.tensors):
        raise ConfigError(f"drafter.checkpoint={source.name} holds 8-bit weights; give a folder with them in bfloat16")
    _fuse_experts(source.tensors)
    names: dict[str, str] = {}
    embeddings = None
    for i, number in enumerate(numbers):
        ours, theirs = f"network.cells.{i}.", f"model.layers.{number}."
        names |= {f"{ours}{mine}.": f"{theirs}{name}." for mine, name in DEEPSEEK.items()}
        names[f"{ours}layers.0.layer."] = theirs
        embeddings = common.own_embeddings(source, target, f"{theirs}embed_tokens.weight") or embeddings
    if embeddings is not None:
        raise ConfigError(f"drafter.checkpoint={source.name}: its modules' embed_tokens are not those of {target.name}")
    fields = _fields(target, initial.target_shape(target, layers=1), len(numbers), foreign=True)
    return _loaded(source, target, fields, names, whole_target=True, unused=(r".*\.shared_head\.head\.weight",))


def _fields(target: CausalLM, shape: Any, modules: int, **more: bool) -> dict[str, Any]:
    return {"shape": shape, "taps": (len(target.blocks),), "modules": modules, **more}


def _loaded(
    source: Source,
    target: CausalLM,
    fields: dict[str, Any],
    names: dict[str, str],
    whole_target: bool,
    unused: tuple[str, ...] = (),
) -> Loaded:
    """``whole_target``: the folder is a target's, whose output head is used where it lies."""
    if whole_target:
        return Loaded(source, fields, names, None, (*common.UNUSED, *unused, r"lm_head\.weight"))
    vocabulary, ids = common.draft_vocabulary(source, target)
    names = {**names, "head.": ""}
    return Loaded(source, {**fields, "outputs": vocabulary}, names, ids, (*common.UNUSED, *unused))


def _fuse_experts(tensors: dict[str, Tensor]) -> None:
    """Stack the experts' layers as transformers keeps them: gate and up [E, 2I, D] in one, down [E, D, I]."""
    found: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name in list(tensors):
        match = EXPERT.fullmatch(name)
        if match:
            found.setdefault(match[1], {})[int(match[2]), match[3]] = tensors.pop(name)
    for prefix, parts in found.items():
        experts = sorted({number for number, _ in parts})
        try:
            pairs = [torch.cat((parts[e, "gate_proj"], parts[e, "up_proj"])) for e in experts]
            tensors[f"{prefix}.gate_up_proj"] = torch.stack(pairs)
            tensors[f"{prefix}.down_proj"] = torch.stack([parts[e, "down_proj"] for e in experts])
        except KeyError as error:
            raise ConfigError(f"{prefix}: expert {error.args[0][0]} has no {error.args[0][1]}.weight") from None
        except RuntimeError as error:
            raise ConfigError(f"{prefix}: the experts' matrices are not all of a size: {error}") from None


def write(model: DraftModel, spec: Any, target: CausalLM) -> Written:
    """In the speculators layout."""
    tensors, norms = _one_module(model, spec)
    common.inexpressible("speculators", **norms)
    if spec.hidden_first:
        tensors["input_proj.weight"] = _swapped(tensors["input_proj.weight"])
    tensors = {(name if name in ENDS else f"mtp_layers.0.{name}"): value for name, value in tensors.items()}
    config = {
        "architectures": ["MTPDraftModel"],
        **common.speculators_config("mtp", spec.shape, target, max(spec.depths, 3), len(target.blocks)),
        "num_nextn_predict_layers": 1,
    }
    return Written(config, tensors | common.vocabulary_tensors(model.head.ids, target))


def write_mimo(model: DraftModel, spec: Any, target: CausalLM) -> Written:
    """As MiMo's, which vLLM serves beside a Llama-shaped target. There the target gives features after its final norm,
    and the normed output is recursed on; to our reader the file says so."""
    tensors, norms = _one_module(model, spec)
    common.inexpressible("MiMo", **norms, output_head=model.head.lm_head is not None, head_norms=spec.shape.head_norms)
    if not spec.hidden_first:
        tensors["input_proj.weight"] = _swapped(tensors["input_proj.weight"])
    for name in ("q_proj", "k_proj", "v_proj"):  # the layout has biases
        weight = tensors[f"self_attn.{name}.weight"]
        tensors.setdefault(f"self_attn.{name}.bias", torch.zeros(len(weight), dtype=weight.dtype))
    config = {
        **common.layer_config(replace(spec.shape, qkv_bias=False), target, len(target.blocks)),
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",  # whose blocks they are; transformers knows no MiMo
        "num_nextn_predict_layers": 1,
        "normed_features": True,
    }
    return Written(config, {f"model.mtp_layers.0.{name}": value for name, value in tensors.items()})


def _one_module(model: DraftModel, spec: Any) -> tuple[dict[str, Tensor], dict[str, bool]]:
    """The tensors of the only module under the names that both layouts share, and what neither can say."""
    common.inexpressible(
        "MTP", **{"modules > 1": spec.modules > 1, "foreign": spec.foreign, "layers > 1": spec.shape.layers > 1}
    )
    names = {f"network.cells.0.{mine}.": f"{name}." for mine, name in NAMED.items()}
    names |= {"network.cells.0.layers.0.": "", "network.cells.0.": "", "head.": ""}
    norms = {"norm_feature=false": not spec.norm_feature, "norm_output=false": not spec.norm_output}
    return files.as_published(model, names), norms


def _swapped(weight: Tensor) -> Tensor:
    """The projection of [h; emb] as one of [emb; h], or the other way round."""
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)
