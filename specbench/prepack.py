"""Linear layers with weights laid out once for oneDNN, for CPU inference.

PyTorch's ``nn.Linear`` reorders a weight into oneDNN's blocked layout on every call; at batch 1 that costs as much as
the product itself. Here the reordering happens once, at load. The arithmetic is the same kernel's.
"""

import torch
from torch import Tensor, nn

DTYPES = (torch.bfloat16,)  # in float32 the reordered weights were no faster


class PackedLinear(nn.Module):
    """``y = x W^T + b`` with W [out, in] kept in oneDNN's layout; takes the place of an ``nn.Linear`` for inference."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), 1)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def prepack(model: nn.Module) -> int:
    """Replace the linear layers of ``model`` by packed ones, in place; returns how many. None where oneDNN is absent
    or the weights are of another type or not on the CPU. The model can no longer be trained afterwards."""
    if not torch.backends.mkldnn.is_available():
        return 0
    replaced = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child.weight.dtype in DTYPES and child.weight.device.type == "cpu":
                setattr(module, name, PackedLinear(child))
                replaced += 1
    return replaced
