import pytest
import torch
from conftest import mutated, prompts, run
from test_output import made
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from drafters.ngram import NGram
from drafters.none import NoDrafter
from specbench import quantise as module
from specbench import settings
from specbench.drafting import Request
from specbench.errors import ConfigError
from specbench.losslessness import divergence
from specbench.model import CausalLM
from specbench.quantise import GROUP, KINDS, Int4Linear, Int8Linear, quantise
from specbench.sampling import Sampling
from specbench.stopping import StopRule
from specbench.targets import byte_tokenizer, load_tiny

BF16 = torch.bfloat16
ROUNDING = 2**-9  # of bfloat16, relative
WIDE, OUT = 96, 48


def linear(bias=False, inputs=WIDE, outputs=OUT, seed=0):
    torch.manual_seed(seed)
    layer = nn.Linear(inputs, outputs, bias=bias).to(BF16).requires_grad_(False)
    layer.weight += 0.02 * torch.randn(outputs, 1).to(BF16)  # not centred
    return layer


def weights_of(layer, inputs=WIDE):
    """The weights that the kernel multiplies with, [out, in]: what it makes of unit vectors."""
    return layer(torch.eye(inputs, dtype=BF16)).T.double()


def allowed(weight, kind):
    """Largest error of each weight: half a step, and the rounding of scale, offset and result to bfloat16."""
    weight = weight.double()
    if kind == "int8":
        step = weight.abs().amax(dim=1, keepdim=True) / 127
        return step / 2 + 3 * ROUNDING * weight.abs()
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = ((high - low) / 15).expand_as(groups).flatten(1)
    offset = (low + 8 * (high - low) / 15).expand_as(groups).flatten(1)
    return step / 2 + ROUNDING * (8 * step + offset.abs() + 2 * weight.abs())


def within(layer, kind):
    weight = layer.weight
    return bool((weights_of(KINDS[kind](layer)) - weight.double()).abs().le(allowed(weight, kind) * 1.001).all())


# the layers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_each_weight_is_off_by_half_a_step_at_most(kind, seed):
    assert within(linear(seed=seed), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_down_would_be_found(kind, monkeypatch):
    changes = [("super().__init__()", "nn.Module.__init__(self)"), (".round()", ".floor()")]
    monkeypatch.setattr(KINDS[kind], "__init__", mutated(KINDS[kind].__init__, *changes))
    assert not within(linear(), kind)


@pytest.mark.parametrize(("name", "value"), [("LEVELS", 14), ("CENTRE", 7)])
def test_wrong_grid_of_4_bits_would_be_found(name, value, monkeypatch):
    monkeypatch.setattr(module, name, value)
    assert not within(linear(), "int4")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, WIDE), (5, WIDE), (40, WIDE), (1, 1, WIDE), (2, 5, WIDE), (8, 5, WIDE)], ids=str)
def test_layer_multiplies_by_its_weights_and_adds_its_bias(kind, bias, shape):
    layer = linear(bias)
    quantised = KINDS[kind](layer)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(BF16)
    added = layer.bias.double() if bias else torch.zeros(OUT).double()
    out = quantised(x)
    assert (out.shape, out.dtype) == ((*shape[:-1], OUT), BF16)
    exact = x.double() @ layer.weight.double().T + added
    room = x.double().abs() @ (allowed(layer.weight, kind) + ROUNDING * layer.weight.double().abs()).T
    assert (out.double() - exact).abs().le(room + 4 * ROUNDING * (exact.abs() + added.abs())).all()
    assert (out.double() - exact).abs().mean() < 0.1 * exact.abs().mean()  # that room is wide


@pytest.mark.parametrize("kind", KINDS)
def test_input_that_is_not_contiguous_gives_the_same(kind):
    layer = KINDS[kind](linear(bias=True))
    x = torch.randn(5, 2, WIDE).to(BF16)
    for view in (x.transpose(0, 1), x[:, 1], x[::2, 0], torch.randn(WIDE, 5).to(BF16).T, x[:1, :1].expand(3, 1, WIDE)):
        assert torch.equal(layer(view), layer(view.contiguous()))


