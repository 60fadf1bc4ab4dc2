"""The decoder block that the drafting heads are made of, and the network's way to run on a ragged cache.

Legend: B rows, S tokens, T entries attended to, H query heads, K key/value heads, G = H/K, E head width, D width of the
residual stream, W = 2*K*E numbers kept per token and layer (all key heads, then all value heads).

A block asks a ``Memory`` for what it attends to: it hands over the entries of its S tokens and is handed all entries.
In a cache they are written among earlier ones; in training they are joined to those of other passes. So the same block
serves both, and what is trained is what is run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specbench.cache import places, write

Memory = Callable[[Tensor], Tensor]  # entries [B, S, W] of these tokens -> entries [B, T, W] to attend to
Rotation = tuple[Tensor, Tensor]  # cosines and signed sines, [B, S, 1, E]

DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class Shape:
    """Sizes and kinds of Llama-shaped blocks.

    width: D. heads, kv_heads, head_width: H, K, E. inner: width inside the perceptron. layers: number of blocks.
    rope: parameters of the rotary embedding as transformers names them (rope_theta, rope_type, ...).
    head_norms: each query and key head is normed, as in Qwen3. qkv_bias, out_bias, mlp_bias: which layers have one.
    """

    width: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    layers: int = 1
    eps: float = 1e-6
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": DEFAULT_THETA})
    positions: int = 4096
    head_norms: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019) over the last dimension."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        size = x.shape[-1]
        if x.device.type != "cpu" or torch.is_grad_enabled():
            return F.rms_norm(x, (size,), self.weight.to(x.dtype), self.eps)
        # x and -x side by side have mean 0 and x's mean square as variance: their layer norm, one kernel on a CPU where
        # this norm is ten, is what is asked for
        pair = F.layer_norm(torch.cat((x, x.neg()), dim=-1), (2 * size,), None, None, self.eps)
        return pair[..., :size] * self.weight


class Rotary(nn.Module):
    """Rotary positions (Su et al. 2021), of all the kinds that transformers computes."""

    def __init__(self, shape: Shape):
        super().__init__()
        config = LlamaConfig(
            hidden_size=shape.width,
            num_attention_heads=shape.heads,
            head_dim=shape.head_width,
            max_position_embeddings=shape.positions,
            rope_parameters=dict(shape.rope),
        )
        self._embedding = LlamaRotaryEmbedding(config)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        """Moves with its network, and stays in float32: rounded frequencies turn far tokens to wrong places."""
        exact = dict(self._embedding.named_buffers())
        super()._apply(fn, recurse)
        for name, frequencies in exact.items():
            setattr(self._embedding, name, frequencies.to(getattr(self._embedding, name).device))
        return self

    def forward(self, positions: Tensor, like: Tensor) -> Rotation:
        """positions [B, S] -> what ``rotate`` takes, in the dtype of ``like``."""
        cos, sin = self._embedding(like, positions)  # [B, S, E]
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        return cos[:, :, None], sin[:, :, None]


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Turn ``heads`` [B, S, H, E] to their positions."""
    cos, sin = rotation
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), sin)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) over entries that need not come from its own input."""

    def __init__(self, shape: Shape, inputs: int):
        """``inputs``: width of what queries, keys and values are read from."""
        super().__init__()
        self.heads, self.kv_heads, self.width = shape.heads, shape.kv_heads, shape.head_width
        self.q_proj = nn.Linear(inputs, shape.heads * shape.head_width, bias=shape.qkv_bias)
        self.kv_proj = nn.Linear(inputs, 2 * shape.kv_heads * shape.head_width, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(shape.heads * shape.head_width, shape.width, bias=shape.out_bias)
        self.q_norm = RMSNorm(shape.head_width, shape.eps) if shape.head_norms else nn.Identity()
        self.k_norm = RMSNorm(shape.head_width, shape.eps) if shape.head_norms else nn.Identity()

    def entries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Keys, turned to their positions, and values of x [B, S, inputs]: [B, S, W]."""
        keys, values = self.kv_proj(x).unflatten(-1, (2, self.kv_heads, self.width)).unbind(2)
        keys = rotate(self.k_norm(keys), rotation)
        return torch.cat((keys.flatten(2), values.flatten(2)), dim=-1)

    def forward(self, x: Tensor, rotation: Rotation, entries: Tensor, mask: Tensor) -> Tensor:
        """x [B, S, inputs], entries [B, T, W], mask [B, S, T] to add to the scores -> [B, S, D]."""
        batch, steps, _ = x.shape
        group = self.heads // self.kv_heads
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.width))), rotation)
        keys, values = entries.unflatten(-1, (2, self.kv_heads, self.width)).permute(2, 0, 3, 1, 4)  # [B, K, T, E]
        # the query heads that share a key head are laid along the tokens, so that keys need not be repeated
        q = q.unflatten(2, (self.kv_heads, group)).transpose(1, 2).reshape(batch, self.kv_heads, -1, self.width)
        mask = mask.repeat_interleave(group, dim=1)[:, None]
        attend = (
            _attend_with_matrices
            if torch.is_grad_enabled() and q.device.type == "cpu"
            else F.scaled_dot_product_attention
        )
        out = attend(q, keys, values, attn_mask=mask, scale=self.width**-0.5)
        out = out.unflatten(2, (steps, group)).transpose(1, 2)  # [B, S, K, G, E]
        return self.o_proj(out.reshape(batch, steps, self.heads * self.width))


