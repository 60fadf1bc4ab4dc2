import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specbench.errors import ConfigError
from specbench.sampling import Noise, Sampling, draw

LAWS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.6),
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=1.0, min_p=0.1),
    Sampling(temperature=0.8, repetition_penalty=1.4),
    Sampling(temperature=0.9, top_k=12, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
]


@pytest.mark.parametrize("sampling", LAWS)
def test_law_is_that_of_hugging_face(sampling):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 40, generator=generator)
    ids = torch.randint(0, 40, (4, 9), generator=generator)
    seen = torch.zeros(4, 40, dtype=torch.bool).scatter(1, ids, True)
    processors = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.repetition_penalty != 1:
        processors.insert(0, RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    expected = processors(ids, logits).softmax(-1)
    assert torch.allclose(sampling.law(logits, seen), expected, atol=1e-6)


def test_greedy_is_the_law_of_one_token():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    assert Sampling().law(logits).tolist() == [[0.0, 1.0, 0.0]]
    assert Sampling().choose(logits, None).tolist() == [1]


def test_repetition_penalty_holds_for_greedy_too():
    logits = torch.tensor([[2.0, 1.9]])
    seen = torch.tensor([[True, False]])
    assert Sampling(repetition_penalty=2.0).choose(logits, None, seen).tolist() == [1]


def test_draws_follow_the_law():
    law = torch.tensor([0.1, 0.0, 0.55, 0.3, 0.05], dtype=torch.float64)
    noise = torch.from_numpy(np.random.default_rng(0).random(100_000))
    counts = np.bincount(draw(law.expand(100_000, 5), noise).numpy(), minlength=5)
    assert counts[1] == 0
    kept = [0, 2, 3, 4]
    assert stats.chisquare(counts[kept], 100_000 * law[kept].numpy() / law.sum().item()).pvalue > 0.001


@pytest.mark.parametrize("noise", [0.0, 0.999999999999])
def test_extreme_noise_never_draws_an_impossible_token(noise):
    law = torch.tensor([[0.0, 0.3, 0.7, 0.0]])
    assert draw(law, torch.tensor([noise], dtype=torch.float64)).item() in (1, 2)


def test_noise_depends_on_prompt_and_not_on_its_neighbours():
    positions = torch.arange(6)[None]
    alone = Noise(0, ["a"], 10).at(positions, "target")
    together = Noise(0, ["b", "a"], 30).at(positions.expand(2, 6), "target")
    assert torch.equal(alone[0], together[1])
    assert not torch.equal(together[0], together[1])


def test_noise_depends_on_seed_and_purpose():
    positions = torch.arange(6)[None]
    noise = Noise(0, ["a"], 10)
    assert not torch.equal(noise.at(positions, "target"), noise.at(positions, "accept"))
    assert not torch.equal(noise.at(positions, "target"), Noise(1, ["a"], 10).at(positions, "target"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": 1e-9},
        {"temperature": float("nan")},
        {"top_k": -2},
        {"top_p": 0},
        {"top_p": 1.5},
        {"min_p": 2},
        {"repetition_penalty": 0},
    ],
)
def test_impossible_settings_are_refused_by_name(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(ConfigError, match=rf"sampling\.{name}={value}"):
        Sampling(**wrong)
