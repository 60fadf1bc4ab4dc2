"""Linear layers laid out once for inference: merged where they read the same input, and on a CPU stored as its kernels
read them.

PyTorch hands a bfloat16 ``nn.Linear`` to oneDNN, which reorders the weight into its blocked layout on every call; at
batch 1 that costs as much as the product itself, so it is done once, at load. float32 goes to the BLAS, which is
fastest at few tokens when the weight stands transposed; packing gains nothing there. The arithmetic stays the kernels'.
"""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

# oneDNN picks the layout for a number of tokens. One picked for 16 serves a single token as well as one picked for 1
# does, and larger passes up to twice as fast.
EXPECTED_TOKENS = 16


class PackedLinear(nn.Module):
    """``y = x W^T + b`` with W [out, in] kept in oneDNN's layout; takes the place of an ``nn.Linear`` for inference."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        weight = linear.weight.detach().contiguous()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_TOKENS)
        self.register_buffer("packed", packed, persistent=False)
        self._multiply = _packed_product()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return self._multiply(x, self.packed, self.bias)


@cache
def _packed_product() -> Any:
    """oneDNN's product in TorchScript's own words, as a trace cannot write down its empty list of scalars."""
    source = """
def product(x: Tensor, packed: Tensor, bias: Optional[Tensor]) -> Tensor:
    scalars = torch.jit.annotate(List[Optional[number]], [])
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", scalars, "")
"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TorchScript's age
        return torch.jit.CompilationUnit(source).product


class Part(nn.Module):
    """Some of the outputs of a merged layer, in the place of the layer that gave them, so that the model the layers
    were taken from still runs as its authors wrote it: slower, and with nothing kept twice."""

    def __init__(self, parent: nn.Module, merged: str, start: int, stop: int):
        super().__init__()
        self._parent = (parent,)  # in a tuple: no submodule, or the parent would contain itself
        self._merged = merged
        self._outputs = slice(start, stop)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., stop - start]."""
        return getattr(self._parent[0], self._merged)(x)[..., self._outputs]


def merge(parent: nn.Module, names: Sequence[str], merged: str) -> None:
    """Join the ``nn.Linear`` children ``names`` of ``parent``, which read the same input, into one child ``merged``
    whose outputs stand side by side; each becomes a ``Part`` of it. Does nothing where they are joined already."""
    if hasattr(parent, merged):
        return
    layers: list[Any] = [getattr(parent, name) for name in names]
    sizes = [layer.out_features for layer in layers]
    biased = layers[0].bias is not None
    joint = nn.Linear(layers[0].in_features, sum(sizes), bias=biased, device="meta")
    joint.weight = _frozen([layer.weight for layer in layers])
    if biased:
        joint.bias = _frozen([layer.bias for layer in layers])
    setattr(parent, merged, joint)
    start = 0
    for name, size in zip(names, sizes, strict=True):
        setattr(parent, name, Part(parent, merged, start, start + size))
        start += size


def linear_layers(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every ``nn.Linear`` of ``model`` as its parent and its name there. The layers themselves are not held, so that
    each is free as soon as it is replaced."""
    return [(m, name) for m in model.modules() for name, c in m.named_children() if type(c) is nn.Linear]


def prepack(model: nn.Module) -> int:
    """Store the linear layers of ``model`` for inference, in place; returns how many. None where the model is not on
    the CPU. The model can no longer be trained or saved afterwards."""
    found = 0
    packs = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for module, name in linear_layers(model):
        child: Any = getattr(module, name)
        if child.weight.device.type == "cpu":
            if child.weight.dtype is torch.float32:
                # a tied embedding keeps its own rows, which it reads one by one
                child.weight = nn.Parameter(child.weight.detach().t().contiguous().t(), requires_grad=False)
                found += 1
            elif child.weight.dtype is torch.bfloat16 and packs:
                setattr(module, name, PackedLinear(child))
                found += 1
    return found


def _frozen(parts: Sequence[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([part.detach() for part in parts]), requires_grad=False)