@pytest.mark.parametrize("lowest", [-8, -3, 0])
def test_weights_on_a_grid_of_4_bits_come_back_exactly(lowest):
    levels = torch.stack([torch.randperm(2 * 16) % 16 for _ in range(OUT * WIDE // GROUP)]).view(OUT, WIDE)
    layer = linear()
    steps = 2.0 ** -torch.arange(OUT)[:, None].remainder(5)  # powers of two: scales that bfloat16 holds
    layer.weight.copy_((levels + lowest) * steps)
    assert torch.equal(weights_of(Int4Linear(layer)), layer.weight.double())


def test_weights_on_a_grid_of_8_bits_come_back_exactly():
    layer = linear()
    whole = torch.randint(-127, 128, (OUT, WIDE))
    whole[:, 0] = 127
    layer.weight.copy_(whole * 2.0**-6)
    assert torch.equal(weights_of(Int8Linear(layer)), layer.weight.double())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.0, 0.75, -0.75])
def test_weights_all_alike_come_back(kind, value):
    layer = linear()
    layer.weight[:, :GROUP] = value
    layer.weight[0] = value
    found = weights_of(KINDS[kind](layer))
    assert found.isfinite().all()
    expected = torch.full((WIDE,), value).double()
    assert torch.allclose(found[0], expected, rtol=0 if kind == "int4" else 2 * ROUNDING, atol=1e-37)
    if kind == "int4":
        assert torch.allclose(found[:, :GROUP], layer.weight[:, :GROUP].double(), rtol=0, atol=1e-37)


# a model


def llama(dtype=BF16, hidden=64, inner=96, tie=False):
    config = LlamaConfig(
        vocab_size=259, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, initializer_range=0.2,
        tie_word_embeddings=tie, attention_bias=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_the_blocks_are_replaced_and_counted_and_nothing_else(kind):
    model = llama()
    head, table = model.lm_head, model.model.embed_tokens
    kept = head.weight.clone(), table.weight.clone()
    assert quantise(model.model.layers, kind) == 2 * 7
    assert sum(type(m) is KINDS[kind] for m in model.modules()) == 2 * 7
    assert [name for name, m in model.named_modules() if type(m) is nn.Linear] == ["lm_head"]
    assert (model.lm_head, model.model.embed_tokens) == (head, table)
    assert torch.equal(head.weight, kept[0])
    assert torch.equal(table.weight, kept[1])


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (llama, "int9", ("target.quant=int9 is unknown", "int8")),
        (lambda: llama(torch.float32), "int8", ("target.quant=int8", "cpu in float32", "dtype=bfloat16")),
        (lambda: llama(torch.float32), "int4", ("target.quant=int4", "cpu in float32", "dtype=bfloat16")),
        (lambda: llama(hidden=48), "int4", ("target.quant=int4", "q_proj has 48 and 64", "use target.quant=int8")),
        (lambda: llama(inner=72), "int4", ("target.quant=int4", "gate_proj has 64 and 72", "use target.quant=int8")),
    ],
    ids=["unknown", "float32 int8", "float32 int4", "inputs", "outputs"],
)
def test_what_cannot_be_quantised_is_refused_by_name(make, kind, said):
    with pytest.raises(ConfigError) as caught:
        quantise(make().model.layers, kind)
    assert [part for part in said if part not in str(caught.value)] == []


def test_inputs_that_the_8_bit_kernel_reads_past_are_refused():
    with pytest.raises(ConfigError, match=r"a multiple of 16 inputs; 0 has 40: leave target\.quant out"):
        quantise([nn.Sequential(linear(inputs=40))], "int8")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_outside_of_linear_layers_are_refused(kind):
    """Else a table would say 4-bit weights of a model that keeps most of them."""
    block = nn.Sequential(linear(), nn.Conv1d(4, 4, 1).to(BF16))
    with pytest.raises(ConfigError, match=f"target.quant={kind} cannot store 1.weight"):
        quantise([block], kind)


def test_loading_refuses_the_same():
    with pytest.raises(ConfigError, match=r"cpu in float32: add device=cpu dtype=bfloat16"):
        load_tiny(quant="int8")
    with pytest.raises(ConfigError, match=r"has 48 and \d+: use target.quant=int8"):
        load_tiny(dtype="bfloat16", quant="int4")
    with pytest.raises(ConfigError, match=r"target.quant=int8 changes the model, which target.engine=plain forbids"):
        load_tiny(dtype="bfloat16", quant="int8", engine="plain")


@pytest.fixture(scope="module", params=KINDS)
def quantised(request):
    return CausalLM(llama(), byte_tokenizer(), name="tiny", quant=request.param)


def test_drafted_text_is_the_quantised_models_own(quantised):
    requests = [Request(str(i), tokens) for i, tokens in enumerate(prompts(quantised))]
    plain, _ = run(quantised, NoDrafter(), requests, k=0, stop=StopRule(16))
    drafted, _ = run(quantised, NGram(), requests, k=3, stop=StopRule(16))
    for request, ours, theirs in zip(requests, plain, drafted, strict=True):
        found = divergence(quantised, request.uid, request.tokens, ours, theirs, Sampling(), 0)
        assert found is None or found.verdict == "near-tie"
        assert len(ours) == 16


def test_quantised_model_says_nearly_what_the_model_says(quantised):
    tokens = torch.tensor([prompts(quantised)[0]])

    def logits(lm):
        return lm.forward(tokens, lm.new_cache(1, tokens.shape[1])).logits.float()

    exact, ours = logits(CausalLM(llama(), byte_tokenizer(), name="tiny")), logits(quantised)
    off = ((exact - ours).square().mean().sqrt() / exact.std()).item()
    assert 0 < off < {"int8": 0.1, "int4": 0.5}[quantised.quant]


def test_quantised_weights_take_the_bytes_they_should(quantised):
    # q and o 64x64, k and v 64x32, three of 64x96; with biases in attention
    weights, outputs, biases = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96), 2 * (2 * 64 + 2 * 32 + 2 * 96 + 64), 384
    rest = 2 * (2 * 259 * 64 + (2 * 2 + 1) * 64 + 2 * (64 + 32 + 32 + 64))
    assert biases == 2 * (64 + 32 + 32 + 64)
    expected = {"int8": weights + 2 * outputs, "int4": weights // 2 + 4 * weights // GROUP}[quantised.quant]
    rotary = quantised.weight_bytes - rest - expected
    assert 0 <= rotary <= 4 * 4 * 8  # buffers of rotary frequencies
    assert quantised.weight_bytes - quantised.pass_bytes == 2 * 259 * 64  # the table, of which rows are read
    assert quantised.parameters == weights + rest // 2


# its runs


def test_title_names_the_quantised_weights():
    assert "bfloat16 with int4 weights on cpu" in settings.of(
        made(changes={"target.dtype": "bfloat16", "target.quant": "int4"})
    )
    assert "float32 on cpu" in settings.title([made(changes={"target.quant": None})])


def test_runs_of_other_weights_do_not_stand_in_one_table():
    runs = [made(changes={"target.quant": quant}) for quant in (None, "int8", "int4", "int8")]
    assert settings.groups([*runs, made()]) == [[runs[0], made()], [runs[1], runs[3]], [runs[2]]]
