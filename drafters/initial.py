"""What a new drafting head can take over from the target, so that it starts near something that works.

The target's layers may be merged, packed or quantised for inference already, so weights are read off by applying a
layer to the unit vectors.
"""

from typing import Any

import torch
from torch import Tensor, nn

from drafters.blocks import DEFAULT_THETA, Attention, Block, RMSNorm, Shape
from drafters.draft_model import OutputHead
from specbench.errors import ConfigError
from specbench.model import CausalLM

SPREAD = 0.02  # standard deviation of weights that have nothing to start from
SHARPNESS = 3.0  # of attention that looks for its own token: exp(8 * 3) times the weight of one that is unlike it


def target_shape(target: CausalLM, **changes: Any) -> Shape:
    """The shape of the target's own blocks, as far as a Llama-shaped block has it, with ``changes``."""
    config = target.config
    width, heads = config.hidden_size, config.num_attention_heads
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope and "rope_theta" not in rope:  # by kind of layer, as in Gemma 3: that of full attention
        rope = dict(rope.get("full_attention") or next(iter(rope.values())))
    if rope.pop("partial_rotary_factor", 1) not in (None, 1):  # a head turns whole: its frequencies are others
        rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta") or DEFAULT_THETA}
    known: dict[str, Any] = {
        "width": width,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_width": getattr(config, "head_dim", None) or width // heads,
        "inner": getattr(config, "intermediate_size", None) or 4 * width,
        "eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope": rope or {"rope_type": "default", "rope_theta": DEFAULT_THETA},
        "positions": getattr(config, "max_position_embeddings", None) or 4096,
    }
    return Shape(**{**known, **changes})


def block_kind(target: CausalLM) -> dict[str, bool]:
    """What of ``Shape`` the target's last block has that others have not: head norms, biases."""
    attention: Any = getattr(target.blocks[-1], "self_attn", None)
    if not hasattr(attention, "q_proj"):
        return {}
    return {"head_norms": hasattr(attention, "q_norm"), "qkv_bias": bool(read_bias(attention.q_proj, target).any())}


@torch.no_grad()
def start_block(block: Block, target: CausalLM) -> None:
    """Give ``block`` the weights of the target's last block, where that is Llama-shaped. What attention reads beyond
    its own width, in front of it, starts near zero."""
    source: Any = target.blocks[-1]
    attention: Any = getattr(source, "self_attn", None)
    mlp: Any = getattr(source, "mlp", None)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    if not all(hasattr(attention, name) for name in names) or not hasattr(mlp, "gate_proj"):
        return
    width, attention_width = target.width, block.self_attn.o_proj.in_features
    q, k, v = (read_weight(getattr(attention, name), width, target) for name in names[:3])
    _fill(block.self_attn.q_proj.weight, q)
    _fill(block.self_attn.kv_proj.weight, torch.cat((k, v)))
    if block.self_attn.q_proj.bias is not None:
        q, k, v = (read_bias(getattr(attention, name), target) for name in names[:3])
        block.self_attn.q_proj.bias.copy_(q)
        block.self_attn.kv_proj.bias.copy_(torch.cat((k, v)))
    for name in ("q_norm", "k_norm"):
        start_norm(getattr(block.self_attn, name), getattr(attention, name, None))
    _fill(block.self_attn.o_proj.weight, read_weight(attention.o_proj, attention_width, target))
    gate, up = (read_weight(getattr(mlp, name), width, target) for name in ("gate_proj", "up_proj"))
    down = read_weight(mlp.down_proj, len(gate), target)
    kept = _loudest(up, down, block.mlp.down_proj.in_features)
    _fill(block.mlp.gate_up_proj.weight, torch.cat((gate[kept], up[kept])))
    _fill(block.mlp.down_proj.weight, down[:, kept])
    for name in ("input_layernorm", "post_attention_layernorm"):
        start_norm(getattr(block, name), getattr(source, name, None))


@torch.no_grad()
def attend_to_own(attention: Attention, width: int) -> None:
    """Let every head of ``attention`` look for the token that it stands on, and hand on its embedding: keys and queries
    are the same random projection of the first ``width`` numbers that attention reads, which nothing else resembles as
    much as the token's own; the values of all heads together are those numbers, as far as they go."""
    size = attention.width
    for part in (attention.q_proj.weight, attention.kv_proj.weight):
        nn.init.zeros_(part)
    keys, values = attention.kv_proj.weight.chunk(2)  # [K * E, inputs] each
    group = attention.heads // attention.kv_heads
    for head in range(attention.kv_heads):
        some = nn.init.orthogonal_(torch.empty(size, width)).to(keys)
        rows = slice(head * size, (head + 1) * size)
        keys[rows, :width] = some
        attention.q_proj.weight.unflatten(0, (attention.heads, size))[head * group : (head + 1) * group, :, :width] = (
            SHARPNESS * some
        )
    values[:, :width].fill_diagonal_(1)


