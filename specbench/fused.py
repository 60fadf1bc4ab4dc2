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

from specbench.cache import RaggedCache, places, visible, write, written_slots
from specbench.prepack import merge
from specbench.traced import Traced

SHAPES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)

LENGTH_DEPENDENT = {"dynamic", "longrope"}  # kinds of rotary embedding


def unfit(model: Any) -> str | None:
    """Why ``model`` cannot run here, in words; None if it can."""
    if type(model) not in SHAPES:
        return f"{type(model).__name__} is not Llama-shaped"
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in LENGTH_DEPENDENT:
        return "its rotary frequencies depend on the length of the text"
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


class FusedDecoder:
    """``Fused`` on a ragged cache; on a CPU it is traced."""

    def __init__(self, model: Any, kinds: Sequence[str], windows: dict[str, int | None], name: str):
        """See ``Fused``; ``name`` is for people."""
        fused = Fused(model, kinds, windows)
        # on a GPU steps are recorded as a whole, and Python does not run at all
        self._forward = fused if model.device.type == "cuda" else Traced(fused, name)
        attention = model.model.layers[0].self_attn
        width = 2 * model.config.num_key_value_heads * attention.head_dim
        self._layers = len(model.model.layers)
        self._entry = torch.empty(width, dtype=model.dtype, device=model.device)

    @property
    def kind(self) -> str:
        """How it runs, for the record."""
        return "fused, traced" if isinstance(self._forward, Traced) and self._forward.traced else "fused"

    def __call__(
        self, tokens: Tensor, cache: RaggedCache, taps: tuple[int, ...] = (), last_only: bool = False
    ) -> tuple[Tensor, ...]:
        """tokens [B, S] at the slots ``cache`` was told -> what ``Fused`` gives."""
        kept = [cache.layer(i, self._entry) for i in range(self._layers)]
        return self._forward(tokens, cache.starts, cache.ids, kept, taps=taps, last_only=last_only)


class Fused(nn.Module):
    """``model``'s forward; merges its layers in place, and leaves it runnable (see ``prepack.Part``)."""

    def __init__(self, model: Any, kinds: Sequence[str], windows: dict[str, int | None]):
        """``kinds``: the kind of attention of each block; ``windows``: how far back each kind sees, None for all."""
        super().__init__()
        self.model = model
        self._windows = windows
        self._blocks = [Block(block, kind) for block, kind in zip(model.model.layers, kinds, strict=True)]
        self._norm = RMSNorm(model.model.norm)

    def forward(
        self,
        tokens: Tensor,
        starts: Tensor,
        ids: Tensor,
        kept: list[Tensor],
        taps: Sequence[int] = (),
        last_only: bool = False,
    ) -> tuple[Tensor, ...]:
        """tokens [B, S], at slots from ``starts`` [B] on, attending to the slots ``ids`` [T'], of what each layer has
        ``kept`` [B, T, W] -> logits [B, S, V] (of the last token alone: [B, 1, V]); and, if there are ``taps``, the
        residual streams after those numbers of blocks [B, S, m, D]."""
        slots = written_slots(tokens, starts)
        x = self.model.model.embed_tokens(tokens)
        cos, sin = self.model.model.rotary_emb(x, slots)
        rotation = self._blocks[0].attention.rotation(cos, sin)
        masks = {kind: self._mask(visible(slots, ids, window), x.dtype) for kind, window in self._windows.items()}
        where = places(slots, kept[0].shape[1])
        streams = [x]
        for block, layer in zip(self._blocks, kept, strict=True):
            x = block(x, layer, where, rotation, masks)
            streams.append(x)
        if last_only:
            x = x[:, -1:]
        logits = self.model.lm_head(self._norm(x))
        return (logits, torch.stack([streams[i] for i in taps], dim=2)) if taps else (logits,)

    def _mask(self, seen: Tensor, dtype: torch.dtype) -> Tensor:
        """seen [B, S, T'] -> what is added to the scores [B, 1, S*G, T']: a token's G query heads stand together."""
        added = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
        return added.repeat_interleave(self._blocks[0].attention.group, dim=1)[:, None]


class Block:
    """A decoder block: attention and a gated perceptron, each read from a normed residual stream and added to it."""

    def __init__(self, block: Any, kind: str):
        self.kind = kind
        self.attention_norm = RMSNorm(block.input_layernorm)
        self.attention = Attention(block.self_attn)
        self.mlp_norm = RMSNorm(block.post_attention_layernorm)
        self.mlp = block.mlp
        merge(self.mlp, ("gate_proj", "up_proj"), "gate_up_proj")

    def __call__(
        self, x: Tensor, kept: Tensor, where: Tensor, rotation: tuple[Tensor, Tensor], masks: dict[str, Tensor]
    ) -> Tensor:
        """x [B, S, D] -> [B, S, D]."""
        x = x + self.attention(self.attention_norm(x), kept, where, rotation, masks[self.kind])
        gate, up = self.mlp.gate_up_proj(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.mlp.down_proj(self.mlp.act_fn(gate) * up)


class Attention:
    """Grouped-query attention over a ragged cache (Ainslie et al. 2023), with rotary positions (Su et al. 2021)."""

    def __init__(self, attention: Any):
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

    def __call__(self, x: Tensor, kept: Tensor, where: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """x [B, S, D] -> [B, S, D]."""
        batch, steps, _ = x.shape
        qkv = self.layers.qkv_proj(x).view(batch, steps, self.heads + 2 * self.kv_heads, self.width)  # [B, S, H+2K, E]
        if self.head_norms is not None:
            q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
            qkv = torch.cat((self.head_norms[0](q), self.head_norms[1](k), v), dim=2)
        cos, sin = rotation
        qkv = torch.addcmul(qkv * cos, qkv.roll(self.width // 2, dims=-1), sin)
        write(kept, qkv[:, :, self.heads :].flatten(2), where)
        attended = kept[:, : mask.shape[-1]].unflatten(-1, (2 * self.kv_heads, self.width))
        keys, values = attended.transpose(1, 2).split(self.kv_heads, dim=1)  # [B, K, T', E]
        q = qkv[:, :, : self.heads].unflatten(2, (self.kv_heads, self.group)).transpose(1, 2)
        q = q.reshape(batch, self.kv_heads, steps * self.group, self.width)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=self.scale)
        out = out.unflatten(2, (steps, self.group)).transpose(1, 2)
        return self.layers.o_proj(out.reshape(batch, steps, self.heads * self.width))


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
