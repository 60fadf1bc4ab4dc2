"""The forward of Llama-shaped decoders in as few operations as it takes.

Legend: B rows, S tokens a row, T' slots attended to, H query heads, K key/value heads, G = H/K, E head width, D hidden
width, V vocabulary.

At batch 1 a small model's step is so short that the number of operations counts: each costs microseconds whatever it
computes, on a CPU as on a GPU. So queries, keys and values are one product, rotated together, and written to the cache
in one piece; query heads that share a key head are laid along the tokens, so that keys are never repeated; gate and up
projections are one product. The numbers are those of transformers' own forward up to rounding, which is checked each
time a model is loaded (``check_rollback``).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from specbench.cache import RaggedCache
from specbench.prepack import merge

SHAPES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


def unfit(model: Any) -> str | None:
    """Why ``model`` cannot run here, in words; None if it can."""
    if type(model) not in SHAPES:
        return f"{type(model).__name__} is not Llama-shaped"
    if 2 * len(model.model.rotary_emb.inv_freq) != model.model.layers[0].self_attn.head_dim:
        return "it rotates a part of each head only"
    for block in model.model.layers:
        attention = block.self_attn
        layers = [m for m in (*attention.children(), *block.mlp.children()) if hasattr(m, "out_features")]
        strange = [type(layer).__name__ for layer in layers if type(layer) is not nn.Linear]
        if strange:
            return f"it has linear layers of a kind of their own, {strange[0]}"
        joined = (attention.q_proj, attention.k_proj, attention.v_proj), (block.mlp.gate_proj, block.mlp.up_proj)
        if any(len({getattr(layer, "bias", None) is None for layer in together}) > 1 for together in joined):
            return "of the layers that are joined some have a bias and some have none"
    return None


class Fused:
    """``model``'s forward; merges its layers in place, and leaves it runnable (see ``prepack.Part``)."""

    def __init__(self, model: Any, kinds: Sequence[str]):
        """``kinds``: the kind of attention of each block, a key of the windows given to ``forward``."""
        decoder = model.model
        self.embedding = decoder.embed_tokens
        self.rotary = decoder.rotary_emb
        self.blocks = [Block(block, i, kind) for i, (block, kind) in enumerate(zip(decoder.layers, kinds, strict=True))]
        self.norm = RMSNorm(decoder.norm)
        self.model = model

    def __call__(
        self,
        tokens: Tensor,
        cache: RaggedCache,
        windows: dict[str, int | None],
        taps: Sequence[int] = (),
        last_only: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """tokens [B, S] at the slots ``cache`` was told -> logits [B, S, V] (of the last token alone: [B, 1, V]) and
        the residual streams [B, S, D] after the numbers of blocks in ``taps``."""
        slots = cache.slot_ids()
        x = self.embedding(tokens)
        cos, sin = self.rotary(x, cache.position_ids(slots))
        rotation = self.blocks[0].attention.rotation(cos, sin)
        masks = {kind: self._mask(cache.visible(slots, window), x.dtype) for kind, window in windows.items()}
        streams = {0: x}
        for i, block in enumerate(self.blocks):
            x = block(x, cache, rotation, masks)
            if i + 1 in taps:
                streams[i + 1] = x
        if last_only:
            x = x[:, -1:]
        return self.model.lm_head(self.norm(x)), [streams[i] for i in taps]

    def _mask(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        """visible [B, S, T'] -> what is added to the scores [B, 1, S*G, T']: a token's G query heads stand together."""
        added = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
        return added.repeat_interleave(self.blocks[0].attention.group, dim=1)[:, None]


class Block:
    """A decoder block: attention and a gated perceptron, each read from a normed residual stream and added to it."""

    def __init__(self, block: Any, index: int, kind: str):
        self.kind = kind
        self.attention_norm = RMSNorm(block.input_layernorm)
        self.attention = Attention(block.self_attn, index)
        self.mlp_norm = RMSNorm(block.post_attention_layernorm)
        self.mlp = block.mlp
        merge(self.mlp, ("gate_proj", "up_proj"), "gate_up_proj")

    def __call__(
        self, x: Tensor, cache: RaggedCache, rotation: tuple[Tensor, Tensor], masks: dict[str, Tensor]
    ) -> Tensor:
        """x [B, S, D] -> [B, S, D]."""
        x = x + self.attention(self.attention_norm(x), cache, rotation, masks[self.kind])
        gate, up = self.mlp.gate_up_proj(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.mlp.down_proj(self.mlp.act_fn(gate) * up)


class Attention:
    """Grouped-query attention over a ragged cache (Ainslie et al. 2023), with rotary positions (Su et al. 2021)."""

    def __init__(self, attention: Any, index: int):
        self.index = index
        self.layers = attention  # looked up at each call: they may be packed later
        self.width = attention.head_dim
        self.heads = attention.config.num_attention_heads
        self.kv_heads = attention.config.num_key_value_heads
        self.group = self.heads // self.kv_heads
        self.scale = attention.scaling
        # Qwen3 norms each query and key head
        self.head_norms = None
        if hasattr(attention, "q_norm"):
            self.head_norms = (RMSNorm(attention.q_norm), RMSNorm(attention.k_norm))
        merge(attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj")

    def rotation(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [B, S, E] -> factors [B, S, H+2K, E] of a head and of its halves exchanged: queries and keys turn,
        values stay."""
        turning, staying = self.heads + self.kv_heads, self.kv_heads
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        cos, sin = (t[:, :, None].expand(-1, -1, turning, -1) for t in (cos, sin))
        still = cos[:, :, :staying]
        return torch.cat((cos, torch.ones_like(still)), dim=2), torch.cat((sin, torch.zeros_like(still)), dim=2)

    def __call__(self, x: Tensor, cache: RaggedCache, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """x [B, S, D] -> [B, S, D]."""
        batch, steps, _ = x.shape
        qkv = self.layers.qkv_proj(x).view(batch, steps, -1, self.width)  # [B, S, H+2K, E]
        if self.head_norms is not None:
            q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
            qkv = torch.cat((self.head_norms[0](q), self.head_norms[1](k), v), dim=2)
        cos, sin = rotation
        qkv = torch.addcmul(qkv * cos, qkv.roll(self.width // 2, dims=-1), sin)
        kept = cache.append(self.index, qkv[:, :, self.heads :].flatten(2)).unflatten(-1, (-1, self.width))
        keys, values = kept.transpose(1, 2).split(self.kv_heads, dim=1)  # [B, K, T', E]
        q = qkv[:, :, : self.heads].unflatten(2, (self.kv_heads, self.group)).transpose(1, 2)
        q = q.reshape(batch, self.kv_heads, steps * self.group, self.width)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=self.scale)
        out = out.unflatten(2, (steps, self.group)).transpose(1, 2)
        return self.layers.o_proj(out.reshape(batch, steps, -1))


class RMSNorm:
    """Root mean square norm (Zhang and Sennrich 2019) over the last dimension, with a weight."""

    def __init__(self, norm: Any):
        self.weight = norm.weight
        self.eps = norm.variance_epsilon
        # x and -x side by side have mean 0 and x's mean square as variance, so their layer norm, one kernel on a CPU
        # where this norm is ten, is what is asked for
        self._doubled = torch.cat((self.weight, self.weight)) if self.weight.device.type == "cpu" else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        size = x.shape[-1]
        if self._doubled is None:
            return F.rms_norm(x, (size,), self.weight, self.eps)
        pair = torch.cat((x, x.neg()), dim=-1)
        return F.layer_norm(pair, (2 * size,), self._doubled, None, self.eps)[..., :size]
