"""The start by least squares: each layer is what the normal equations say, and none makes anything worse."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from conftest import mutated
from test_training import as_it_was, data_home, own_words, train, training  # noqa: F401
from test_training_data import said
from torch.nn import functional as F

from drafters import blocks, initial
from drafters.neural import Sum
from drafters.training import card, start

FITTED = ("eagle", "mtp", "dflash", "dspark", "small_lm")


def batches(made):
    groups = made.batches.epoch(range(len(made.conversations)), 100, "x")
    return [partial(made.batches.make, members, 1.0, "x") for members in groups]


def distance(made, last):
    return start._distance(made.trainer._learner, last, batches(made), Accelerator(cpu=True))


def fit(made, last):
    start.fit(made.trainer._learner, last, batches(made), Accelerator(cpu=True))


def test_a_layer_gets_the_weight_that_least_squares_give_it(tmp_path):
    made = training("mtp", tmp_path)
    cell, target = made.model.network.cells[0], made.target
    for layer in made.drafter.last_sum(made.model).layers:
        torch.nn.init.zeros_(layer.weight)  # so that the first alone is what the stream is made of
    read, right = [], []
    for make in batches(made):
        batch = make()
        features = target.norm(batch.passages.streams[:, :, 0])
        for row, (at, real) in enumerate(zip(batch.passages.at, batch.real, strict=True)):
            for t in at[real].tolist():
                token = cell.token_norm(target.embed(batch.passages.tokens[row, t + 1]))
                read.append(torch.cat((token, cell.hidden_norm(features[row, t]))))
                right.append(batch.hidden[row, t + 1] / cell.norm.weight)
    x, y = torch.stack(read).double(), torch.stack(right).double()
    scales = x.square().sum(dim=0).sqrt()
    gram = x.T @ x + start.RIDGE * torch.diag(scales**2)
    expected = torch.linalg.solve(gram, x.T @ y).T.float()
    given = (made.trainer._learner, Sum(cell.norm, []), cell.input_proj, batches(made), Accelerator(cpu=True))
    torch.testing.assert_close(start._solve(*given), expected, rtol=1e-3, atol=1e-4)
    broken = mutated(start._solve, ("(output - excess)", "(output + excess)"))
    assert not torch.allclose(broken(*given), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", FITTED)
def test_every_layer_brings_the_stream_nearer(family, tmp_path, monkeypatch):
    monkeypatch.setattr(start, "_scale", lambda *given: None)  # it changes what distance means
    made = training(family, tmp_path)
    last = made.drafter.last_sum(made.model)
    for layer in last.layers:
        torch.nn.init.zeros_(layer.weight)
    found = [distance(made, last)]
    for count in range(1, len(last.layers) + 1):
        for layer in last.layers:
            torch.nn.init.zeros_(layer.weight)
        fit(made, replace(last, layers=last.layers[:count]))
        found.append(distance(made, last))
    assert all(after <= before * (1 + 1e-4) for before, after in itertools.pairwise(found))
    assert found[-1] < 0.9 * found[0]


@pytest.mark.parametrize("family", FITTED)
def test_a_start_lowers_the_loss(family, tmp_path):
    conversations = own_words()
    losses = []
    for fitted in (False, True):
        made = training(family, tmp_path / str(fitted), conversations)
        if fitted:
            fit(made, made.drafter.last_sum(made.model))
        losses.append(made.trainer.validate(range(len(conversations)), 2).loss)
    assert losses[1] < losses[0]


def test_a_layer_that_is_not_added_as_it_is_does_no_harm(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "_scale", lambda *given: None)
    made = training("mtp", tmp_path)
    cell = made.model.network.cells[0]
    before = cell.layers[0].mlp.gate_up_proj.weight.detach().clone()
    torch.nn.init.zeros_(cell.layers[0].mlp.gate_up_proj.weight)
    without = distance(made, Sum(cell.norm, []))
    cell.layers[0].mlp.gate_up_proj.weight.data.copy_(before)
    bent = Sum(cell.norm, [cell.layers[0].mlp.gate_up_proj])
    with_it = distance(made, bent)
    fit(made, bent)
    assert distance(made, bent) <= max(with_it, without)


def test_attention_starts_on_its_own_token():
    shape = blocks.Shape(width=32, heads=4, kv_heads=2, head_width=16, inner=8)
    attention = blocks.Attention(shape, 64)
    torch.manual_seed(0)
    initial.attend_to_own(attention, 32)
    x = torch.cat((F.normalize(torch.randn(1, 9, 32), dim=-1) * 32**0.5, torch.randn(1, 9, 32)), dim=-1)
    rotation = blocks.Rotary(shape)(torch.arange(9)[None], x)
    entries = attention.entries(x, rotation)
    seen = torch.ones(1, 9, 9, dtype=torch.bool).tril()
    handed_on = []
    attention.o_proj.register_forward_pre_hook(lambda module, given: handed_on.append(given[0]))
    attention(x, rotation, entries, blocks.hide(seen, x.dtype))
    values = x[..., :32].unflatten(-1, (2, 1, 16)).expand(-1, -1, -1, 2, -1).flatten(2)  # a group's heads alike
    torch.testing.assert_close(handed_on[0], values, rtol=0.05, atol=0.1)


def test_attention_by_matrices_is_attention():
    torch.manual_seed(0)
    q, keys, values = (torch.randn(2, 3, size, 8, requires_grad=True) for size in (10, 7, 7))
    mask = blocks.hide(torch.rand(2, 1, 10, 7) < 0.7, q.dtype)
    mask[..., 0] = 0
    found = []
    for attend in (F.scaled_dot_product_attention, blocks._attend_with_matrices):
        out = attend(q, keys, values, attn_mask=mask, scale=0.4)
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, keys, values))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_command_starts_so_and_says_how_long_it_took(data_home, tmp_path, capsys):  # noqa: F811
    for count in (0, 3):
        assert train("eagle", tmp_path / str(count), data_home, f"fit={count}") == 0
        found = card.read(tmp_path / str(count) / "checkpoint")
        assert (found["progress"]["fit_seconds"] > 0) == bool(count)
        assert found["settings"]["fit"] == count
    assert train("eagle", tmp_path / "3", data_home, "fit=4") == 2
    assert "other fit" in said(capsys)
    assert train("eagle", tmp_path / "x", data_home, "fit=-1") == 2
    assert "fit=-1 is no number of conversations; give 0" in said(capsys)
