"""Published checkpoints: each layout is written here as its authors document it, and must be read as they mean it.

What a checkpoint drafts is computed a second time by a few plain formulas from its tensors and from the residual
streams of the bare Hugging Face target, so names, index conventions, feature and recursion are tested together. See
also test_parity.py, which compares with the authors' own code."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from conftest import prompts, run
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3NextConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

from drafters import cached, dflash, dspark, eagle, eagle1, medusa, mtp
from drafters.checkpoints import files
from drafters.checkpoints import mtp as mtp_reader
from drafters.dflash import DFlash
from drafters.dspark import DSpark
from drafters.eagle import Eagle
from drafters.eagle1 import Eagle1
from drafters.medusa import Medusa
from drafters.mtp import Mtp
from drafters.none import NoDrafter
from specbench.drafting import Request
from specbench.errors import ConfigError
from specbench.model import CausalLM
from specbench.stopping import StopRule
from specbench.targets import byte_tokenizer, load_tiny

VOCABULARY, WIDTH, HEAD, INNER, BLOCKS = 259, 48, 12, 40, 8
EPS, THETA = 1e-5, 500000.0
CONFIG = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": HEAD, "rms_norm_eps": EPS, "hidden_act": "silu", "vocab_size": VOCABULARY, "num_hidden_layers": 1,
    "max_position_embeddings": 512, "rope_theta": THETA,
}  # fmt: skip
FAMILIES = {"eagle3": Eagle, "eagle1": Eagle1, "medusa": Medusa, "mtp": Mtp, "dflash": DFlash, "dspark": DSpark}
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
K, STOP = 3, StopRule(6)

Tensors = dict[str, Tensor]


# The targets


@cache
def target(kind: str = "llama") -> CausalLM:
    if kind == "deepseek":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(DEEPSEEK)
        lm = CausalLM(model, byte_tokenizer(), name="tiny-deepseek", engine="plain")
    else:
        lm = load_tiny(kind, layers=BLOCKS, engine="plain")
    for weight in [value for name, value in lm.model.named_parameters() if name.endswith("norm.weight")]:
        weight.mul_(Random(1).norm(len(weight)))  # else a norm of a norm would be the same
    return lm


DEEPSEEK = DeepseekV3Config(
    vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER, moe_intermediate_size=24, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
    n_group=2, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    first_k_dense_replace=1, rms_norm_eps=EPS, max_position_embeddings=512, initializer_range=0.3, bos_token_id=0,
    eos_token_id=1, pad_token_id=1,
)  # fmt: skip


@dataclass(frozen=True)
class Streams:
    """Residual streams [T, D] of a text: ``at[i]`` after i blocks; ``feature``: after the final norm."""

    at: list[Tensor]
    feature: Tensor


def streams(lm: CausalLM, text: Sequence[int]) -> Streams:
    """By hooks on the bare model."""
    found: list[Tensor] = [lm.model.get_input_embeddings()(torch.tensor(text))]
    hooks = [block.register_forward_hook(lambda _m, _i, out: found.append(out[0])) for block in lm.blocks]
    output = lm.model(input_ids=torch.tensor([list(text)]), use_cache=False, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    assert len(found) == len(lm.blocks) + 1
    return Streams(found, output.hidden_states[-1][0])


# Plain formulas


def linear(t: Tensors, name: str, x: Tensor) -> Tensor:
    return F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))


def normed(t: Tensors, name: str, x: Tensor) -> Tensor:
    """Without a weight of this name there is no such norm."""
    weight = t.get(f"{name}.weight")
    return x if weight is None else x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def turned(x: Tensor, start: int, theta: float) -> Tensor:
    """Heads [S, H, E] turned to the positions from ``start`` on."""
    half = x.shape[-1] // 2
    angles = (start + torch.arange(len(x)))[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def attention(t: Tensors, name: str, x: Tensor, theta: float, context: Tensor | None = None) -> Tensor:
    """Causal over x [S, D]; or of x over ``context`` [C, D] and all of x behind it."""
    read = x if context is None else torch.cat((context, x))
    q, k, v = (
        linear(t, f"{name}.{n}_proj", y).unflatten(-1, (-1, HEAD)) for n, y in (("q", x), ("k", read), ("v", read))
    )
    q = turned(normed(t, f"{name}.q_norm", q), len(read) - len(x), theta)
    k = turned(normed(t, f"{name}.k_norm", k), 0, theta)
    k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], dim=1) for y in (k, v))
    scores = torch.einsum("qhe,khe->hqk", q, k) / math.sqrt(HEAD)
    if context is None:
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    return linear(t, f"{name}.o_proj", torch.einsum("hqk,khe->qhe", scores.softmax(-1), v).flatten(1))


def block(
    t: Tensors, name: str, x: Tensor, theta: float, token: Tensor | None = None, context: Tensor | None = None
) -> Tensor:
    """A Llama block; one with a ``hidden_norm`` reads the ``token`` beside x."""
    reads = normed(t, f"{name}.input_layernorm", x)
    if f"{name}.hidden_norm.weight" in t:
        assert token is not None
        reads = torch.cat((normed(t, f"{name}.input_layernorm", token), normed(t, f"{name}.hidden_norm", x)), dim=-1)
    x = x + attention(t, f"{name}.self_attn", reads, theta, context)
    y = normed(t, f"{name}.post_attention_layernorm", x)
    gated = F.silu(linear(t, f"{name}.mlp.gate_proj", y)) * linear(t, f"{name}.mlp.up_proj", y)
    return x + linear(t, f"{name}.mlp.down_proj", gated)


def embed(case: "Case", tokens: Sequence[int] | Tensor) -> Tensor:
    own = case.tensors.get("embed_tokens.weight")
    table = target(case.target).model.get_input_embeddings().weight if own is None else own
    return table[torch.as_tensor(tokens)]


def logits_of(case: "Case", hidden: Tensor) -> Tensor:
    own = case.tensors.get("lm_head.weight")
    return hidden @ (target(case.target).model.get_output_embeddings().weight if own is None else own).T


def likeliest(case: "Case", logits: Tensor) -> int:
    row = int(logits.argmax())
    return row + int(case.tensors["d2t"][row]) if "d2t" in case.tensors else row


@dataclass(frozen=True)
class Recursive:
    """A head that recurses on a feature. features: of the streams, what the network is handed [T, F]. encode: those as
    it takes its own. cell: tokens' embeddings and features [T, D] -> what the head reads, and the next features.
    deeper: the cells of the modules behind the first, each of which reads the whole output of the one before."""

    features: Callable[[Streams], Tensor]
    cell: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    encode: Callable[[Tensor], Tensor] = lambda features: features
    deeper: Sequence[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = ()

    def drafts(self, case: "Case", text: list[int], k: int) -> list[int]:
        known = list(text)
        h = self.encode(self.features(streams(target(case.target), text[:-1])))
        for hidden in self.steps(case, h, known, k):
            token = likeliest(case, logits_of(case, hidden))
            known.append(token)  # which the next step reads
        return known[len(text) :]

    def steps(self, case: "Case", h: Tensor, known: list[int], k: int) -> Iterator[Tensor]:
        """What the head reads at each step; ``known`` grows meanwhile, or holds enough."""
        first = 1
        for j in range(k):
            cell = (self.cell, *self.deeper)[j] if self.deeper else self.cell
            out, following = cell(embed(case, known[first : first + len(h)]), h)
            yield out[-1]
            if self.deeper:  # at position t the token t+1+j
                h, first = following, first + 1
            else:
                h = torch.cat((h, following[-1:]))


@dataclass(frozen=True)
class Parallel:
    """Medusa heads."""

    prefix: str
    layers: int

    def drafts(self, case: "Case", text: list[int], k: int) -> list[int]:
        feature = streams(target(case.target), text[:-1]).feature[-1]
        return [likeliest(case, logits) for logits in self.logits(case, feature)[:k]]

    def logits(self, case: "Case", feature: Tensor) -> list[Tensor]:
        made = []
        for i in range(3):
            x = feature
            for j in range(self.layers):
                x = x + F.silu(linear(case.tensors, f"{self.prefix}{i}.{j}.linear", x))
            own = case.tensors.get(f"{self.prefix}{i}.{self.layers}.weight")
            made.append(logits_of(case, x) if own is None else x @ own.T)
        return made


@dataclass(frozen=True)
class Blockwise:
    """A DFlash or DSpark head. The first draft is read from position ``first`` of the block."""

    taps: Sequence[int]
    mask: int
    first: int
    layers: int
    kind: str = "none"

    def drafts(self, case: "Case", text: list[int], k: int) -> list[int]:
        t, read = case.tensors, streams(target(case.target), text[:-1])
        context = normed(t, "hidden_norm", linear(t, "fc", torch.cat([read.at[tap] for tap in self.taps], dim=-1)))
        x = embed(case, [text[-1], *[self.mask] * (k - 1 + self.first)])
        for i in range(self.layers):
            x = block(t, f"layers.{i}", x, case.theta, context=context)
        x = normed(t, "norm", x)[self.first : self.first + k]
        made: list[int] = []
        state = None
        for hidden in x:
            added, _, state = added_by_head(t, self.kind, made[-1] if made else text[-1], hidden, state)
            made.append(likeliest(case, logits_of(case, hidden) + added))
        return made


def added_by_head(
    t: Tensors, kind: str, token: int, h: Tensor, s: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What DSpark's sequential head adds to the logits; the logit of confidence; the recurrent state."""
    if kind == "none":
        return torch.zeros(()), torch.zeros(()), None
    part = {n.removeprefix("markov_head.").replace("confidence_head.proj", "confidence_proj"): v for n, v in t.items()}
    w = part["markov_w1.weight"][token]
    read = w
    if kind == "gated":
        read = linear(part, "gate_proj", torch.cat((h, w))).sigmoid() * w
    if kind == "rnn":
        s = torch.zeros_like(w) if s is None else s
        g, c, o = linear(part, "joint_proj", torch.cat((s, w, h))).chunk(3)
        s = g.sigmoid() * s + (1 - g.sigmoid()) * c.tanh()
        read = o.tanh()
    confidence = torch.zeros(())
    if "confidence_proj.weight" in part:
        joint = torch.cat((h, w)) if part["confidence_proj.weight"].shape[1] > WIDTH else h
        confidence = linear(part, "confidence_proj", joint)[0]
    return linear(part, "markov_w2", read), confidence, s


