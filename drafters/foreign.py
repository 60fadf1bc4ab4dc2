"""A decoder block of the target's own kind, as transformers has it, in the place of one of ours.

MTP modules are by definition blocks like the target's: with latent attention and experts in DeepSeek-V3, with gated
attention in Qwen3-Next. They are run as their authors wrote them; only their keys and values go where ours go.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from drafters.blocks import Memory
from specbench.errors import ConfigError
from specbench.model import CausalLM


class ForeignRotary(nn.Module):
    """The target's rotary embedding."""

    def __init__(self, target: CausalLM):
        super().__init__()
        rotary = getattr(target.model.get_decoder(), "rotary_emb", None)
        if rotary is None:
            raise ConfigError(f"{target.name} has no rotary embedding of the usual kind; its MTP blocks cannot be run")
        self._rotary = (rotary,)  # in a tuple: no submodule

    def forward(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, S] -> cosines and sines as the target's blocks take them."""
        return self._rotary[0](like, positions)


class ForeignBlock(nn.Module):
    """A block like the target's last one with full attention, its weights not set; called like ``blocks.Block``."""

    def __init__(self, target: CausalLM):
        super().__init__()
        kinds = getattr(target.config, "layer_types", None) or ["full_attention"] * len(target.blocks)
        full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        if not full:
            raise ConfigError(f"{target.name} has no block with full attention, as its MTP block would be")
        kind: Any = type(target.blocks[full[-1]])
        self.layer = kind(target.config, full[-1])
        arguments = inspect.signature(kind.forward).parameters
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], memory: Memory, mask: Tensor) -> Tensor:
        """See ``blocks.Block.forward``."""
        given = {"attention_mask": mask[:, None], "position_embeddings": rotation, self._cache_argument: _Port(memory)}
        out = self.layer(x, **given)
        return out[0] if isinstance(out, tuple) else out

    @torch.inference_mode()
    def entry_width(self, rotary: nn.Module) -> int:
        """Numbers kept per token, found by running a token."""
        widths: list[int] = []

        def remember(entries: Tensor) -> Tensor:
            widths.append(entries.shape[-1])
            return entries

        weight = next(self.layer.parameters())
        x = torch.zeros(1, 1, self.layer.input_layernorm.weight.shape[0], dtype=weight.dtype, device=weight.device)
        rotation = rotary(torch.zeros(1, 1, dtype=torch.long, device=weight.device), x)
        self(x, rotation, remember, torch.zeros(1, 1, 1, dtype=weight.dtype, device=weight.device))
        return widths[0]


class _Port(Cache):
    """What a transformers' attention takes for a cache, with a ``Memory`` behind it."""

    def __init__(self, memory: Memory):
        super().__init__(layers=[])
        self._memory = memory

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, S, E] in, all those attended to out."""
        keys, values = key_states.transpose(1, 2).flatten(2), value_states.transpose(1, 2).flatten(2)
        entries = self._memory(torch.cat((keys, values), dim=-1))
        parts = (entries[..., : keys.shape[-1]], key_states), (entries[..., keys.shape[-1] :], value_states)
        keys, values = (part.unflatten(-1, (like.shape[1], like.shape[3])).transpose(1, 2) for part, like in parts)
        return keys, values