def _attend_with_matrices(q: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor, scale: float) -> Tensor:
    """As ``F.scaled_dot_product_attention``, whose gradient on a CPU takes up to three times as long."""
    shape = (*q.shape[:-1], keys.shape[-2])
    q, keys, values = (t.flatten(0, 1) for t in (q, keys, values))
    mask = attn_mask.expand(shape).flatten(0, 1).to(q.dtype)
    laws = torch.baddbmm(mask, q, keys.transpose(1, 2), alpha=scale).softmax(dim=-1)
    return torch.bmm(laws.to(values.dtype), values).unflatten(0, shape[:2])


class MLP(nn.Module):
    """Gated perceptron (Shazeer 2020)."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_up_proj = nn.Linear(shape.width, 2 * shape.inner, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.inner, shape.width, bias=shape.mlp_bias)
        self.act = ACT2FN[shape.activation]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act(gate) * up)


class Block(nn.Module):
    """A Llama-shaped decoder block."""

    def __init__(self, shape: Shape, inputs: int | None = None, input_norm: bool = True):
        """``inputs``: width of what attention reads, where that is not the normed residual stream."""
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width, shape.eps) if input_norm else nn.Identity()
        self.self_attn = Attention(shape, inputs or shape.width)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.eps)
        self.mlp = MLP(shape)

    def forward(
        self, x: Tensor, rotation: Rotation, memory: Memory, mask: Tensor, reads: Tensor | None = None
    ) -> Tensor:
        """Residual stream x [B, S, D] -> [B, S, D]. ``reads`` [B, S, inputs]: what attention reads instead of the
        normed x."""
        if reads is None:
            reads = self.input_layernorm(x)
        entries = memory(self.self_attn.entries(reads, rotation))
        x = x + self.self_attn(reads, rotation, entries, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


def in_cache(kept: Tensor, slots: Tensor, attended: int) -> Memory:
    """Memory that writes to ``slots`` [B, S] of ``kept`` [B, T', W] and gives the first ``attended`` slots."""
    where = places(slots, kept.shape[1])

    def remember(entries: Tensor) -> Tensor:
        write(kept, entries, where)
        return kept[:, :attended]

    return remember


def joined_to(earlier: list[Tensor]) -> Memory:
    """Memory that joins new entries to those of ``earlier`` passes, and is itself remembered there."""

    def remember(entries: Tensor) -> Tensor:
        earlier.append(entries)
        return torch.cat(earlier, dim=1)

    return remember


def hide(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores so that only the ``seen`` [B, S, T] count."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def entry_widths(shape: Shape) -> list[int]:
    """Numbers kept per token in each layer."""
    return [2 * shape.kv_heads * shape.head_width] * shape.layers
