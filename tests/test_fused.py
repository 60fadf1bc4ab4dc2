import copy
import logging
import re
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from conftest import FAMILIES, mutated, prompts, ragged_rounds, run, tiny, untrace
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from drafters.ngram import NGram
from drafters.none import NoDrafter
from drafters.small_lm import SmallLM
from specbench import fused, memory, prepack
from specbench.drafting import Request
from specbench.errors import ConfigError, RunError
from specbench.fused import Fused, FusedDecoder
from specbench.model import CausalLM
from specbench.prepack import PackedLinear, Part
from specbench.sampling import Sampling
from specbench.stopping import StopRule
from specbench.targets import byte_tokenizer, load_tiny
from specbench.unmodified import Unmodified

# three query heads share a key head, heads are wider than hidden_size / heads, and the norms' eps matters
BASE = {
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "rms_norm_eps": 0.05,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
SHORT = {"original_max_position_embeddings": 64}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def rope(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0, **more}}


SHAPES = {
    "llama_gqa": partial(LlamaConfig),
    "llama_one_key_head": partial(LlamaConfig, num_key_value_heads=1),
    "llama_mha_biased": partial(LlamaConfig, num_key_value_heads=6, attention_bias=True, mlp_bias=True),
    "llama_tied": partial(LlamaConfig, tie_word_embeddings=True),
    "llama_rope_llama3": partial(LlamaConfig, **rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **SHORT)),
    "llama_rope_yarn": partial(LlamaConfig, **rope("yarn", **SHORT)),
    "llama_rope_linear": partial(LlamaConfig, **rope("linear")),
    "qwen2_biased": partial(Qwen2Config, head_dim=8),
    "qwen2_mixed": partial(
        Qwen2Config, head_dim=8, use_sliding_window=True, sliding_window=8, max_window_layers=0, layer_types=MIXED
    ),
    "qwen3_head_norms": partial(Qwen3Config),
    "qwen3_biased": partial(Qwen3Config, attention_bias=True),
    "qwen3_mixed": partial(Qwen3Config, use_sliding_window=True, sliding_window=8, layer_types=MIXED),
    "mistral_window": partial(MistralConfig, sliding_window=8),
    "mistral_full": partial(MistralConfig, sliding_window=None),
}


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