# The layouts


@dataclass(frozen=True)
class Case:
    """A checkpoint. spec: what is to be read of it (fields of the shape by their own names). plain: how it drafts.
    options: of the drafter."""

    name: str
    config: dict[str, Any]
    tensors: Tensors
    spec: dict[str, Any]
    plain: Any
    max_k: int | None = None
    target: str = "llama"
    theta: float = THETA
    file: str = "model.safetensors"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        return self.name.split("/")[0]

    def save(self, folder: Path) -> str:
        return saved(folder, self.config, self.tensors, self.file)

    def drafter(self, folder: Path, **more: Any) -> Any:
        return FAMILIES[self.family](checkpoint=self.save(folder), **self.options, **more)


def saved(folder: Path, config: Any, tensors: dict[str, Any], file: str = "model.safetensors") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return str(folder)


class Random:
    """Weights of a checkpoint, the same at each call."""

    def __init__(self, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator) / math.sqrt(size[-1])

    def norm(self, size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=self.generator)

    def block(
        self,
        name: str,
        reads: int = WIDTH,
        norms: Sequence[str] = ("input_layernorm", "post_attention_layernorm"),
        head_norms: bool = False,
        qkv_bias: bool = False,
    ) -> Tensors:
        sizes = {"q_proj": (WIDTH, reads), "k_proj": (24, reads), "v_proj": (24, reads), "o_proj": (WIDTH, WIDTH)}
        made = {f"{name}.self_attn.{key}.weight": self.matrix(*size) for key, size in sizes.items()}
        sizes = {"gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER)}
        made |= {f"{name}.mlp.{key}.weight": self.matrix(*size) for key, size in sizes.items()}
        made |= {f"{name}.{key}.weight": self.norm(WIDTH) for key in norms}
        if head_norms:
            made |= {f"{name}.self_attn.{key}_norm.weight": self.norm(HEAD) for key in "qk"}
        if qkv_bias:
            made |= {
                f"{name}.self_attn.{key}_proj.bias": self.norm(n) - 1 for key, n in (("q", 48), ("k", 24), ("v", 24))
            }
        return made

    def vocabulary(self, rows: int = 40) -> Tensors:
        """A draft vocabulary: a head, offsets and marks."""
        ids = torch.randperm(VOCABULARY, generator=self.generator)[:rows].sort().values
        marks = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, True)
        return {"lm_head.weight": self.matrix(rows, WIDTH), "d2t": ids - torch.arange(rows), "t2d": marks}


