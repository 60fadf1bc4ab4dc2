"""A start by least squares: before any step is taken, the linear layers that a network's prediction is a sum of are
fitted, one after the other, to the stream that the target itself comes to.

Legend: B texts, A positions, D width, N rows that count, I inputs of a layer.

A drafter's last residual stream h is a sum of what linear layers put out, and its norm and head make tokens of it as
the target's do of its own last stream. So h is right where it has the direction of y, the target's stream at the token
in question. With all those layers at zero, each in turn takes the weight W of

    min_W sum_n |y_n - h_n - W x_n|^2                 x [N, I] what it reads, h [N, D] what those before it have made

which normal equations solve exactly, in a minute or a few on a thousand conversations (docs/training.md says what that
is worth). Squared distance says nothing of how sure a guess is: a factor on the norm's weight, of least loss, does.
A layer that lowers the distance no further (one whose output something bends before it is added, say) keeps the weight
it had.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from drafters.neural import Sum
from drafters.training.batches import Batch
from drafters.training.trainer import Learner

RIDGE = 1e-3  # added to the normal equations' diagonal, relative to it
LOOKED_AT = 4  # batches by which a layer is judged
GAINS = (0.2, 2.0)  # factors on the norm's weight that are tried

MakeBatch = Callable[[], Batch]


def fit(learner: Learner, last: Sum, batches: Sequence[MakeBatch], accelerator: Accelerator) -> None:
    """Fit the layers of ``last`` on ``batches``, which are made when they are called."""
    before = {layer: layer.weight.detach().clone() for layer in last.layers}
    for layer in before:
        nn.init.zeros_(layer.weight)
    few = batches[:LOOKED_AT]
    distance = _distance(learner, last, few, accelerator)
    for layer in last.layers:
        kept = layer.weight.detach().clone()
        solution = _solve(learner, last, layer, batches, accelerator)
        with torch.no_grad():
            layer.weight.copy_(solution)
        found = _distance(learner, last, few, accelerator)
        if found < distance:
            distance = found
        else:
            with torch.no_grad():
                layer.weight.copy_(kept if kept.any() else before[layer])
            distance = _distance(learner, last, few, accelerator)
    _scale(learner, last.norm, few, accelerator)


def _solve(
    learner: Learner, last: Sum, layer: nn.Linear, batches: Sequence[MakeBatch], accelerator: Accelerator
) -> Tensor:
    """The weight [D, I] of ``layer`` that leaves least of the target's stream over.

    The gradient of half the squared distance by the layer's output is what the output has too much, wherever it ends up
    in the sum, and zero where it does not."""
    inputs = layer.in_features
    gram = torch.zeros(inputs, inputs, dtype=torch.float64)
    moments = torch.zeros(inputs, layer.out_features, dtype=torch.float64)
    for make in batches:
        batch = make()
        seen: list[Tensor] = []

        def watch(module: nn.Module, given: Any, output: Tensor, seen: list[Tensor] = seen) -> Tensor:
            if seen:  # a layer that is run again recurses on what it has made
                return output
            seen.extend((given[0].detach(), output.detach().requires_grad_(True)))
            return seen[1]

        handle = layer.register_forward_hook(watch)
        try:
            total = _squares(learner, last, batch, accelerator).sum() / 2
        finally:
            handle.remove()
        (excess,) = torch.autograd.grad(total, seen[1])
        x, output, excess = (t.flatten(0, -2).float() for t in (seen[0], seen[1].detach(), excess))
        counts = excess.abs().sum(dim=-1) > 0
        x, wanted = x[counts], (output - excess)[counts]
        gram += (x.T @ x).cpu()
        moments += (x.T @ wanted).cpu()
    size = gram.diagonal().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    gram = gram / size / size[:, None] + RIDGE * torch.eye(inputs, dtype=torch.float64)
    return (torch.linalg.solve(gram, moments / size[:, None]) / size[:, None]).T.to(layer.weight)


def _squares(learner: Learner, last: Sum, batch: Batch, accelerator: Accelerator) -> Tensor:
    """|y - h|^2 [B, A] over the drafts, 0 where nothing is known."""
    handle = last.norm.register_forward_hook(lambda module, given, output: given[0])  # what it reads is what is fitted
    try:
        with accelerator.autocast():
            drafts = learner.drafter.hidden(learner.model, learner.target, batch.passages, last.drafts)
    finally:
        handle.remove()
    weight: Tensor = last.norm.weight.detach().float()  # type: ignore[operator]
    right = batch.hidden.float() / weight.where(weight != 0, 1)
    found = torch.zeros(batch.real.shape, device=right.device)
    for k, hidden in enumerate(drafts):
        place = batch.passages.at + 1 + k
        known = batch.real & (place + 1 < batch.lengths[:, None])
        place = place.clamp(max=right.shape[1] - 1)[..., None].expand(-1, -1, right.shape[-1])
        found = found + (right.gather(1, place) - hidden.float()).square().sum(dim=-1).where(known, 0)
    return found


@torch.no_grad()
def _distance(learner: Learner, last: Sum, batches: Sequence[MakeBatch], accelerator: Accelerator) -> float:
    return sum(_squares(learner, last, make(), accelerator).sum().item() for make in batches)


@torch.no_grad()
def _scale(learner: Learner, norm: nn.Module, batches: Sequence[MakeBatch], accelerator: Accelerator) -> None:
    """Multiply the norm's weight by the factor of least loss."""
    weight: Tensor = norm.weight  # type: ignore[assignment]
    whole = weight.clone()
    made = [make() for make in batches]

    def loss(factor: float) -> float:
        weight.copy_(whole * factor)
        with accelerator.autocast():
            return sum(learner(batch).item() * batch.positions for batch in made)

    best = minimize_scalar(loss, bounds=GAINS, method="bounded", options={"xatol": 0.02}).x
    weight.copy_(whole * best)