def hf_model(config, dtype=torch.float32):
    """A Hugging Face model with biases and norm weights that are not those of an untrained one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim == 1:
                    p.add_(0.3 * torch.randn_like(p))
    return model.to(dtype).eval().requires_grad_(False)


def shaped(shape):
    return SHAPES[shape](**BASE | SHAPES[shape].keywords)


def build(model, **how):
    return CausalLM(model, byte_tokenizer(), name="built", **how)


@cache
def pair(shape, dtype=torch.float32):
    """The untouched model, and ours made of a copy."""
    untouched = hf_model(shaped(shape), dtype)
    return untouched, build(copy.deepcopy(untouched))


def whole(model, row):
    with torch.inference_mode():
        return model(input_ids=row[None], use_cache=False).logits[0]


def worst(untouched, lm):
    """Largest error of our logits."""
    return max((ours - whole(untouched, text)[-len(ours) :]).abs().max().item() for text, ours in ragged_rounds(lm))


@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_rounds_agree_with_the_untouched_model(shape):
    untouched, lm = pair(shape)
    assert isinstance(lm._decoder, FusedDecoder)
    assert worst(untouched, lm) < 1e-4


CALL, ROTATION, NORM, BLOCK = "Attention.__call__", "Attention.rotation", "RMSNorm.__call__", "Block.__call__"
# what is wrong -> the shape that shows it, the method, and what is replaced in its source
BUGS = {
    "values_turn": ("llama_gqa", ROTATION, ("ones_like(still)", "abs(still)"), ("zeros_like(still)", "abs(still)")),
    "keys_stay": ("llama_gqa", ROTATION, ("+ self.kv_heads, self.kv_heads", ", 2 * self.kv_heads")),
    "turned_backwards": ("llama_gqa", ROTATION, ("-sin[..., :half], sin", "sin[..., :half], -sin")),
    "query_heads_dealt_out": (
        "llama_gqa",
        CALL,
        ("2, (self.kv_heads, self.group))", "2, (self.group, self.kv_heads)).transpose(2, 3)"),
    ),
    "queries_of_a_group_exchanged": (
        "llama_gqa",
        CALL,
        ("self.kv_heads, self.group))", "self.kv_heads, self.group)).flip(3)"),
    ),
    "tokens_within_the_group": ("llama_gqa", CALL, ("q = q.reshape", "q = q.transpose(2, 3).reshape")),
    "outputs_read_group_first": (
        "llama_gqa",
        CALL,
        ("2, (steps, self.group))", "2, (self.group, steps)).transpose(2, 3)"),
    ),
    "values_before_keys": ("llama_gqa", CALL, ("keys, values =", "values, keys =")),
    "sharper_attention": ("llama_gqa", CALL, ("scale=self.scale", "scale=1.1 * self.scale")),
    "mask_repeated_as_a_whole": (
        "llama_gqa",
        "Fused._mask",
        ("repeat_interleave(", "repeat(1, "),
        (".group, dim=1)", ".group, 1)"),
    ),
    "everything_seen": ("llama_gqa", "Fused._mask", ("-torch.inf", "0.0")),
    "no_eps": ("llama_gqa", NORM, ("None, self.eps", "None, 0.0")),
    "no_norm_weight": ("llama_gqa", NORM, ("self._doubled, None", "None, None")),
    "gate_and_up_exchanged": ("llama_gqa", BLOCK, ("gate, up =", "up, gate =")),
    "no_head_norms": ("qwen3_head_norms", CALL, ("self.head_norms is not None", "False")),
    "head_norms_exchanged": (
        "qwen3_head_norms",
        CALL,
        ("head_norms[0](q)", "head_norms[1](q)"),
        ("head_norms[1](k)", "head_norms[0](k)"),
    ),
    "one_kind_for_all_blocks": ("qwen3_mixed", BLOCK, ("masks[self.kind]", 'masks["full_attention"]')),
    "scaling_of_cosines_dropped": (
        "llama_rope_yarn",
        "Fused.forward",
        ("(cos, sin)", "(cos / self.model.model.rotary_emb.attention_scaling, sin)"),
    ),
}


def plant(monkeypatch, bug):
    _, where, *replacements = BUGS[bug]
    kind, method = where.split(".")
    kind = getattr(fused, kind)
    monkeypatch.setattr(kind, method, mutated(getattr(kind, method), *replacements))


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_the_fused_forward_is_noticed(bug, monkeypatch):
    untouched, lm = pair(BUGS[bug][0])
    untrace(monkeypatch, lm)
    plant(monkeypatch, bug)
    assert worst(untouched, lm) > 1e-2


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_the_fused_forward_is_refused_at_load(bug, monkeypatch):
    model = hf_model(shaped(BUGS[bug][0]))
    plant(monkeypatch, bug)
    with pytest.raises(ConfigError, match="cannot take tokens back: after a rollback its logits are off by"):
        build(model)


def rms(error):
    return error.float().square().mean().sqrt().item()


def half_precision_errors(shape):
    """Errors in bfloat16 against float32 with the same weights: Hugging Face's own, and ours."""
    untouched, lm = pair(shape, torch.bfloat16)
    exact = copy.deepcopy(untouched).float()
    theirs, ours = [], []
    for text, logits in ragged_rounds(lm):
        expected = whole(exact, text)[-len(logits) :]
        ours.append(logits - expected)
        theirs.append(whole(untouched, text)[-len(logits) :] - expected)
    return rms(torch.cat(theirs)), rms(torch.cat(ours))


@pytest.mark.parametrize("shape", ["llama_gqa", "llama_mha_biased", "qwen2_biased", "qwen3_mixed", "mistral_window"])
def test_bfloat16_rounds_no_worse_than_the_untouched_model(shape):
    theirs, ours = half_precision_errors(shape)
    assert 0 < ours < 1.3 * theirs