ALL_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def eagle3(
    name: str,
    config: dict[str, Any],
    taps: Sequence[int],
    blocks: Sequence[str] = ("layers.0",),
    every_block: bool = False,
    head_norms: bool = False,
    norms: Sequence[str] = ALL_NORMS,
    fuse: bool = True,
    further: Callable[[Random], Tensors] = lambda random: {},
    without: Sequence[str] = (),
    spec: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    theta: float = THETA,
) -> Case:
    """``taps``: those that are to be read."""
    random = Random(3)
    t: Tensors = {"norm.weight": random.norm(WIDTH), **random.vocabulary()}
    for i, block_name in enumerate(blocks):
        token = i == 0 or every_block
        plain_norms = [norm for norm in ALL_NORMS if norm != "hidden_norm"]
        t |= random.block(block_name, (1 + token) * WIDTH, norms if token else plain_norms, head_norms)
    if fuse:
        t["fc.weight"] = random.matrix(WIDTH, len(taps) * WIDTH)
    t |= further(random)
    t = {key: value for key, value in t.items() if key not in without}

    def encode(features: Tensor) -> Tensor:
        features = normed(t, "input_norm", features)
        return linear(t, "fc", features) if fuse else features

    def cell(token: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        for block_name in blocks:
            x = block(t, block_name, x, theta, token)
        return normed(t, "norm", x), x

    def features(read: Streams) -> Tensor:
        return torch.cat([read.at[tap] for tap in taps], dim=-1) if fuse else read.feature

    expected = {
        "taps": tuple(taps), "target_width": WIDTH, "layers": len(blocks), "every_block": every_block, "fuse": fuse,
        "head_norms": head_norms, "vocabulary": 40, "embeddings": None, "norm_before_fc": "input_norm.weight" in t,
        "tap_norms": False, "norm_output": False, "norm_before_residual": False, "fc_bias": False,
        "token_norm": "input_layernorm" in norms, "final_norm": "norm.weight" in t, "eps": EPS, "inner": INNER,
        "rope": {"rope_type": "default", "rope_theta": theta}, **(spec or {}),
    }  # fmt: skip
    return Case(
        f"eagle3/{name}", config, t, expected, Recursive(features, cell, encode), theta=theta, options=options or {}
    )


def nvidia(**nested: Any) -> dict[str, Any]:
    return CONFIG | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": nested}


def own_embeddings(random: Random) -> Tensors:
    return {"embed_tokens.weight": random.matrix(VOCABULARY, WIDTH)}


def whole_vocabulary(random: Random) -> Tensors:
    return {"lm_head.weight": random.matrix(VOCABULARY, WIDTH), **own_embeddings(random)}


NO_ROPE = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
REFERENCE = NO_ROPE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": 40}
SPECULATORS = {"speculators_version": "0.9.0", "tie_word_embeddings": False}
NESTED_LAYER = NO_ROPE | {"rope_parameters": {"rope_theta": THETA, "rope_type": "default"}}


def eagle3_layouts() -> list[Case]:
    midlayer = ("midlayer",)
    return [
        eagle3("reference", REFERENCE, (2, 4, 5), midlayer, theta=10000.0),
        eagle3(
            "reference with embeddings", REFERENCE, (2, 4, 5), midlayer, further=own_embeddings, theta=10000.0,
            spec={"embeddings": VOCABULARY},
        ),
        eagle3(
            "reference with the target's embeddings", REFERENCE, (2, 4, 5), midlayer, theta=10000.0,
            further=lambda random: {"embed_tokens.weight": target().model.get_input_embeddings().weight.clone()},
        ),
        eagle3(
            "reference, whole vocabulary", REFERENCE | {"draft_vocab_size": VOCABULARY}, (2, 4, 5), midlayer,
            further=lambda random: {"lm_head.weight": random.matrix(VOCABULARY, WIDTH)}, without=("d2t", "t2d"),
            theta=10000.0, spec={"vocabulary": VOCABULARY},
        ),
        eagle3("specforge", nvidia(use_aux_hidden_state=True), (2, 4, 5), midlayer),
        eagle3(
            "speculators, two layers",
            SPECULATORS | {
                "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": 40,
                "eagle_aux_hidden_state_layer_ids": [0, 3, 8], "transformer_layer_config": NESTED_LAYER,
            },
            (0, 3, 8), ("layers.0", "layers.1"), head_norms=True, further=own_embeddings,
            spec={"embeddings": VOCABULARY},
        ),
        eagle3(
            "nvidia", nvidia(eagle_aux_hidden_state_layer_ids=[4, 6, 8]), (4, 6, 8), without=("t2d",),
        ),
        eagle3(
            "nvidia without norm", nvidia(eagle_aux_hidden_state_layer_ids=[1, 3, 4], use_last_layernorm=False),
            (2, 4, 5), without=("norm.weight", "t2d"),
        ),
        eagle3(
            "nvidia without input_layernorm", nvidia(eagle_aux_hidden_state_layer_ids=[1, 2, 3]), (2, 3, 4),
            norms=("hidden_norm", "post_attention_layernorm"), options={"layer_ids": "outputs"},
        ),
        eagle3(
            "nvidia without fc", nvidia(use_aux_hidden_state=False), (BLOCKS,), fuse=False,
            without=("t2d", "d2t", "lm_head.weight"), spec={"vocabulary": None},
        ),
        eagle3(
            "nvidia with norm_before_fc", nvidia(eagle_aux_hidden_state_layer_ids=[4, 6, 8], norm_before_fc=True),
            (4, 6, 8), further=lambda random: {"input_norm.weight": random.norm(3 * WIDTH)},
        ),
        eagle3("nvidia, two layers", nvidia(), (2, 4, 5), ("layers.0", "layers.1")),
        eagle3(
            "deepspec",
            CONFIG | {
                "architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0, 2, 3, 5, 7], "num_hidden_layers": 2,
            },
            (1, 3, 4, 6, 8), ("layers.0", "layers.1"), every_block=True, head_norms=True, further=whole_vocabulary,
            without=("d2t", "t2d"), spec={"vocabulary": VOCABULARY, "embeddings": VOCABULARY},
        ),
    ]  # fmt: skip


def eagle1_case(name: str, bias: bool, qkv_bias: bool = False, layers: int = 1, copied: bool = True) -> Case:
    random = Random(5)
    t: Tensors = {"fc.weight": random.matrix(WIDTH, 2 * WIDTH)}
    for i in range(layers):
        norms = ("input_layernorm", "post_attention_layernorm")[i == 0 :]
        t |= random.block(f"layers.{i}", norms=norms, qkv_bias=qkv_bias)
    if bias:
        t["fc.bias"] = random.norm(WIDTH) - 1
    t |= (
        {"embed_tokens.weight": target().model.get_input_embeddings().weight.clone()}
        if copied
        else own_embeddings(random)
    )

    def cell(token: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        x = linear(t, "fc", torch.cat((token, x), dim=-1))
        for i in range(layers):
            x = block(t, f"layers.{i}", x, THETA)
        return x, x

    expected = {
        "taps": (BLOCKS,), "layers": layers, "bias": bias, "qkv_bias": qkv_bias,
        "embeddings": None if copied else VOCABULARY,
    }  # fmt: skip
    config = CONFIG | {"architectures": ["LlamaForCausalLM"], "bias": bias, "qkv_bias": qkv_bias}
    return Case(
        f"eagle1/{name}", config, t, expected, Recursive(lambda read: read.feature, cell), file="pytorch_model.bin"
    )


def medusa_case(name: str, prefix: str, own: bool, layers: int = 1, file: str = "model.safetensors") -> Case:
    random = Random(6)
    t: Tensors = {}
    for i in range(3):
        for j in range(layers):
            t |= {f"{prefix}{i}.{j}.linear.weight": random.matrix(WIDTH, WIDTH)}
            t |= {f"{prefix}{i}.{j}.linear.bias": random.norm(WIDTH) - 1}
        if own:
            t[f"{prefix}{i}.{layers}.weight"] = random.matrix(VOCABULARY, WIDTH)
    config = {"medusa_num_heads": 3, "medusa_num_layers": layers}
    expected = {
        "taps": (BLOCKS,),
        "heads": 3,
        "layers": layers,
        "outputs": VOCABULARY if own else None,
        "vocabulary": None,
    }
    return Case(f"medusa/{name}", config, t, expected, Parallel(prefix, layers), max_k=3, file=file)


MIMO = CONFIG | {
    "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_hidden_layers": BLOCKS,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
MTP_NORMS = ("input_layernorm", "post_attention_layernorm", "token_layernorm", "hidden_layernorm", "final_layernorm")


def mtp_plain_case(name: str, config: dict[str, Any], prefix: str, modules: int = 1, **more: Any) -> Case:
    """MiMo's layout, and that of speculators, which names alike and means otherwise."""
    native = prefix.startswith("model.")
    random = Random(7)
    t: Tensors = {}
    for i in range(modules):
        t |= random.block(f"{prefix}{i}", norms=MTP_NORMS, qkv_bias=native, head_norms=not native)
        t[f"{prefix}{i}.input_proj.weight"] = random.matrix(WIDTH, 2 * WIDTH)

    def cell(module: int, token: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        here = f"{prefix}{module}"
        parts = normed(t, f"{here}.token_layernorm", token), normed(t, f"{here}.hidden_layernorm", x)
        x = linear(t, f"{here}.input_proj", torch.cat(parts[::-1] if native else parts, dim=-1))
        x = block(t, here, x, THETA)
        out = normed(t, f"{here}.final_layernorm", x)
        return out, x if native else out

    cells = [partial(cell, i) for i in range(modules)]
    expected = {
        "taps": (BLOCKS,), "modules": modules, "depths": modules, "way": "recurse" if modules == 1 else "depths",
        "hidden_first": native, "norm_feature": not native, "norm_output": not native, "foreign": False, "layers": 1,
        "outputs": None, "embeddings": None, "qkv_bias": native, "head_norms": not native,
    }  # fmt: skip
    plain = Recursive(lambda read: read.at[-1] if native else read.feature, cells[0], deeper=cells[1:])
    return Case(f"mtp/{name}", config, t, expected, plain, max_k=modules if modules > 1 else None, **more)


def deepseek_case(modules: int = 1) -> Case:
    """Behind a target's own blocks, experts apart, with copies of the target's embeddings and head."""
    random = Random(8)
    lm = target("deepseek")
    t: Tensors = {"lm_head.weight": lm.model.get_output_embeddings().weight.clone()}
    t["model.layers.0.unread.weight"] = torch.ones(1)
    cells = []
    for i in range(modules):
        name = f"model.layers.{3 + i}"
        layer = DeepseekV3DecoderLayer(DEEPSEEK, 2).requires_grad_(False)
        for key, value in layer.state_dict().items():
            value.copy_(random.norm(len(value)) if value.dim() == 1 else random.matrix(*value.shape))
            if ".experts." not in key:
                t[f"{name}.{key}"] = value.clone()
        for e, (joint, down) in enumerate(
            zip(layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj, strict=True)
        ):
            for key, value in zip(("gate_proj", "up_proj", "down_proj"), (*joint.chunk(2), down), strict=True):
                t[f"{name}.mlp.experts.{e}.{key}.weight"] = value.clone()
        t |= {f"{name}.{key}.weight": random.norm(WIDTH) for key in ("enorm", "hnorm", "shared_head.norm")}
        t[f"{name}.eh_proj.weight"] = random.matrix(WIDTH, 2 * WIDTH)
        t[f"{name}.embed_tokens.weight"] = lm.model.get_input_embeddings().weight.clone()
        t[f"{name}.shared_head.head.weight"] = lm.model.get_output_embeddings().weight.clone()
        cells.append(partial(deepseek_cell, lm, t, name, layer))
    expected = {
        "taps": (3,), "modules": modules, "way": "recurse" if modules == 1 else "depths", "hidden_first": False,
        "norm_feature": True, "norm_output": True, "foreign": True, "embeddings": None, "outputs": None,
    }  # fmt: skip
    config = DEEPSEEK.to_dict() | {"num_nextn_predict_layers": modules}
    plain = Recursive(lambda read: read.feature, cells[0], deeper=cells[1:])
    name = f"deepseek, {modules} modules" if modules > 1 else "deepseek"
    return Case(f"mtp/{name}", config, t, expected, plain, target="deepseek", max_k=modules if modules > 1 else None)


def deepseek_cell(lm: CausalLM, t: Tensors, name: str, layer: Any, token: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    parts = normed(t, f"{name}.enorm", token), normed(t, f"{name}.hnorm", x)
    x = causal(lm.model.model.rotary_emb, layer, linear(t, f"{name}.eh_proj", torch.cat(parts, dim=-1)))
    out = normed(t, f"{name}.shared_head.norm", x)
    return out, out


def causal(rotary: Any, layer: Any, x: Tensor) -> Tensor:
    """A block of transformers' own, over x [S, D]."""
    mask = torch.full((1, 1, len(x), len(x)), -torch.inf).triu(1)
    out = layer(x[None], attention_mask=mask, position_embeddings=rotary(x[None], torch.arange(len(x))[None]))
    return (out[0] if isinstance(out, tuple) else out)[0]


MASK = 258


def blockwise(
    name: str,
    config: dict[str, Any],
    taps: Sequence[int],
    layers: int = 2,
    anchor_first: bool = False,
    ends: bool = False,
    kind: str = "none",
    confidence: int | None = None,
    flat: bool = False,
    spec: dict[str, Any] | None = None,
) -> Case:
    """``ends``: with embeddings and head. ``confidence``: numbers that its head reads."""
    random = Random(9)
    t = {"fc.weight": random.matrix(WIDTH, len(taps) * WIDTH)}
    t |= {f"{key}.weight": random.norm(WIDTH) for key in ("hidden_norm", "norm")}
    for i in range(layers):
        t |= random.block(f"layers.{i}", head_norms=True)
    if ends:
        t |= whole_vocabulary(random)
    rank = 6
    if kind != "none":
        head = {f"markov_{key}.weight": random.matrix(VOCABULARY, rank) for key in ("w1", "w2")}
        if kind == "gated":
            head |= {"gate_proj.weight": random.matrix(rank, WIDTH + rank), "gate_proj.bias": random.norm(rank) - 1}
        if kind == "rnn":
            head["joint_proj.weight"] = random.matrix(3 * rank, 2 * rank + WIDTH)
            head["joint_proj.bias"] = random.norm(3 * rank) - 1
        t |= head if flat else {f"markov_head.{key}": value for key, value in head.items()}
    if confidence:
        where = "confidence_proj" if flat else "confidence_head.proj"
        t |= {f"{where}.weight": random.matrix(1, confidence), f"{where}.bias": random.norm(1)}
    expected = {
        "taps": tuple(taps), "layers": layers, "block": 5, "mask": MASK, "anchor_first": anchor_first,
        "head_norms": True, "vocabulary": VOCABULARY if ends else None, "embeddings": VOCABULARY if ends else None,
        "embedding_scale": 1.0 if "dflash_config" in config else None, "logit_scale": 1.0, "logit_cap": None,
    }  # fmt: skip
    if name.startswith("dspark"):
        expected |= {
            "rank": 0 if kind == "none" else rank, "confidence": bool(confidence),
            "confidence_reads_token": bool(confidence) and confidence > WIDTH,
        }  # fmt: skip
        expected |= {} if kind == "none" else {"kind": kind, "tokens": VOCABULARY, "outputs": VOCABULARY}
    plain = Blockwise(taps, MASK, 0 if anchor_first else 1, layers, kind)
    return Case(name, config, t, expected | (spec or {}), plain, max_k=5 if anchor_first else 4)


QWEN = CONFIG | {"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
ZLAB = QWEN | {"architectures": ["DFlashDraftModel"], "num_target_layers": BLOCKS}
DEEPSPEC = QWEN | {
    "architectures": ["Qwen3DSparkModel"], "num_target_layers": BLOCKS, "block_size": 5, "mask_token_id": MASK,
    "target_layer_ids": [-1, 3, 7], "num_anchors": 64,
}  # fmt: skip
RANK = {"markov_rank": 6, "markov_head_type": "vanilla"}


def block_layouts() -> list[Case]:
    ids = {"mask_token_id": MASK, "target_layer_ids": [1, 4, 6]}
    projector = {"projector_type": "dspark", "markov_rank": 6, **ids}
    unnamed = ZLAB | {"dflash_config": {"block_size": 5, "mask_token_id": MASK}, "layer_types": None}
    rank_0 = {"markov_rank": 0, "enable_confidence_head": False}
    return [
        blockwise("dflash/z-lab", ZLAB | {"block_size": 5, "dflash_config": ids}, (2, 5, 7)),
        blockwise("dflash/z-lab, nested block_size", ZLAB | {"dflash_config": {"block_size": 5, **ids}}, (2, 5, 7)),
        blockwise(
            "dflash/z-lab, nested block_size first",
            ZLAB | {"block_size": 9, "dflash_config": {"block_size": 5, **ids}}, (2, 5, 7),
        ),
        blockwise("dflash/z-lab without ids", unnamed, (2, 6)),
        blockwise("dflash/z-lab without ids, one layer", unnamed | {"num_hidden_layers": 1}, (5,), layers=1),
        blockwise("dflash/z-lab without ids, three layers", unnamed, (2, 4, 6), layers=3),
        blockwise("dflash/deepspec", DEEPSPEC | rank_0, (0, 4, 8), anchor_first=True, ends=True),
        blockwise("dspark/deepspec's dflash", DEEPSPEC | rank_0, (0, 4, 8), anchor_first=True, ends=True),
        blockwise(
            "dspark/deepspec", DEEPSPEC | RANK | {"enable_confidence_head": True, "confidence_head_with_markov": True},
            (0, 4, 8), anchor_first=True, ends=True, kind="vanilla", confidence=WIDTH + 6,
        ),
        blockwise(
            "dspark/deepspec, confidence without token",
            DEEPSPEC | RANK | {"enable_confidence_head": True, "confidence_head_with_markov": False},
            (0, 4, 8), anchor_first=True, ends=True, kind="vanilla", confidence=WIDTH,
        ),
        blockwise(
            "dspark/deepspec without confidence", DEEPSPEC | RANK | {"enable_confidence_head": False}, (0, 4, 8),
            anchor_first=True, ends=True, kind="vanilla",
        ),
        blockwise(
            "dspark/specforge",
            ZLAB | {"architectures": ["DSparkDraftModel"], "block_size": 5} | {
                "dflash_config": {**projector, "markov_head_type": "gated", "enable_confidence_head": True},
            },
            (2, 5, 7), anchor_first=True, kind="gated", confidence=WIDTH + 6,
        ),
        blockwise(
            "dspark/modelopt",
            ZLAB | {
                "block_size": 5,
                "dflash_config": {
                    **projector, "markov_head_type": "rnn", "use_confidence_head": True, "causal": False,
                    "shift_label": True,
                },
            },
            (2, 5, 7), anchor_first=True, kind="rnn", confidence=WIDTH + 6, flat=True,
        ),
    ]  # fmt: skip


def all_layouts() -> list[Case]:
    speculators_mtp = SPECULATORS | {
        "architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "num_nextn_predict_layers": 1,
        "transformer_layer_config": NESTED_LAYER | {"num_hidden_layers": BLOCKS},
    }  # fmt: skip
    return [
        *eagle3_layouts(),
        eagle1_case("with bias", bias=True),
        eagle1_case("without bias, qkv_bias", bias=False, qkv_bias=True),
        eagle1_case("two layers, own embeddings", bias=True, layers=2, copied=False),
        medusa_case("bare", "", own=True),
        medusa_case("medusa_head, .pt", "medusa_head.", own=True, file="medusa_lm_head.pt"),
        medusa_case("medusa_heads, the target's output", "medusa_heads.", own=False),
        medusa_case("two layers", "", own=True, layers=2),
        medusa_case("two layers, the target's output", "medusa_head.", own=False, layers=2),
        mtp_plain_case("mimo", MIMO, "model.mtp_layers."),
        mtp_plain_case("mimo, two modules", MIMO | {"num_nextn_predict_layers": 2}, "model.mtp_layers.", modules=2),
        mtp_plain_case("speculators", speculators_mtp, "mtp_layers."),
        deepseek_case(),
        deepseek_case(modules=2),
        *block_layouts(),
    ]


@cache
def layouts() -> dict[str, Case]:
    return {case.name: case for case in all_layouts()}


with torch.no_grad():
    NAMES = list(layouts())


@pytest.fixture(autouse=True)
def bare_networks(monkeypatch):
    """No gradients, and no traces, which would take most of the time."""
    monkeypatch.setattr(cached, "Traced", lambda network, name: network)
    with torch.no_grad():
        yield


@pytest.fixture(params=NAMES)
def case(request) -> Case:
    return layouts()[request.param]


def of(*starts: str, no: Sequence[str] = ()) -> list[Any]:
    """Layouts by their names' beginnings."""
    return [name for name in NAMES if name.startswith(starts) and name not in no]


# What each layout means


def test_a_layout_is_read_as_it_is_meant(case, tmp_path):
    drafter = case.drafter(tmp_path)
    lm = target(case.target)
    drafter.bind(lm)
    read = asdict(drafter.spec)
    read = {**read.pop("shape", {}), **read}
    assert {key: read[key] for key in case.spec} == case.spec
    assert drafter.taps == case.spec["taps"]
    assert drafter.max_k == case.max_k
    assert drafter.describe()["files"].keys() == {"config.json", case.file}


@cache
def plain_replies(kind: str) -> list[list[int]]:
    return run(target(kind), NoDrafter(), requests(kind), k=0, stop=STOP)[0]


def requests(kind: str) -> list[Request]:
    return [Request(f"p{i}", tokens) for i, tokens in enumerate(prompts(target(kind)))]


def test_a_layout_drafts_what_plain_formulas_do_and_decodes_losslessly(case, tmp_path):
    lm, asked = target(case.target), requests(case.target)
    k = min(K, case.max_k or K)
    replies, steps = run(lm, case.drafter(tmp_path), asked, k=k, stop=STOP)
    assert replies == plain_replies(case.target)
    texts = [list(request.tokens) for request in asked]
    for step in steps[:3]:
        for row, drafted, committed in zip(step.rows, step.drafted, step.committed, strict=True):
            if step.round:
                assert drafted == case.plain.drafts(case, texts[row], k), (step.round, row)
            texts[row] += committed


RECURSIVE = of("eagle", "mtp")


@pytest.mark.parametrize("name", RECURSIVE)
def test_hidden_states_are_those_of_plain_formulas(name, tmp_path):
    case = layouts()[name]
    lm = target(case.target)
    model = case.drafter(tmp_path).build(lm)
    tokens = lm.tokenizer("whatever it says").input_ids
    features = case.plain.features(streams(lm, tokens))
    network, steps = model.network, min(K, case.max_k or K)
    if case.family == "mtp" and case.max_k is None:
        network = network.cells[0]  # recursion, not depths
    hidden = network.unroll(model.embedding(torch.tensor(tokens))[None], features[None], steps)
    for position in (0, 5, 11):
        h = case.plain.encode(features[: position + 1])
        for j, out in enumerate(case.plain.steps(case, h, tokens, steps)):
            torch.testing.assert_close(hidden[j][0, position], out, **CLOSE)
            torch.testing.assert_close(model.head(hidden[j])[0, position], logits_of(case, out), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", of("medusa"))
def test_medusa_logits_are_those_of_plain_formulas(name, tmp_path):
    case = layouts()[name]
    model = case.drafter(tmp_path).build(target())
    feature = streams(target(), [5, 6, 7]).feature
    made = model.network(feature, 3)
    for i in range(3):
        hidden = made[:, i]
        logits = model.network.outputs[i](hidden) if model.network.outputs else model.head(hidden)
        for row in range(3):
            torch.testing.assert_close(logits[row], case.plain.logits(case, feature[row])[i], **CLOSE)


@pytest.mark.parametrize("name", [name for name in of("dspark") if "deepspec's" not in name])
def test_sequential_and_confidence_heads_are_those_of_plain_formulas(name, tmp_path):
    case = layouts()[name]
    network = case.drafter(tmp_path).build(target()).network
    random = Random(2)
    base, hidden = random.matrix(1, 4, VOCABULARY), random.norm(4 * WIDTH).reshape(1, 4, WIDTH)
    before = torch.tensor([[7, 200, 3, 90]])
    logits, confidence = network.sequence(base, hidden, before)
    state = None
    for k in range(4):
        added, sure, state = added_by_head(case.tensors, case.plain.kind, int(before[0, k]), hidden[0, k], state)
        torch.testing.assert_close(logits[0, k], base[0, k] + added, **CLOSE)
        if confidence is not None:
            torch.testing.assert_close(confidence[0, k], sure, **CLOSE)
    assert (confidence is None) == (not case.spec["confidence"])


def test_nothing_is_left_as_it_was_made(case, tmp_path):
    """What is not of the file would differ between seeds."""
    path = case.save(tmp_path)
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        drafter = FAMILIES[case.family](checkpoint=path, **case.options)
        states.append(drafter.build(target(case.target)).state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_copy_of_the_embeddings_may_be_dropped(tmp_path):
    """Also where the target scales its own, which a head with a table does not."""
    lm = target("gemma3")
    case = layouts()["eagle1/with bias"]
    table = lm.model.get_input_embeddings().weight.clone()
    longer = torch.cat((table, torch.ones(3, WIDTH)))  # no copy
    made = []
    for name, own in (("copy", table), ("longer", longer)):
        path = saved(tmp_path / name, case.config, case.tensors | {"embed_tokens.weight": own})
        made.append(Eagle1(checkpoint=path).build(lm).embedding(torch.tensor([4, 5])))
    torch.testing.assert_close(made[0], made[1])


# MTP modules among a target's own weights


def sharded(folder: Path, case: Case, target_tensors: Sequence[str], **files: Tensors) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case.config))
    places = dict.fromkeys(target_tensors, "model-00001-of-00002.safetensors")
    for file, tensors in files.items():
        save_file(tensors, folder / file)
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return str(folder)


def test_mtp_needs_no_shard_but_those_with_its_tensors(tmp_path):
    case = layouts()["mtp/mimo"]
    others = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]
    shard = {**case.tensors, "model.layers.7.mlp.up_proj.weight": torch.ones(1)}
    path = sharded(tmp_path, case, others, **{"model-00002-of-00002.safetensors": shard})
    drafter = Mtp(checkpoint=path)
    replies, _ = run(target(), drafter, requests("llama"), k=K, stop=STOP)
    assert replies == plain_replies("llama")
    assert drafter.describe()["files"].keys() == {"config.json", "model-00002-of-00002.safetensors"}


def test_mtp_says_which_shard_of_its_tensors_is_absent(tmp_path):
    case = layouts()["mtp/mimo"]
    name = "model.mtp_layers.0.input_proj.weight"
    rest = {key: value for key, value in case.tensors.items() if key != name}
    path = sharded(tmp_path, case, [name], **{"model-00002-of-00002.safetensors": rest})
    with pytest.raises(ConfigError, match=r"cannot read model-00001-of-00002\.safetensors"):
        Mtp(checkpoint=path).build(target())


@cache
def qwen_next() -> tuple[Any, Tensors, Any]:
    """Stand-in for a target of a kind that keeps recurrent state, a checkpoint of its module, and the block with norms
    as they are stored."""
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER, moe_intermediate_size=24,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4,
        num_experts_per_tok=2, shared_expert_intermediate_size=24, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, rms_norm_eps=EPS, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    lm = SimpleNamespace(
        model=model, config=config, blocks=model.model.layers, final_norm=model.model.norm, width=WIDTH,
        name="qwen-next", vocab_size=VOCABULARY, device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    random = Random(4)
    layer = Qwen3NextDecoderLayer(config, 3).requires_grad_(False)
    t: Tensors = {"mtp.fc.weight": random.matrix(WIDTH, 2 * WIDTH)}
    t |= {
        f"mtp.{name}.weight": random.norm(WIDTH) - 1 for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    for key, value in layer.state_dict().items():
        value.copy_(random.norm(len(value)) - 1 if value.dim() == 1 else random.matrix(*value.shape))
        if ".experts." not in key:
            t[f"mtp.layers.0.{key}"] = value.clone()
    for e, (joint, down) in enumerate(zip(layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj, strict=True)):
        for key, value in zip(("gate_proj", "up_proj", "down_proj"), (*joint.chunk(2), down), strict=True):
            t[f"mtp.layers.0.mlp.experts.{e}.{key}.weight"] = value.clone()
    return lm, t, layer


@pytest.mark.parametrize("fused", [False, True])
def test_qwen3_next_is_that_of_transformers(fused, tmp_path):
    lm, t, layer = qwen_next()
    own = dict(t)
    if fused:  # as in Qwen3.5
        own = {key: value for key, value in own.items() if ".experts." not in key}
        own |= {f"mtp.layers.0.mlp.experts.{k}": v.clone() for k, v in layer.mlp.experts.state_dict().items()}
    own |= {"model.layers.0.mlp.gate.weight": torch.ones(1), "lm_head.weight": torch.ones(1)}
    loaded = mtp_reader.read(saved(tmp_path, lm.config.to_dict(), own), lm)
    spec = mtp.Spec(**loaded.fields)
    assert (spec.taps, spec.modules, spec.foreign) == ((4,), 1, True)
    assert (spec.hidden_first, spec.norm_feature, spec.norm_output) == (False, True, True)
    model = spec.model(lm)
    loaded.fill(model)

    def norm(name: str, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * (1 + t[f"mtp.{name}.weight"])

    def cell(token: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = norm("pre_fc_norm_embedding", token), norm("pre_fc_norm_hidden", x)
        out = norm("norm", causal(lm.model.model.rotary_emb, layer, linear(t, "mtp.fc", torch.cat(parts, dim=-1))))
        return out, out

    random = Random(1)
    embeddings, features = random.norm(9 * WIDTH).reshape(9, WIDTH), random.norm(9 * WIDTH).reshape(9, WIDTH)
    hidden = model.network.cells[0].unroll(embeddings[None], features[None], 2)
    first, following = cell(embeddings[1:6], features[:5])
    torch.testing.assert_close(hidden[0][0, 4], first[4], **CLOSE)
    second, _ = cell(embeddings[1:7], torch.cat((features[:5], following[4:])))
    torch.testing.assert_close(hidden[1][0, 4], second[5], **CLOSE)


# Ids that can mean two things


@pytest.mark.parametrize(
    ("ids", "layer_ids", "taps", "other"),
    [
        ([1, 3, 4], "auto", (2, 4, 5), "streams"),  # the trainers' default
        ([2, 4, 5], "auto", (2, 4, 5), "outputs"),
        ([4, 6, 8], "auto", (4, 6, 8), "outputs"),
        ([1, 3, 4], "streams", (1, 3, 4), None),
        ([1, 3, 4], "outputs", (2, 4, 5), None),
        ([2, 4, 5], "streams", (2, 4, 5), None),
        ([2, 4, 5], "outputs", (3, 5, 6), None),
    ],
)
def test_nested_ids_are_taken_as_documented_and_a_guess_is_said(ids, layer_ids, taps, other, tmp_path, caplog):
    case = layouts()["eagle3/nvidia"]
    path = saved(tmp_path, nvidia(eagle_aux_hidden_state_layer_ids=ids), case.tensors)
    drafter = Eagle(checkpoint=path, layer_ids=layer_ids)
    drafter.build(target())
    assert drafter.taps == taps
    said = [
        record.getMessage() for record in caplog.records if "eagle_aux_hidden_state_layer_ids" in record.getMessage()
    ]
    assert len(said) == (other is not None)
    assert all(f"drafter.layer_ids={other}" in message for message in said)


def test_ids_that_mean_one_thing_are_not_reinterpreted(tmp_path, caplog):
    case = layouts()["eagle3/speculators, two layers"]
    drafter = case.drafter(tmp_path, layer_ids="outputs")
    drafter.build(target())
    assert drafter.taps == (0, 3, 8)
    assert not caplog.records


def test_unknown_layer_ids_are_refused():
    with pytest.raises(ConfigError, match=r"drafter\.layer_ids=blocks is unknown; choices: auto, streams, outputs"):
        Eagle(layer_ids="blocks")


# Errors


def build(name: str, path: str, kind: str = "llama", **more: Any) -> Any:
    return FAMILIES[name](checkpoint=path, **more).build(target(kind))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_such_folder(family, tmp_path):
    with pytest.raises(ConfigError, match=r"there is no such folder; give one, or a hub id"):
        build(family, str(tmp_path / "absent"))


def test_a_hub_id_is_fetched(tmp_path, monkeypatch):
    case = layouts()["eagle1/with bias"]
    case.save(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: {"org/head": str(tmp_path)}[name])
    assert Eagle1(checkpoint="org/head").build(target()).network.layers
    with pytest.raises(ConfigError, match=r"cannot fetch drafter\.checkpoint=org/other .* copy the folder here"):
        build("eagle1", "org/other")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_configuration(family, tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        build(family, str(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", ["{", "\x00", "[]", '"llama"'])
def test_configuration_that_is_no_json_object(family, text, tmp_path):
    path = saved(tmp_path, text, {"a": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"config\.json is not"):
        build(family, path)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_weights(family, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no weights: neither \*\.safetensors nor \*\.bin nor \*\.pt"):
        build(family, str(tmp_path))


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": []}'])
def test_index_that_is_none(text, tmp_path):
    path = saved(tmp_path, CONFIG, {"a": torch.ones(1)})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json"):
        build("eagle3", path)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_broken_weights(file, tmp_path):
    saved(tmp_path, CONFIG, {"a": torch.ones(1)}, file)
    (tmp_path / file).write_bytes(b"no weights at all")
    with pytest.raises(ConfigError, match=file.replace(".", r"\.")):
        build("eagle3", str(tmp_path))


class Bait:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_pickled_code_is_not_run(file, tmp_path):
    made = tmp_path / "made"
    path = saved(tmp_path / "checkpoint", CONFIG, {"fc.weight": Bait(made)}, file)
    with pytest.raises(
        ConfigError, match=rf"{file} holds more than tensors and is not opened; convert it to safetensors"
    ):
        build("eagle1", path)
    assert not made.exists()
    torch.load(Path(path) / file, weights_only=False)
    assert made.exists()  # it would have been


@pytest.mark.parametrize("held", [[torch.ones(1)], {"fc.weight": 3}, {"state": {"fc.weight": torch.ones(1)}}, {1: 2}])
def test_files_of_something_else_than_named_tensors(held, tmp_path):
    path = saved(tmp_path, CONFIG, held, "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin"):
        build("eagle1", path)


def test_files_of_a_trainer_beside_the_weights_are_not_opened(tmp_path):
    case = layouts()["eagle1/with bias"]
    path = case.save(tmp_path)
    torch.save({"arguments": Bait(tmp_path / "made")}, tmp_path / "training_args.bin")
    torch.save({"step": 3}, tmp_path / "optimizer.pt")
    drafter = Eagle1(checkpoint=path)
    drafter.bind(target())
    assert drafter.describe()["files"].keys() == {"config.json", "pytorch_model.bin"}


Change = Callable[[dict[str, Any], Tensors], None]


def without(*names: str) -> Change:
    def change(config: dict[str, Any], t: Tensors) -> None:
        for name in names:
            del t[name]

    return change


def having(**tensors: Tensor) -> Change:
    return lambda config, t: t.update({name.replace("__", "."): value for name, value in tensors.items()})


def saying(**more: Any) -> Change:
    return lambda config, t: config.update(more)


def not_saying(*keys: str) -> Change:
    def change(config: dict[str, Any], t: Tensors) -> None:
        for key in keys:
            del config[key]

    return change


def wrong_shapes(config: dict[str, Any], t: Tensors) -> None:
    t["midlayer.mlp.down_proj.weight"] = torch.ones(WIDTH, 3)
    t["midlayer.self_attn.k_proj.weight"] = torch.ones(2, 2 * WIDTH)
    t["norm.weight"] = torch.ones(5)


def many_wrong(config: dict[str, Any], t: Tensors) -> None:
    del t["midlayer.mlp.down_proj.weight"]
    t["norm.weight"] = torch.ones(5)
    t["enorm.weight"] = torch.ones(WIDTH)


def offsets(change: Callable[[Tensor], Tensor]) -> Change:
    def apply(config: dict[str, Any], t: Tensors) -> None:
        ids = change(t["d2t"] + torch.arange(40))
        t["d2t"] = ids - torch.arange(40)

    return apply


def narrower(config: dict[str, Any], t: Tensors) -> None:
    config |= {"hidden_size": 32, "target_hidden_size": WIDTH}
    for name, value in t.items():
        if value.dim() == 2 and value.shape[0] == WIDTH:
            t[name] = value[:32]


SPLIT = {"k_proj": 26, "v_proj": 22}  # as many together as they should be


REFUSED = {
    # tensors
    "eagle3 lacks fc": (
        "eagle3/reference", without("fc.weight"), r"no fc\.weight and does not say use_aux_hidden_state=false",
    ),
    "eagle3 lacks a matrix": (
        "eagle3/reference", without("midlayer.mlp.up_proj.weight"), r"Tensors missing: midlayer\.mlp\.up_proj\.weight$",
    ),
    "eagle3 lacks its norm": ("eagle3/reference", without("norm.weight"), r"missing: norm\.weight$"),
    "eagle3 lacks its token norm": (
        "eagle3/reference", without("midlayer.input_layernorm.weight"), r"missing: midlayer\.input_layernorm\.weight$",
    ),
    "nvidia's lacks a norm that it says it has": (
        "eagle3/nvidia", lambda c, t: (c["eagle_config"].update(use_last_layernorm=True), t.pop("norm.weight")),
        r"missing: norm\.weight$",
    ),
    "nvidia's lacks norm_before_fc": (
        "eagle3/nvidia with norm_before_fc", without("input_norm.weight"), r"missing: input_norm\.weight$",
    ),
    "speculators' lacks fc_norm": (
        "eagle3/speculators, two layers", saying(fc_norm=True),
        r"missing: fc_norm\.0\.weight, fc_norm\.1\.weight, fc_norm\.2",
    ),
    "eagle3 has MTP norms": ("eagle3/nvidia", having(enorm__weight=torch.ones(WIDTH)), r"unexpected: enorm\.weight$"),
    "peagle": ("eagle3/reference", having(mask_hidden=torch.ones(1, 1, 144)), r"unexpected: mask_hidden$"),
    "wrong shapes": (
        "eagle3/reference", wrong_shapes,
        r"of the wrong shape: midlayer\.self_attn\.k_proj\.weight is \[2, 96\] and should be \[24, 96\], "
        r".*\.down_proj\.weight is \[48, 3\] .* norm\.weight is \[5\] and should be \[48\]$",
    ),
    "all at once": (
        "eagle3/reference", many_wrong,
        r"missing: midlayer\.mlp\.down_proj\.weight; of the wrong shape: norm\.weight .*; unexpected: enorm\.weight$",
    ),
    "other number of taps": (
        "eagle3/nvidia", saying(eagle_config={"eagle_aux_hidden_state_layer_ids": [4, 6]}),
        r"fc\.weight is \[48, 144\] and should be \[48, 96\]",
    ),
    "eagle1 lacks a layer's matrix": (
        "eagle1/with bias", without("layers.0.self_attn.v_proj.weight"),
        r"missing: layers\.0\.self_attn\.v_proj\.weight$",
    ),
    "eagle1 has an input norm": (
        "eagle1/with bias", having(layers__0__input_layernorm__weight=torch.ones(WIDTH)),
        r"unexpected: layers\.0\.input_layernorm\.weight$",
    ),
    "medusa lacks a bias": ("medusa/bare", without("2.0.linear.bias"), r"missing: 2\.0\.linear\.bias$"),
    "medusa lacks an output": ("medusa/bare", without("1.1.weight"), r"missing: 1\.1\.weight$"),
    "medusa lacks a head": (
        "medusa/bare", without("2.0.linear.weight", "2.0.linear.bias", "2.1.weight"),
        r"medusa_num_heads=3 and has 2 heads",
    ),
    "mtp lacks its projection": (
        "mtp/mimo", without("model.mtp_layers.0.input_proj.weight"),
        r"missing: model\.mtp_layers\.0\.input_proj\.weight$",
    ),
    "deepseek lacks an expert's matrix": (
        "mtp/deepseek", without("model.layers.3.mlp.experts.2.up_proj.weight"),
        r"experts: expert 2 has no up_proj\.weight",
    ),
    "deepseek lacks a norm": (
        "mtp/deepseek", without("model.layers.3.shared_head.norm.weight"), r"missing: .*3\.shared_head\.norm\.weight$",
    ),
    "deepseek has other embeddings": (
        "mtp/deepseek", having(model__layers__3__embed_tokens__weight=torch.ones(VOCABULARY, WIDTH)),
        r"embed_tokens are not those of tiny-deepseek",
    ),
    "deepseek in 8 bits": (
        "mtp/deepseek", having(model__layers__3__mlp__down_proj__weight_scale_inv=torch.ones(1)),
        r"holds 8-bit weights; give a folder with them in bfloat16",
    ),
    "dflash lacks head norms": (
        "dflash/z-lab", without("layers.1.self_attn.q_norm.weight"), r"missing: layers\.1\.self_attn\.q_norm\.weight$",
    ),
    "dflash2": (
        "dflash/z-lab", having(candidate_selector__hidden_projection__weight=torch.ones(4, WIDTH)),
        r"unexpected: candidate_selector\.hidden_projection\.weight$",
    ),
    "dspark lacks half of its head": (
        "dspark/deepspec", without("markov_head.markov_w2.weight"), r"missing: markov_head\.markov_w2\.weight$",
    ),
    "dspark lacks all of its head": (
        "dspark/deepspec", without("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
        r"missing: markov_head\.",
    ),
    "dspark is of another kind": (
        "dspark/deepspec", saying(markov_head_type="gated"), r"missing: markov_head\.gate_proj\.weight",
    ),
    "dspark is of no kind": (
        "dspark/deepspec", saying(markov_head_type="lstm"),
        r"markov_head_type=lstm is unknown; known: vanilla, gated, rnn",
    ),
    "keys and values of each other's size": (
        "eagle3/reference",
        lambda c, t: t.update({f"midlayer.self_attn.{k}.weight": torch.ones(n, 96) for k, n in SPLIT.items()}),
        r"k_proj\.weight is \[26, 96\] and should be \[24, 96\], .*v_proj\.weight is \[22, 96\] and should be \[24,",
    ),
    "an expert of another size": (
        "mtp/deepseek", having(model__layers__3__mlp__experts__1__up_proj__weight=torch.ones(5, 6)),
        r"model\.layers\.3\.mlp\.experts: .* are not all of a size",
    ),
    "eagle1 lacks its bias": ("eagle1/with bias", without("fc.bias"), r"missing: fc\.bias$"),
    "fc beside use_aux_hidden_state=false": (
        "eagle3/nvidia",
        saying(eagle_config={"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": [4, 6, 8]}),
        r"has fc\.weight and says use_aux_hidden_state=false",
    ),
    # vocabularies
    "marks of another vocabulary": (
        "eagle3/reference", having(t2d=torch.ones(300, dtype=torch.bool)),
        r"vocabulary of 300 tokens, and tiny-llama has 259",
    ),
    "offsets out of range": (
        "eagle3/reference", offsets(lambda ids: ids + 100),
        r"d2t names 40 different tokens from \d+ to \d+, .* 259 tokens",
    ),
    "offsets below zero": (
        "eagle3/reference", offsets(lambda ids: ids - 100), r"d2t names 40 different tokens from -\d+",
    ),
    "offsets that meet": (
        "eagle3/reference", offsets(lambda ids: ids.index_fill(0, torch.tensor([1]), int(ids[0]))),
        r"d2t names 39 different tokens .* for 40 rows",
    ),
    "fewer offsets than rows": ("eagle3/reference", having(d2t=torch.zeros(9, dtype=torch.long)), r"for 40 rows"),
    "offsets against marks": (
        "eagle3/reference", having(t2d=torch.arange(VOCABULARY) < 40), r"d2t and t2d contradict each other",
    ),
    "more marks than offsets": (
        "eagle3/reference", having(t2d=torch.ones(VOCABULARY, dtype=torch.bool)), r"d2t and t2d contradict each other",
    ),
    "rows without offsets": (
        "eagle3/reference", without("d2t"), r"output head of 40 tokens and no d2t to say which; tiny-llama has 259",
    ),
    "offsets without rows": ("eagle3/reference", without("lm_head.weight"), r"draft vocabulary \(d2t\) and no lm_head"),
    "too few embeddings": (
        "eagle3/reference", having(embed_tokens__weight=torch.ones(200, WIDTH)),
        r"embeds 200 tokens, and tiny-llama has 259",
    ),
    "medusa of another vocabulary": (
        "medusa/bare", lambda c, t: t.update({f"{i}.1.weight": torch.ones(300, WIDTH) for i in range(3)}),
        r"predicts 300 tokens, and tiny-llama has 259",
    ),
    "dspark of another vocabulary": (
        "dspark/modelopt", having(markov_w1__weight=torch.ones(99, 6)), r"sequential head knows 99 tokens, .* has 259",
    ),
    # sizes
    "eagle3 of another width": ("eagle3/reference", saying(hidden_size=64), r"target of hidden_size=64, .* is 48 wide"),
    "eagle3 of another target": ("eagle3/reference", saying(target_hidden_size=64), r"hidden_size=64, .* is 48 wide"),
    "eagle1 of another width": ("eagle1/with bias", saying(hidden_size=64), r"hidden_size=64, .* is 48 wide"),
    "medusa of another width": (
        "medusa/bare", having(**{"0.0.linear.weight": torch.ones(64, 64)}), r"hidden_size=64, .* is 48 wide",
    ),
    "mtp of another width": ("mtp/mimo", saying(hidden_size=64), r"hidden_size=64, .* is 48 wide"),
    "dflash of another width": ("dflash/z-lab", saying(hidden_size=64), r"hidden_size=64, .* is 48 wide"),
    "dspark of another width": ("dspark/deepspec", saying(hidden_size=64), r"hidden_size=64, .* is 48 wide"),
    "eagle3 narrower, without embeddings": (
        "eagle3/reference", narrower, r"is 32 wide and tiny-llama 48, so that it needs its own embed_tokens\.weight$",
    ),
    "dflash narrower, without embeddings": (
        "dflash/z-lab", narrower, r"so that it needs its own embed_tokens\.weight and lm_head\.weight$",
    ),
    "no sizes": (
        "eagle3/reference", not_saying("num_attention_heads", "intermediate_size"),
        r"does not say num_attention_heads, intermediate_size",
    ),
    # what a configuration must say, and may not
    "no mask": (
        "dspark/deepspec", not_saying("mask_token_id"), r"does not say mask_token_id, in dflash_config or the top of",
    ),
    "mask outside": ("dflash/deepspec", saying(mask_token_id=300), r"mask_token_id=300 is not among the 259 tokens"),
    "mask below": ("dflash/deepspec", saying(mask_token_id=-1), r"mask_token_id=-1 is not among the 259 tokens"),
    "no block size": ("dspark/deepspec", not_saying("block_size"), r"does not say block_size"),
    "taps beyond the target": (
        "eagle3/speculators, two layers", saying(eagle_aux_hidden_state_layer_ids=[2, 4, 9]),
        r"after block 9, and tiny-llama has 8 blocks; was it trained for another target\?",
    ),
    "outputs beyond the target": (
        "eagle3/deepspec", saying(target_layer_ids=[0, 2, 3, 5, 8]), r"after block 9, and tiny-llama has 8 blocks",
    ),
    "dflash beyond the target": (
        "dflash/deepspec", saying(target_layer_ids=[1, 4, 8]), r"after block 9, .* has 8 blocks",
    ),
    "taps below": ("dspark/deepspec", saying(target_layer_ids=[-2, 3, 7]), r"after block -1, .* has 8 blocks"),
    "five taps unnamed": (
        "eagle3/deepspec", not_saying("target_layer_ids"), r"reads 5 residual streams and does not say which",
    ),
    "dflash taps unnamed": ("dflash/deepspec", not_saying("target_layer_ids"), r"does not say target_layer_ids"),
    "dspark taps unnamed": ("dspark/deepspec", not_saying("target_layer_ids"), r"does not say target_layer_ids"),
    "z-lab taps and target unnamed": (
        "dflash/z-lab without ids", not_saying("num_target_layers"), r"does not say num_target_layers",
    ),
    "sliding layers": (
        "dflash/z-lab", saying(layer_types=["sliding_attention", "full_attention"], sliding_window=4),
        r"layers with sliding windows, which are not supported",
    ),
    "sliding layers without kinds": (
        "dflash/z-lab",
        lambda c, t: (c.pop("layer_types"), c.update(use_sliding_window=True, sliding_window=4, max_window_layers=1)),
        r"layers with sliding windows, which are not supported",
    ),
    "partial rotary": ("eagle1/with bias", saying(partial_rotary_factor=0.5), r"rotates a part of each head only"),
    "partial rotary, newer": (
        "eagle1/with bias", saying(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        r"rotates a part of each head only",
    ),
    "causal block": ("dflash/z-lab", saying(is_causal=True), r"a causal block is not supported"),
    "causal block, nested": (
        "dspark/modelopt", lambda c, t: c["dflash_config"].update(causal=True), r"a causal block is not supported",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_by_name(what, tmp_path):
    name, change, message = REFUSED[what]
    case = layouts()[name]
    config, tensors = json.loads(json.dumps(case.config)), dict(case.tensors)
    change(config, tensors)
    path = saved(tmp_path, config, tensors, case.file)
    with pytest.raises(ConfigError, match=message):
        build(case.family, path, case.target, **case.options)


OPTIONAL = (r"embed_tokens\.weight", "t2d", r"lm_head\.weight", r"model\.layers\.3\.embed_tokens\.weight")
UNREAD = (r".*\.shared_head\.head\.weight", r"model\.layers\.0\.unread\.weight")
WHOLE = of(
    "eagle3/reference with embeddings", "eagle3/deepspec", "eagle1/two layers", "medusa/two layers, the", "medusa/bare",
    "mtp/mimo", "mtp/deepseek", "dflash/z-lab without ids, one", "dspark/modelopt",
    no=["mtp/deepseek, 2 modules", "mtp/mimo, two modules"],
)  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_no_tensor_can_be_absent_or_of_another_shape(name, monkeypatch):
    case = layouts()[name]
    held = case.tensors

    def read(path: str, keep: Callable[[Any], str] = lambda config: ".*") -> files.Source:
        kept = {key: value for key, value in held.items() if re.fullmatch(keep(case.config), key)}
        return files.Source(path, case.config, kept, {})

    monkeypatch.setattr(files, "read", read)
    build(case.family, "here", case.target, **case.options)
    accepted = []
    for given in (None, torch.ones(())):
        free = (*UNREAD, *OPTIONAL) if given is None or case.target == "deepseek" else UNREAD
        for key in (key for key in case.tensors if not any(re.fullmatch(pattern, key) for pattern in free)):
            held = {k: v for k, v in (case.tensors | {key: given}).items() if v is not None}
            try:
                build(case.family, "here", case.target, **case.options)
            except ConfigError:
                continue
            accepted.append((key, given))
    assert not accepted


def test_sliding_windows_that_no_layer_uses_are_none(tmp_path):
    case = layouts()["dflash/z-lab"]
    config = {key: value for key, value in case.config.items() if key != "layer_types"}
    config |= {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    build("dflash", saved(tmp_path, config, case.tensors))


def test_a_layout_is_refused_by_all_other_families(case, tmp_path):
    path = case.save(tmp_path)
    own = {case.family}
    if case.name in ("dflash/deepspec", "dspark/deepspec's dflash"):  # the same file
        own = {"dflash", "dspark"}
    for family in FAMILIES:
        if family in own:
            build(family, path, case.target, **case.options if family == case.family else {})
        else:
            with pytest.raises(ConfigError, match=r"is not of the kind|use drafter=dspark"):
                build(family, path)


OPTIONS = {
    "eagle3": eagle.Options(layers=2), "eagle1": eagle1.Options(layers=2), "medusa": medusa.Options(heads=3),
    "mtp": mtp.Options(modules=2), "dflash": dflash.Options(block=5), "dspark": dspark.Options(rank=4),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_and_options_of_a_new_network_exclude_each_other(family, tmp_path):
    with pytest.raises(ConfigError, match=r"drafter\.network describes a new network, and .* brings its own; drop one"):
        FAMILIES[family](checkpoint=str(tmp_path), network=OPTIONS[family])


# An offset of one


def turn(tokens: int) -> Tensor:
    """[2, 2]: from the angle of a token to that of the token so many further."""
    angle = tokens * 2 * math.pi / VOCABULARY
    return torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])


NORMED = 1 / math.sqrt(2 / WIDTH + EPS)  # what a norm multiplies numbers by, where an angle and a 1 are all there is


def set_turning(gate: Tensor, up: Tensor, down: Tensor, tokens: int, scale: float = 1.0) -> None:
    """Make a perceptron turn the angle in the first two numbers of the stream, of size ``scale``. The third number is
    as large, always: so the stream has the same size at every token, and the gate is open."""
    for weight in (gate, up, down):
        weight.zero_()
    gate[:2, 2] = 8
    up[:2, :2] = (turn(tokens) - torch.eye(2)) / (NORMED * F.silu(torch.tensor(8 * NORMED)))
    down[:2, :2] = scale * torch.eye(2)


@cache
def turning_target() -> CausalLM:
    """Each block turns a token's angle by one token, and nothing else happens: HS[i] says x+i, the next is x+N."""
    lm = load_tiny("llama", layers=BLOCKS, engine="plain")
    for layer in lm.blocks:
        layer.self_attn.o_proj.weight.zero_()
        set_turning(*(getattr(layer.mlp, f"{name}_proj").weight for name in ("gate", "up", "down")), 1)
        layer.post_attention_layernorm.variance_epsilon = EPS
    table = torch.zeros(VOCABULARY, WIDTH)
    angles = torch.arange(VOCABULARY) * 2 * math.pi / VOCABULARY
    table[:, 0], table[:, 1], table[:, 2] = angles.cos(), angles.sin(), 1
    lm.model.get_input_embeddings().weight.copy_(table)
    lm.model.get_output_embeddings().weight.copy_(100 * table)
    return lm


def turning_head(case: Case, tap: int = -1) -> Tensors:
    """``case`` with weights that read one of its taps alone and are always right for ``turning_target``, if that is the
    stream which the layout means. The feature is made that of the token it predicts, and then turned on."""
    table = turning_target().model.get_output_embeddings().weight
    t = {name: torch.zeros_like(value) for name, value in case.tensors.items() if name not in ("d2t", "t2d")}
    t |= {name: torch.ones_like(value) for name, value in t.items() if "norm" in name}
    t |= {name: table.clone() for name in ("lm_head.weight", "embed_tokens.weight") if name in t}
    if case.family == "medusa":
        for i in range(3):
            t[f"{case.plain.prefix}{i}.1.weight"] = table.clone()
            t[f"{case.plain.prefix}{i}.1.weight"][:, :2] @= turn((i + 1) * BLOCKS)
        return t
    parts = [next(n for n in t if n.endswith(f"{key}_proj.weight")) for key in ("mlp.gate", "mlp.up", "mlp.down")]
    set_turning(*(t[name] for name in parts), BLOCKS, NORMED if case.family == "eagle1" else 1)
    normed_before = NORMED if case.family == "mtp" or "input_norm.weight" in t else 1
    joined = t[next(name for name in t if name in ("fc.weight", "model.mtp_layers.0.input_proj.weight"))]
    if case.family == "eagle3":
        taps = case.spec["taps"]
        joined = joined[:, tap % len(taps) * WIDTH :]
        joined[:2, :2], joined[2, 2] = turn(BLOCKS - taps[tap]) / normed_before, 1 / normed_before
    elif case.family == "eagle1":
        joined[:3, WIDTH : WIDTH + 3] = torch.eye(3)
    else:
        joined[:3, :3] = torch.eye(3) / normed_before
    return t


def acceptance(case: Case, tensors: Tensors, path: Path, off: int) -> float:
    """With all taps ``off`` by so many blocks."""
    lm = turning_target()
    drafter = FAMILIES[case.family](checkpoint=saved(path, case.config, tensors, case.file), **case.options)
    drafter.settle = lambda spec, settle=drafter.settle: settle(replace(spec, taps=tuple(t + off for t in spec.taps)))
    asked = [Request("short", [70]), Request("long", [5, 200, 33])]
    replies, steps = run(lm, drafter, asked, k=K, stop=STOP)
    for request, reply in zip(asked, replies, strict=True):
        assert reply == [(request.tokens[-1] + BLOCKS * (i + 1)) % VOCABULARY for i in range(len(reply))]
    return sum(sum(step.accepted) for step in steps) / sum(sum(step.proposed) for step in steps)


@pytest.mark.parametrize("tap", [0, 2])
@pytest.mark.parametrize(
    "name",
    [
        "eagle3/reference",
        "eagle3/speculators, two layers",
        "eagle3/nvidia",
        "eagle3/nvidia without input_layernorm",
        "eagle3/nvidia with norm_before_fc",
        "eagle3/deepspec",
    ],
)
def test_a_stream_early_or_late_loses_all_acceptance(name, tap, tmp_path):
    case = layouts()[name]
    tensors = turning_head(case, tap)
    assert acceptance(case, tensors, tmp_path, 0) == 1
    for off in (-1, 1):
        if all(0 <= t + off <= BLOCKS for t in case.spec["taps"]):
            assert acceptance(case, tensors, tmp_path, off) == 0


@pytest.mark.parametrize("name", ["eagle1/with bias", "medusa/bare", "mtp/mimo"])
def test_a_feature_of_a_block_early_loses_all_acceptance(name, tmp_path):
    case = layouts()[name]
    tensors = turning_head(case)
    assert acceptance(case, tensors, tmp_path, 0) == 1
    assert acceptance(case, tensors, tmp_path, -1) == 0
