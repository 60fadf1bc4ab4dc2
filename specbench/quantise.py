"""Weight-only quantisation for CPUs: the weights of the decoder blocks as 8-bit or 4-bit integers, read by the kernels
of PyTorch.

At batch 1 a step takes as long as its weights take to read, so fewer bytes are fewer milliseconds; at many tokens a
pass the integers are converted again and again and bfloat16 wins. Whether drafting still pays then is a question for a
run. The embeddings and the head stay as they are: a vocabulary's rows suffer most from rounding.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from specbench.errors import ConfigError, nearest
from specbench.prepack import linear_layers

GROUP = 32  # weights that share a scale and an offset in 4 bits; the block of a GGUF file's 4-bit kinds
LEVELS = 15
CENTRE = 8  # the kernel takes levels from -8 to 7
INPUTS = 16  # the 8-bit kernel reads inputs by the sixteen, and past the end of others
OUTPUTS = 16  # the 4-bit kernel takes outputs by the sixteen
INNER_TILES = 2  # of the packed layout; without a meaning on a CPU


class Int8Linear(nn.Module):
    """``y = x W^T + b``, W [out, in] in 8 bits with a scale per output: symmetric, round to nearest."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127).to(linear.weight.dtype)
        integers = (weight / scale[:, None].float()).round().clamp(-127, 127).to(torch.int8)
        self.register_buffer("integers", integers, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.ops.aten._weight_int8pack_mm(flat, self.integers, self.scale)
        out = out.view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


class Int4Linear(nn.Module):
    """``y = x W^T + b``, W [out, in] in 4 bits with a scale and an offset per GROUP inputs: from the smallest weight of
    the group to the largest in LEVELS steps, round to nearest."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach().float().unflatten(1, (-1, GROUP))  # [out, groups, GROUP]
        low, high = weight.amin(dim=-1, keepdim=True), weight.amax(dim=-1, keepdim=True)
        step = (high - low).clamp(min=torch.finfo(torch.float32).tiny) / LEVELS
        levels = ((weight - low) / step).round().clamp(0, LEVELS).to(torch.int32).flatten(1)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, INNER_TILES)
        self.register_buffer("integers", packed, persistent=False)
        # [groups, out, 2]: a weight is (level - CENTRE) * step + offset
        scales = torch.cat((step, low + CENTRE * step), dim=-1).transpose(0, 1)
        self.register_buffer("scales", scales.contiguous().to(linear.weight.dtype), persistent=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.integers, GROUP, self.scales)
        out = out.view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


KINDS = {"int8": Int8Linear, "int4": Int4Linear}


def quantise(blocks: Iterable[nn.Module], kind: str) -> int:
    """Replace the linear layers within ``blocks`` by those of ``kind`` (int8 or int4), in place; returns how many.

    Raises ConfigError where that cannot be: an unknown kind, not on a CPU, not bfloat16, or a shape the kernel refuses.
    """
    if kind not in KINDS:
        raise ConfigError(f"target.quant={kind} is unknown. {nearest(kind, KINDS)}")
    found = 0
    for block in blocks:
        for module, name in linear_layers(block):
            child: Any = getattr(module, name)
            weight = child.weight
            if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16:
                dtype = str(weight.dtype).removeprefix("torch.")
                raise ConfigError(
                    f"target.quant={kind} runs on a CPU in bfloat16, and this is {weight.device.type} in {dtype}: add "
                    "device=cpu dtype=bfloat16, or leave target.quant out"
                )
            if kind == "int8" and weight.shape[1] % INPUTS:
                raise ConfigError(
                    f"target.quant=int8 takes layers of a multiple of {INPUTS} inputs; {name} has {weight.shape[1]}: "
                    "leave target.quant out"
                )
            if kind == "int4" and (weight.shape[0] % OUTPUTS or weight.shape[1] % GROUP):
                raise ConfigError(
                    f"target.quant=int4 takes layers of a multiple of {GROUP} inputs and {OUTPUTS} outputs; "
                    f"{name} has {weight.shape[1]} and {weight.shape[0]}: use target.quant=int8"
                )
            setattr(module, name, KINDS[kind](child))
            found += 1
        kept = [name for name, weight in block.named_parameters() if weight.ndim > 1]
        if kept:
            raise ConfigError(
                f"target.quant={kind} cannot store {kept[0]}, which is in no plain linear layer: leave target.quant out"
            )
    return found
