import pytest
import torch
from conftest import FAMILIES, break_cache, plain_greedy, ragged_rounds, run
from torch import nn
from transformers import AutoModelForCausalLM, Llama4TextConfig, LlamaConfig, MambaConfig

from drafters.ngram import NGram
from specbench.drafting import Request
from specbench.errors import ConfigError
from specbench.model import CausalLM
from specbench.prepack import PackedLinear
from specbench.stopping import StopRule
from specbench.targets import byte_tokenizer, load_tiny


def plain_logits(lm, row):
    with torch.inference_mode():
        return lm.model(input_ids=row[None], use_cache=False).logits[0]


def worst(lm):
    """Largest error against plain forwards, over rounds of uneven acceptance."""
    rounds = ragged_rounds(lm, rounds=5)
    return max((logits - plain_logits(lm, text)[-len(logits) :]).abs().max().item() for text, logits in rounds)


def test_uneven_rows_agree_with_plain_forwards(lm):
    assert worst(lm) < 1e-4


def test_an_open_window_is_noticed(monkeypatch):
    lm = load_tiny("gemma3")
    monkeypatch.setattr(lm._decoder, "_windows", dict.fromkeys(lm._windows))
    assert worst(lm) > 1e-2


def test_a_mask_that_shows_one_slot_too_many_is_noticed(monkeypatch):
    lm = load_tiny("llama", engine="plain")  # a trace remembers what it saw
    break_cache(monkeypatch, "visible", ("distance >= 0 if", "distance >= -1 if"))
    assert worst(lm) > 1e-2


def test_taps_are_residual_streams_counted_from_the_embeddings(lm):
    tokens = torch.randint(3, lm.vocab_size, (2, 9))
    depth = len(lm.blocks)
    taps = lm.forward(tokens, lm.new_cache(2, 16), taps=range(depth + 1)).taps
    with torch.inference_mode():
        states = lm.model(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
    for i in range(depth):
        assert torch.allclose(taps[:, :, i], states[i], atol=1e-4)
    # Hugging Face's last state is after the final norm; ours is before
    norm = getattr(lm.model.base_model, "norm", None) or lm.model.base_model.final_layer_norm
    assert not torch.allclose(taps[:, :, depth], states[depth], atol=1e-2)
    assert torch.allclose(norm(taps[:, :, depth]), states[depth], atol=1e-4)


def test_head_of_the_normed_last_tap_gives_the_logits(llama):
    tokens = torch.randint(3, llama.vocab_size, (1, 5))
    output = llama.forward(tokens, llama.new_cache(1, 8), taps=(len(llama.blocks),))
    assert torch.allclose(llama.head(llama.model.model.norm(output.taps[:, :, 0])), output.logits, atol=1e-5)


def test_a_tap_that_does_not_exist_is_refused(llama):
    with pytest.raises(ConfigError, match=r"taps 0\.\.3"):
        llama.forward(torch.tensor([[5]]), llama.new_cache(1, 4), taps=(4,))


def test_last_only_gives_the_last_logits(lm):
    tokens = torch.randint(3, lm.vocab_size, (1, 6))
    whole = lm.forward(tokens, lm.new_cache(1, 8)).logits
    last = lm.forward(tokens, lm.new_cache(1, 8), last_only=True).logits
    assert last.shape == (1, 1, lm.vocab_size)
    assert torch.allclose(last[:, 0], whole[:, -1], atol=1e-5)


def test_a_row_past_its_slots_is_an_error(llama):
    with pytest.raises(ValueError, match="5 cache slots"):
        llama.forward(torch.ones(1, 5, dtype=torch.long), llama.new_cache(1, 4))


@pytest.mark.parametrize("slots", [70, 71, 99, 128])
def test_how_much_is_attended_to_does_not_depend_on_the_room_there_is(llama, slots):
    """Else arms of different draft length would round the same prefill differently in low precision."""
    cache = llama.new_cache(1, slots)

    def attended():
        cache.place(1)
        return len(cache.ids)

    assert attended() == 64
    cache.advance(torch.tensor(66))
    assert attended() == 128


def test_low_precision_logits_do_not_depend_on_the_room_there_is():
    lm = load_tiny("llama", dtype="bfloat16")
    tokens = torch.randint(3, lm.vocab_size, (1, 66))
    tight, roomy = (lm.forward(tokens, lm.new_cache(1, slots)).logits for slots in (67, 120))
    assert torch.equal(tight, roomy)


SMALL = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}


def test_recurrent_state_is_refused_with_the_reason():
    model = AutoModelForCausalLM.from_config(MambaConfig(**SMALL, state_size=4))
    with pytest.raises(ConfigError, match="recurrent state, which cannot be rolled back"):
        CausalLM(model, byte_tokenizer(), name="mamba")


def test_unknown_attention_is_refused_with_the_reason():
    config = Llama4TextConfig(**SMALL, num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_local_experts=2)
    with pytest.raises(ConfigError, match="chunked_attention"):
        CausalLM(AutoModelForCausalLM.from_config(config), byte_tokenizer(), name="llama4")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_that_does_not_roll_back_is_refused_at_load(family, dtype, monkeypatch):
    lm = load_tiny(family, dtype=dtype)
    break_cache(monkeypatch, "write", ("index_copy_", "index_add_"))
    with pytest.raises(ConfigError, match="cannot take tokens back"):
        CausalLM(lm.model, lm.tokenizer, name="stale")


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_frequencies_that_change_with_length_bound_the_context(kind):
    """Past the original length a cached key would no longer be what it was; so texts end there, and are exact."""
    half = 6
    rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * half, "long_factor": [4.0] * half}
    config = LlamaConfig(
        vocab_size=259, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, initializer_range=0.3, rope_parameters=rope,
    )  # fmt: skip
    torch.manual_seed(0)
    lm = CausalLM(AutoModelForCausalLM.from_config(config, dtype=torch.float32), byte_tokenizer(), name=kind)
    assert lm.context == 32
    prompt = lm.tokenizer("abc abc abc").input_ids
    (reply,), _ = run(lm, NGram(), [Request("p", prompt)], k=6, stop=StopRule(100, context=lm.context))
    assert reply == plain_greedy(lm, prompt, 32 - len(prompt))


def test_a_stray_window_is_not_heeded():
    """transformers does not either: its Llama knows no windows."""
    config = LlamaConfig(**SMALL, num_attention_heads=2, num_key_value_heads=2, sliding_window=4)
    torch.manual_seed(0)
    lm = CausalLM(AutoModelForCausalLM.from_config(config, dtype=torch.float32), byte_tokenizer(), name="stray")
    text = torch.randint(3, 99, (1, 30))
    assert torch.allclose(lm.forward(text, lm.new_cache(1, 32)).logits[0], plain_logits(lm, text[0]), atol=1e-5)


def test_chat_template_writes_the_only_begin_token(llama):
    ids = llama.encode([{"role": "user", "content": "hi"}])
    assert ids.count(llama.tokenizer.bos_token_id) == 1
    assert llama.tokenizer.decode(ids) == "<s><turn>user: hi</s><turn>assistant: "


def test_a_base_model_takes_raw_text(llama, monkeypatch):
    monkeypatch.setattr(llama.tokenizer, "chat_template", None)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert llama.tokenizer.decode(llama.encode(messages)) == "a\n\nb"


def test_packed_weights_compute_the_same():
    linear = nn.Linear(48, 80, dtype=torch.bfloat16)
    x = torch.randn(3, 5, 48, dtype=torch.bfloat16)
    assert torch.allclose(PackedLinear(linear)(x), linear(x), atol=1e-2)