@pytest.mark.parametrize("bug", ["sharper_attention", "no_eps", "values_turn"])
def test_a_bug_stands_out_of_the_rounding_of_bfloat16(bug, monkeypatch):
    untrace(monkeypatch, pair("llama_gqa", torch.bfloat16)[1])
    plant(monkeypatch, bug)
    theirs, ours = half_precision_errors("llama_gqa")
    assert ours > 1.3 * theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["llama_mha_biased", "qwen3_mixed", "mistral_window"])
def test_the_model_it_was_made_of_still_runs(shape, dtype):
    untouched, lm = pair(shape, dtype)
    row = torch.randint(3, lm.vocab_size, (20,))
    expected, still = whole(untouched, row), whole(lm.model, row)
    assert rms(still - expected) <= (1e-5 if dtype is torch.float32 else 0.05) * expected.float().std()
    assert isinstance(lm.model.model.layers[0].self_attn.q_proj, Part)


def bytes_of(model):
    return sum(t.nbytes for t in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["llama_gqa", "llama_mha_biased", "qwen3_head_norms"])
def test_no_weight_is_held_twice(shape, dtype):
    untouched, lm = pair(shape, dtype)
    assert lm.weight_bytes == bytes_of(untouched)


def test_a_tied_head_is_stored_apart_on_a_cpu():
    untouched, lm = pair("llama_tied")
    assert lm.weight_bytes == bytes_of(untouched) + untouched.lm_head.weight.nbytes
    assert lm.parameters == sum(p.numel() for p in untouched.parameters())


def test_layers_kept_beside_their_merger_are_noticed(monkeypatch):
    model = hf_model(shaped("llama_gqa"))
    held = bytes_of(model)
    kept = mutated(prepack.merge, ("setattr(parent, name, Part(parent, merged, start, start + size))", "pass"))
    monkeypatch.setattr(fused, "merge", kept)
    assert build(model).weight_bytes > held


@pytest.mark.parametrize("shape", ["llama_gqa", "qwen3_mixed", "mistral_window"])
def test_taps_and_last_logits_are_those_of_the_untouched_model(shape):
    untouched, lm = pair(shape)
    plain = build(copy.deepcopy(untouched), engine="plain")
    assert isinstance(plain._decoder, Unmodified)
    tokens, taps = torch.randint(3, lm.vocab_size, (2, 21)), (0, 2, 1, 3)
    ours, theirs = (m.forward(tokens, m.new_cache(2, 32), taps=taps) for m in (lm, plain))
    assert ours.taps.shape == (2, 21, 4, 48)
    assert torch.allclose(ours.taps, theirs.taps, atol=1e-4)
    last = lm.forward(tokens, lm.new_cache(2, 32), last_only=True, taps=taps)
    assert last.logits.shape == (2, 1, lm.vocab_size)
    assert torch.allclose(last.logits[:, 0], theirs.logits[:, -1], atol=1e-4)
    assert torch.allclose(last.taps, theirs.taps, atol=1e-4)


def test_taps_one_block_late_are_noticed(monkeypatch):
    untouched, lm = pair("llama_gqa")
    plain = build(copy.deepcopy(untouched), engine="plain")
    untrace(monkeypatch, lm)
    monkeypatch.setattr(Fused, "forward", mutated(Fused.forward, ("streams[i] for", "streams[i - 1] for")))
    tokens = torch.randint(3, lm.vocab_size, (1, 9))
    ours, theirs = (m.forward(tokens, m.new_cache(1, 32), taps=(1, 2)).taps for m in (lm, plain))
    assert not torch.allclose(ours, theirs, atol=1e-2)


def texts(family, engine, name, sampling):
    lm = tiny(family, engine=engine)
    proposal = "greedy" if sampling.greedy else "sample"
    drafter = NGram() if name == "ngram" else SmallLM(tiny(family, seed=1, engine=engine), proposal)
    requests = [Request(f"p{i}", tokens) for i, tokens in enumerate(prompts(lm))]
    return run(lm, drafter, requests, k=4 if name == "ngram" else 3, sampling=sampling, stop=StopRule(16))[0]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "t1"])
