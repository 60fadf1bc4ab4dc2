import logging

import pytest
import torch
from conftest import prompts, tiny
from torch import nn

from specbench.fused import Fused
from specbench.traced import Traced


class Scale(nn.Module):
    """Counts how often Python runs it."""

    def __init__(self):
        super().__init__()
        self.runs = 0

    def forward(self, x, others, power=1):
        self.runs += 1
        others[0].add_(1)
        return x * x.shape[0] * len(others) ** power, x.flatten()


def test_a_trace_runs_without_python_for_any_size():
    module = Scale()
    traced = Traced(module, "scale")
    for size in (1, 3, 7):
        kept = torch.ones(2)
        product, flat = traced(torch.full((size, 2), 2.0), [kept, kept])
        assert torch.equal(product, torch.full((size, 2), 4.0 * size))
        assert flat.shape == (2 * size,)
        assert kept[0] > 1  # what it writes, it writes again
    assert module.runs == 1


def test_each_set_of_arguments_has_a_trace_of_its_own():
    module = Scale()
    traced = Traced(module, "scale")
    x = torch.ones(1, 1)
    first, second = (traced(x, [torch.ones(1)] * 3, power=power)[0] for power in (1, 2))
    assert (first.item(), second.item()) == (3, 9)
    assert module.runs == 2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_traced_forward_gives_the_very_same_numbers(family):
    lm = tiny(family)
    eager = lm._decoder._forward.module
    assert isinstance(eager, Fused)
    for batch, steps, cached in ((1, 1, 5), (3, 5, 70), (2, 9, 130), (1, 1, 200)):
        tokens = torch.randint(3, lm.vocab_size, (batch, steps))
        caches = [lm.new_cache(batch, 300) for _ in range(2)]
        for cache in caches:
            cache.advance(torch.tensor(cached))
        traced = lm.forward(tokens, caches[0], taps=(0, 2))
        caches[1].place(steps)
        kept = [caches[1].layer(i, lm._decoder._entry) for i in range(len(lm.blocks))]
        with torch.inference_mode():
            logits, taps = eager(tokens, caches[1].starts, caches[1].ids, kept, taps=(0, 2))
        assert torch.equal(traced.logits, logits)
        assert torch.equal(traced.taps, taps)
        assert all(torch.equal(caches[0].layer(i, kept[i]), kept[i]) for i in range(len(kept)))


def test_a_prompt_is_traced_once_for_all_lengths(llama):
    llama.prefill(torch.tensor(prompts(llama)[0]), llama.new_cache(1, 64), 0)
    traces = len(llama._decoder._forward._made)
    for prompt in prompts(llama):
        llama.prefill(torch.tensor(prompt), llama.new_cache(1, 64), 0)
    assert len(llama._decoder._forward._made) == traces


class Untraceable(nn.Module):
    def forward(self, x):
        return {"not": "a tensor", "but": x}


def test_what_cannot_be_traced_says_so_once_and_runs(caplog):
    caplog.set_level(logging.WARNING)
    traced = Traced(Untraceable(), "a model")
    for _ in range(2):
        assert torch.equal(traced(torch.ones(1))["but"], torch.ones(1))
    said = [record.message for record in caplog.records if "traced" in record.message]
    assert len(said) == 1
    assert said[0].startswith("a model cannot be traced and runs slower: ")