def added(block: Any) -> list[nn.Linear]:
    """The linear layers of a block whose outputs are added to the residual stream, in their order."""
    found = [getattr(block.self_attn, "o_proj", None), getattr(block.mlp, "down_proj", None)]
    return [layer for layer in found if isinstance(layer, nn.Linear)]


@torch.no_grad()
def start_head(head: OutputHead, target: CausalLM) -> None:
    """Give a head of its own rows of the target's: of the first tokens, which merges have made the most frequent, until
    training counts them."""
    if head.lm_head is None:
        return
    rows = head.lm_head.out_features
    head.ids = torch.arange(rows, device=target.device) if rows < target.vocab_size else None
    head.lm_head.weight.copy_(output_rows(target)[:rows])


@torch.no_grad()
def output_rows(target: CausalLM) -> Tensor:
    """The weight [V, D] of the target's output head."""
    if target.config.tie_word_embeddings:
        return target.model.get_input_embeddings().weight.detach()
    return read_weight(target.model.get_output_embeddings(), target.width, target)


def scales_embeddings(target: CausalLM) -> bool:
    """Whether the target does more with a token than to look up its embedding, as Gemma does."""
    table = target.model.get_input_embeddings().weight
    some = torch.arange(min(8, len(table)), device=table.device)
    return not torch.equal(target.embed(some), table[some])


@torch.no_grad()
def start_norm(norm: Any, source: Any) -> None:
    """Give ``norm`` the weights of one of the target's, where both are norms of the same kind."""
    given = getattr(source, "weight", None)
    alike = isinstance(norm, RMSNorm) and given is not None and given.shape == norm.weight.shape
    if alike and "Gemma" not in type(source).__name__:
        norm.weight.copy_(given)


def mask_token(target: CausalLM) -> int:
    """A token for a place yet to be filled, whose embedding is one of the target's own: its mask, padding or end token.
    Raises ConfigError where it has none."""
    tokenizer = target.tokenizer
    for token in (tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise ConfigError(f"{target.name} has no mask, padding or end token; give drafter.network.mask=TOKEN_ID")


def check_layers(layers: int) -> None:
    """Raise ConfigError unless there is a layer."""
    if layers < 1:
        raise ConfigError(f"drafter.network.layers={layers} is no network; give 1 or more")


def check_vocabulary(size: int | None, target: CausalLM) -> None:
    """Raise ConfigError unless ``size`` can be that of a draft vocabulary."""
    if size is not None and not 1 <= size <= target.vocab_size:
        raise ConfigError(
            f"drafter.network.vocabulary={size} is not in 1..{target.vocab_size}, the target's vocabulary"
        )


@torch.no_grad()
def read_weight(layer: Any, inputs: int, target: CausalLM) -> Tensor:
    """The weight [out, ``inputs``] of a linear layer of the target's, however it is stored."""
    if isinstance(getattr(layer, "weight", None), Tensor):
        return layer.weight.detach().clone()
    return (layer(torch.eye(inputs, dtype=target.dtype, device=target.device)) - read_bias(layer, target, inputs)).T


@torch.no_grad()
def read_bias(layer: Any, target: CausalLM, inputs: int | None = None) -> Tensor:
    """What a linear layer of the target's adds [out]: zeros where it has no bias."""
    return layer(torch.zeros(1, inputs or target.width, dtype=target.dtype, device=target.device))[0]


def _loudest(up: Tensor, down: Tensor, count: int) -> Tensor:
    """Places of the ``count`` inner neurons that add most to the residual stream, in order; of all, if they fit."""
    loudness = up.float().norm(dim=1) * down.float().norm(dim=0)
    return loudness.topk(min(count, len(loudness))).indices.sort().values


def _fill(own: Tensor, given: Tensor) -> None:
    """Copy ``given`` [out, in] into the last columns of ``own`` [out, in']; leave it where the rows do not fit."""
    if own.shape[0] != given.shape[0] or own.shape[-1] < given.shape[-1]:
        return
    torch.nn.init.normal_(own, std=SPREAD)
    own[:, -given.shape[1] :].copy_(given)