@pytest.mark.parametrize(
    ("family", "name"), [*((f, "ngram") for f in FAMILIES), ("llama", "small_lm"), ("qwen3", "small_lm")]
)
def test_engines_write_the_same_text(family, name, sampling):
    assert texts(family, "auto", name, sampling) == texts(family, "plain", name, sampling)


@pytest.mark.parametrize("bug", ["values_turn", "mask_repeated_as_a_whole"])
def test_a_bug_changes_the_text(bug, monkeypatch):
    expected = texts("llama", "plain", "ngram", Sampling())
    untrace(monkeypatch, tiny("llama", engine="auto"))
    plant(monkeypatch, bug)
    assert texts("llama", "auto", "ngram", Sampling()) != expected


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def halved(config, *names):
    """A model with one block whose layers ``names`` compute something of their own."""
    model = hf_model(config)
    for name in names:
        layer = model.get_submodule(name)
        layer.__class__ = Halved
    return model


def spoken(caplog):
    return [r.getMessage() for r in caplog.records if r.name.startswith("specbench")]


def own_kind():
    return build(halved(shaped("llama_gqa"), *(f"model.layers.{i}.self_attn.q_proj" for i in range(3))))


UNFIT = {
    "gemma3": (lambda: load_tiny("gemma3"), "Gemma3ForCausalLM is not Llama-shaped"),
    "gpt_neox": (lambda: load_tiny("gpt_neox"), "GPTNeoXForCausalLM is not Llama-shaped"),
    "own_layers": (own_kind, "it has linear layers of a kind of their own, Halved"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_cannot_be_fused_runs_unmodified_and_says_so_once(case, caplog):
    load, reason = UNFIT[case]
    caplog.set_level(logging.INFO)
    lm = load()
    run(lm, NGram(), [Request("p", [5, 6, 7])])
    assert isinstance(lm._decoder, Unmodified)
    assert spoken(caplog) == [f"{lm.name} runs by transformers' own forward, which is slower: {reason}"]


def test_layers_of_their_own_kind_keep_what_they_compute():
    expected = halved(shaped("llama_gqa"), *(f"model.layers.{i}.self_attn.q_proj" for i in range(3)))
    assert worst(expected, own_kind()) < 1e-4


@pytest.mark.parametrize("layer", ["layers.2.self_attn.q_proj", "layers.0.mlp.gate_proj", "layers.1.mlp.up_proj"])
def test_a_layer_of_its_own_kind_anywhere_keeps_what_it_computes(layer):
    model = halved(shaped("llama_gqa"), f"model.{layer}")
    untouched = copy.deepcopy(model)
    assert worst(untouched, build(model)) < 1e-4


def test_turning_a_part_of_each_head_is_a_reason():
    model = hf_model(shaped("llama_gqa"))
    assert fused.unfit(model) is None
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[:3]
    assert fused.unfit(model) == "it rotates a part of each head only"


def test_a_part_of_the_attention_biased_is_a_reason():
    model = hf_model(shaped("llama_mha_biased"))
    assert fused.unfit(model) is None
    model.model.layers[0].self_attn.k_proj.bias = None
    assert fused.unfit(model) == "of the layers that are joined some have a bias and some have none"


def test_a_partial_rotary_factor_that_transformers_ignores_is_ignored():
    parameters = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    untouched = hf_model(LlamaConfig(**BASE, rope_parameters=parameters))
    assert worst(untouched, build(copy.deepcopy(untouched))) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plain_engine_says_nothing_and_leaves_the_layers(family, caplog):
    caplog.set_level(logging.DEBUG)
    lm = load_tiny(family, engine="plain")
    assert isinstance(lm._decoder, Unmodified)
    assert spoken(caplog) == []
    modules = list(lm.model.modules())
    assert any(type(m) is nn.Linear for m in modules)
    assert not any(isinstance(m, Part | PackedLinear) for m in modules)
    assert all(m.weight.is_contiguous() for m in modules if isinstance(m, nn.Linear))


def test_an_engine_that_does_not_exist_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"target\.engine=fats is unknown.*Choices: auto, plain"):
        load_tiny("llama", engine="fats")
    with pytest.raises(ConfigError, match=r"target\.engine=plian .*Did you mean 'plain'\?"):
        load_tiny("llama", engine="plian")


def siblings(bias=True, dtype=torch.float32):
    parent = nn.Module()
    for name, size in (("a", 20), ("b", 12), ("c", 8)):
        setattr(parent, name, nn.Linear(16, size, bias=bias, dtype=dtype))
    return parent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_merged_layers_compute_what_the_separate_ones_did(bias, dtype):
    parent, x = siblings(bias, dtype), torch.randn(2, 5, 16, dtype=dtype)
    expected = [getattr(parent, name)(x) for name in "abc"]
    prepack.merge(parent, "abc", "joint")
    near = partial(torch.allclose, atol=1e-6 if dtype is torch.float32 else 1e-2)
    assert near(parent.joint(x), torch.cat(expected, dim=-1))
    assert all(near(getattr(parent, name)(x), e) for name, e in zip("abc", expected, strict=True))
    assert (parent.joint.bias is not None) == bias
    assert bytes_of(parent) == parent.joint.weight.nbytes + (parent.joint.bias.nbytes if bias else 0)


def test_merging_twice_does_nothing():
    parent = siblings()
    prepack.merge(parent, "abc", "joint")
    joint, weight, parts = parent.joint, parent.joint.weight, (parent.a, parent.b, parent.c)
    prepack.merge(parent, "abc", "joint")
    assert parent.joint is joint
    assert joint.weight is weight
    assert (parent.a, parent.b, parent.c) == parts


def test_parts_read_the_merged_layer_when_it_is_packed_later():
    parent, x = siblings(dtype=torch.bfloat16), torch.randn(3, 16, dtype=torch.bfloat16)
    expected = [getattr(parent, name)(x) for name in "abc"]
    prepack.merge(parent, "abc", "joint")
    assert prepack.prepack(parent) == 1
    assert isinstance(parent.joint, PackedLinear)
    assert all(torch.allclose(getattr(parent, n)(x), e, atol=1e-2) for n, e in zip("abc", expected, strict=True))


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_packed_layers_compute_the_same(dtype, rounding, bias, tokens):
    parent = siblings(bias, dtype)
    weight, x = parent.a.weight.clone(), torch.randn(tokens, 16, dtype=dtype)
    expected = F.linear(x.double(), weight.double(), parent.a.bias.double() if bias else None)
    assert prepack.prepack(parent) == 3
    assert isinstance(parent.a, PackedLinear) == (dtype is torch.bfloat16)
    assert torch.allclose(parent.a(x).double(), expected, atol=rounding)
    if dtype is torch.float32:
        assert torch.equal(parent.a.weight, weight)


def test_a_packed_layer_without_its_bias_is_noticed(monkeypatch):
    linear, x = nn.Linear(16, 20, dtype=torch.bfloat16), torch.ones(5, 16, dtype=torch.bfloat16)
    nn.init.ones_(linear.bias)
    monkeypatch.setattr(PackedLinear, "forward", mutated(PackedLinear.forward, ("self.bias", "None")))
    assert not torch.allclose(PackedLinear(linear)(x), linear(x), atol=2e-2)


def prefilled(lm):
    """Of a prompt: the logits and taps after it, and the text that follows."""
    prompt = lm.tokenizer("the end of the line of").input_ids
    cache = lm.new_cache(2, 64)
    output = lm.prefill(torch.tensor(prompt), cache, 1, taps=(0, 2))
    assert cache.lengths.tolist() == [0, len(prompt)] == [0, 22]
    reply, _ = run(lm, NoDrafter(), [Request("p", prompt)], k=0, stop=StopRule(12))
    return output, reply


def agree(a, b):
    pairs = [(a[0].logits, b[0].logits), (a[0].taps, b[0].taps)]
    return a[1] == b[1] and all(x.shape == y.shape and torch.allclose(x, y, atol=1e-4) for x, y in pairs)


def test_a_prompt_in_chunks_is_as_good_as_one_at_once(lm, monkeypatch):
    at_once = prefilled(lm)
    monkeypatch.setattr("specbench.model.PREFILL_CHUNK", 5)
    widths, forward = [], lm.forward
    monkeypatch.setattr(
        lm, "forward", lambda tokens, *a, **kw: widths.append(tokens.shape[1]) or forward(tokens, *a, **kw)
    )
    assert agree(prefilled(lm), at_once)
    assert widths[:5] == [5, 5, 5, 5, 2]


@pytest.mark.parametrize(
    "change",
    [
        ("collected.append(output.taps)", "collected = [output.taps]"),
        ("self.forward(chunk[None]", "self.forward(chunk.flip(0)[None]"),
        ("row=row, taps", "row=0, taps"),
    ],
)
def test_chunks_put_together_wrongly_are_noticed(llama, monkeypatch, change):
    at_once = prefilled(llama)
    monkeypatch.setattr(CausalLM, "prefill", mutated(CausalLM.prefill, ("PREFILL_CHUNK", "5"), change))
    assert not agree(prefilled(llama), at_once)


GIB = 2**30


@pytest.mark.parametrize("steps", [1, 9])
def test_a_batch_that_does_not_fit_memory_names_the_largest_that_does(llama, monkeypatch, steps):
    monkeypatch.setattr(memory, "available", lambda device: 2 * GIB)
    with pytest.raises(RunError, match=r"^batch_size=5000 with texts of up to 1000 tokens") as error:
        llama.new_cache(5000, 1000, steps=steps)
    found = re.search(r"needs ([\d.]+) GiB .* ([\d.]+) GiB is free; .* fits is (\d+)$", str(error.value))
    need, free, largest = float(found[1]), float(found[2]), int(found[3])
    keys_and_values = 1024 * 3 * 2 * 2 * 12 * 4  # slots, layers, both, heads, width, bytes
    assert need == pytest.approx(5000 * (keys_and_values + steps * llama.vocab_size * 12) / GIB, abs=0.1)
    assert free == 2.0
    assert llama.new_cache(largest, 1000, steps=steps).batch == largest
    with pytest.raises(RunError, match=f"batch_size={largest + 1} .* fits is {largest}$"):
        llama.new_cache(largest + 1, 1000, steps=steps)


def test_what_a_cache_takes_is_what_was_reckoned(lm, monkeypatch):
    free = 4_000_000
    monkeypatch.setattr(memory, "available", lambda device: free)
    with pytest.raises(RunError) as error:
        lm.new_cache(100, 128)
    largest = int(str(error.value).rsplit(" ", 1)[1])
    cache = lm.new_cache(largest, 128)
    logits = lm.forward(torch.full((largest, 1), 5), cache).logits
    held = sum(kept.nbytes for kept in cache._kept.values())
    assert held + logits.nbytes <= free < (held + 3 * logits.nbytes) / largest * (largest + 1)


def contained(monkeypatch, folder, limit, used=3 * GIB, inactive=GIB // 2):
    folder.joinpath("memory.max").write_text(f"{limit}\n")
    folder.joinpath("memory.current").write_text(f"{used}\n")
    folder.joinpath("memory.stat").write_text(f"anon {used}\ninactive_file {inactive}\nactive_file 7\n")
    monkeypatch.setattr(memory, "CGROUP", folder)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GIB))
    return memory.available(torch.device("cpu"))


def test_a_container_limits_what_is_free(monkeypatch, tmp_path):
    assert contained(monkeypatch, tmp_path, 8 * GIB) == 5.5 * GIB


def test_a_container_that_may_have_more_than_there_is_limits_nothing(monkeypatch, tmp_path):
    assert contained(monkeypatch, tmp_path, 64 * GIB) == 10 * GIB


def test_a_container_without_a_limit_limits_nothing(monkeypatch, tmp_path):
    assert contained(monkeypatch, tmp_path, "max") == 10 * GIB


@pytest.mark.parametrize("missing", ["memory.max", "memory.current", "memory.stat"])
def test_what_a_container_does_not_tell_limits_nothing(monkeypatch, tmp_path, missing):
    contained(monkeypatch, tmp_path, 8 * GIB)
    tmp_path.joinpath(missing).unlink()
    assert memory.available(torch.device("cpu")) == 10 * GIB
