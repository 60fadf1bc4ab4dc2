"""On the real default model. Fetches it once (92 MB)."""

import os
from pathlib import Path

import pytest
import torch
from conftest import run
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from drafters.dflash import DFlash
from drafters.dspark import DSpark
from drafters.eagle import Eagle
from drafters.eagle1 import Eagle1
from drafters.medusa import Medusa
from drafters.mtp import Mtp
from drafters.ngram import NGram
from drafters.none import NoDrafter
from drafters.oracle import Oracle
from drafters.small_lm import SmallLM
from drafters.suffix import Suffix
from drafters.training.batches import Batches
from drafters.training.corpus import Conversation
from drafters.training.streams import Recomputed
from drafters.training.validation import Tally, right
from specbench.cli import conf_dir
from specbench.drafting import Request
from specbench.prompts import load_builtin
from specbench.sampling import Sampling
from specbench.stopping import StopRule

pytestmark = pytest.mark.slow
NEW = 24


def load(dtype, *more):
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose("config", overrides=["target=smollm2", f"dtype={dtype}", "device=cpu", *more])
    return instantiate(cfg.target)


@pytest.fixture(scope="module", autouse=True)
def all_cores():
    few = torch.get_num_threads()
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))  # processes that share them
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    yield
    torch.set_num_threads(few)


@pytest.fixture(scope="module")
def smollm2():
    return load("float32")


@pytest.fixture(scope="module")
def stop(smollm2):
    return StopRule(NEW, token_ids=smollm2.eos_ids, context=smollm2.context)


@pytest.fixture(scope="module")
def requests(smollm2, stop):
    """Sixteen prompts, two of a kind, with plain decoding's replies."""
    made = []
    for conversation in load_builtin(limit=16).conversations:
        tokens = smollm2.encode([{"role": "user", "content": conversation.turns[0]}])
        (reply,), _ = run(smollm2, NoDrafter(), [Request(conversation.id, tokens)], k=0, stop=stop)
        made.append(Request(conversation.id, tokens, reply))
    return made


def test_plain_decoding_is_hugging_faces_greedy(smollm2, requests):
    for request in requests[:4]:
        ids = torch.tensor([request.tokens])
        with torch.inference_mode():
            whole = smollm2.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW
            )
        assert whole[0, len(request.tokens) :].tolist() == list(request.reference)


@pytest.mark.parametrize("make", [Eagle, Eagle1, Mtp, Medusa, DFlash, DSpark], ids=lambda make: make.__name__)
def test_heads_that_are_not_trained_change_no_text(smollm2, requests, stop, make):
    replies, _ = run(smollm2, make(), requests[:3], k=4, stop=stop)
    assert replies == [list(request.reference) for request in requests[:3]]


@pytest.mark.parametrize("make", [Eagle, Mtp, Medusa, DFlash, DSpark], ids=lambda make: make.__name__)
def test_shipped_heads_draft_as_validation_says(smollm2, requests, stop, make):
    """Their tokens per verify pass on a text, computed without decoding, are those of decoding it."""
    drafter, few, k = make(checkpoint="shipped"), requests[:4], 3
    model = drafter.build(smollm2)
    texts = [Conversation(r.uid, "", 0.0, r.tokens, r.reference) for r in few]
    source = Recomputed(smollm2, texts, (*drafter.taps, len(smollm2.blocks)))
    batch = Batches(smollm2, texts, source).make(range(len(texts)), 1.0, "")
    with torch.no_grad():
        hits = right(drafter.unroll(model, smollm2, batch.passages, k), batch, model.head)
    expected = Tally(k)
    for row, count in zip(hits.numpy(), batch.real.sum(dim=1).tolist(), strict=True):
        expected.add(row[:count])
    passes = committed = 0
    for request in few:
        (reply,), steps = run(smollm2, drafter, [request], k=k, stop=stop)
        assert reply == list(request.reference)
        passes, committed = passes + len(steps) - 1, committed + len(reply) - 1
    assert committed == expected.committed
    assert committed / passes == pytest.approx(expected.tokens_per_pass, rel=0.05)
    assert committed / passes > 1.1  # they have learned something


@pytest.mark.parametrize(("make", "batch"), [(NGram, 4), (Suffix, 4), (Oracle, 1)], ids=["ngram", "suffix", "oracle"])
def test_greedy_text_is_that_of_plain_decoding(smollm2, requests, stop, make, batch):
    """In batches too: uneven rows say what each says alone."""
    for start in range(0, len(requests), batch):
        together = requests[start : start + batch]
        replies, _ = run(smollm2, make(), together, stop=stop)
        assert replies == [list(r.reference) for r in together]


def test_oracle_commits_k_plus_one_tokens_a_pass(smollm2, requests, stop):
    _, steps = run(smollm2, Oracle(), requests[:1], stop=stop)
    assert all(len(s.committed[0]) == 5 for s in steps[1:-1])


def test_a_sampled_draft_model_is_accepted_in_full_by_its_twin(smollm2, requests, stop):
    drafter = SmallLM(smollm2, proposal="sample")
    _, steps = run(smollm2, drafter, requests[:1], k=3, sampling=Sampling(temperature=1.0), stop=stop)
    accepted, proposed = sum(s.accepted[0] for s in steps), sum(s.proposed[0] for s in steps)
    assert accepted / proposed > 0.97  # p = q but for rounding


def test_the_chat_template_is_applied_once(smollm2):
    ids = smollm2.encode([{"role": "user", "content": "hi"}])
    text = smollm2.tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert text.count("<|im_start|>") == 3


def test_weights_are_kept_so_that_the_next_load_makes_nothing(smollm2, monkeypatch):
    from specbench import packaged

    def fail(*_):
        raise AssertionError("made again")

    monkeypatch.setattr(packaged, "_dequantise", fail)
    again = load("bfloat16")
    assert again.files == smollm2.files
    assert Path(packaged.cache_home()).exists()
