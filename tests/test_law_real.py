"""The test of sampled text on the default model: gross bugs are found by a few hundred tokens, and an honest run is not
blamed. All kinds of bugs are found on tiny models, in test_law, and on the default model by law_power, in minutes."""

import pytest
import torch
from conftest import mutated
from test_law import BUGS, NUCLEUS, PLAIN
from test_real_model import load

from drafters.small_lm import SmallLM
from specbench import decoding
from specbench.drafting import Request
from specbench.law import Evidence, check
from specbench.model import CausalLM
from specbench.stopping import StopRule
from specbench.verification import verify

pytestmark = pytest.mark.slow

ASKED = ("Tell me a story.", "What is a cat?", "Write a poem.", "How do I cook rice?", "Why is the sky blue?", "Hello!")
TEXTS, TOKENS, K = 16, 32, 2
GROSS = ("every draft is kept", "top-p in one arm only")


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return load("bfloat16")


def less_sure(target: CausalLM) -> SmallLM:
    """The target itself, less sure of everything: its laws are flatter, so that two drafts in three are kept."""
    model = load("bfloat16", "target.engine=plain").model
    with torch.no_grad():
        model.model.norm.weight *= 0.75
    flat = SmallLM(CausalLM(model, target.tokenizer, name="flat", files={}), proposal="sample")
    flat.bind(target)
    return flat


@pytest.fixture(scope="module")
def drafter(target) -> SmallLM:
    return less_sure(target)


def found(target, drafter, sampling) -> Evidence:
    texts = [target.encode([{"role": "user", "content": ASKED[i % len(ASKED)]}]) for i in range(TEXTS)]
    requests = [Request(str(i), tokens) for i, tokens in enumerate(texts)]
    return check(target, drafter, [requests], K, sampling, 0, StopRule(TOKENS))


@pytest.mark.parametrize("bug", GROSS)
def test_a_bug_of_a_known_kind_is_found(target, drafter, bug, monkeypatch):
    sampling, *changes = BUGS[bug]
    monkeypatch.setattr(decoding, "verify", mutated(verify, *changes))
    said = found(target, drafter, sampling).verdict()
    assert said["verdict"] == "mismatch", said


@pytest.mark.parametrize("sampling", [PLAIN, NUCLEUS], ids=str)
def test_an_honest_run_is_not_blamed(target, drafter, sampling):
    said = found(target, drafter, sampling).verdict()
    assert said["verdict"] == "law", said
    assert said["places"] == TEXTS * TOKENS
