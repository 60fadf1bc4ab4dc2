"""What other people's drafter networks answer: tiny checkpoints and their outputs, by independent implementations.

    python scripts/parity/reference.py --out tests/fixtures/parity

Runs inside an environment of its own (requirements.txt and requirements-no-deps.txt beside this file), never imports
specbench, and writes a folder for every case, so that the tests of this project can compare its networks with an
implementation that shares no line with them:

- ``config.json``, ``model.safetensors``: a checkpoint with random float32 weights, written by the package's own
  ``save_pretrained`` and read back by its own ``from_pretrained`` before anything is measured. The weights are large
  enough for every tensor to show in the outputs. Only the two ``eagle3_reference_*`` cases, layouts that speculators
  reads but does not write, are ``eagle3_plain`` with its tensors renamed and a config of that layout; they are read by
  its converter.
- ``reference.safetensors``: the inputs and outputs listed below, and in its metadata a JSON string ``meta``.

Inputs in every case, unshifted: ``tokens`` [T], where tokens[t] is the token at position t; ``features`` [T, m, D], the
target's residual streams at position t, one per tap in the checkpoint's order (mtp: m = 1, after the target's final
norm); ``embed`` [V, D], the target's embeddings; ``head`` [V, D], its output head, where the draft borrows it.

EAGLE-3 (speculators). The package's ``shift_batch`` drops the first token and the last feature: at its forward's input
index t holds the pair (features[t], tokens[t + 1]) with position id t + 1, for t = 0 .. T - 2. Training-time test: step
j sees at index t the hidden state that step j - 1 put out there and the token tokens[t + 1 + j], with position id
t + 1 + j, and attends to step 0's keys at indices 0 .. t and to the keys of steps 1 .. j at index t. ``logits``
[J, T, Vd] predict tokens[t + 2 + j]; ``valid`` [J, T] is true where t + 1 + j < T. Elsewhere the logits mean nothing:
the forward ran on a padding token, and index T - 1, which has no pair, holds zeros.

MTP (speculators). Index t holds at step k the hidden state that step k - 1 put out there (after its final norm; at
step 0 features[t]) and tokens[t + 1 + k]; it predicts tokens[t + 2 + k]. Each step is a causal pass of its own: it
attends to its own keys only, and position id is t at every step. All steps stop at the same index; ``logits``
[K, T, V] are zero where ``valid`` [K, T] is false.

DFlash and DSpark (speculators). ``anchors`` [A] are positions. The block of anchor a puts in the embeddings of
tokens[a] and of block - 1 mask tokens, at position ids a .. a + block - 1, and attends to the whole block and to the
context at positions before a; all blocks run in one pass, some overlap, none sees another. ``hidden`` [A, block, D] is
what the head reads (after the final norm) and ``logits`` [A, block, Vd] what it puts out: slot i predicts
tokens[a + i], or with sample_from_anchor tokens[a + i + 1]. DSpark's ``logits`` hold the Markov term, whose previous
tokens are the teacher's: tokens[a + i] for slot i with sample_from_anchor; without, tokens[a + i - 1] and for slot 0
tokens[a]. The recurrent head's state is zero before slot 0 and goes through slot 0 either way.
``confidence_logits`` [A, block] are those before the sigmoid.

DFlash (dflash, z-lab's layout). The same block, as ``dflash_generate`` runs it: one anchor at a time, the features of
all positions before it as context, once with a fresh cache and once in two increments, which must agree.
"""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # before torch is imported: nothing here may be compiled
os.environ["HF_HUB_OFFLINE"] = "1"

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch
from dflash import DFlashDraftModel as ZLabModel
from dflash.model import _crop_to, _draft_value, _make_cache, _raw_input_embeddings
from loguru import logger
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.convert.eagle.eagle3_converter import Eagle3Converter
from speculators.models.dflash import core as dflash_core
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.dspark import core as dspark_core
from speculators.models.dspark.core import DSparkDraftModel
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.utils import logging as transformers_logging

WIDTH, VOCAB, DRAFT_VOCAB, LENGTH = 32, 96, 40, 24
TARGET_LAYERS = 12
STEPS = 3
MASK_TOKEN = 90
ANCHORS = [2, 5, 6, 8, 13, 18]  # the blocks at 5, 6 and 8 overlap
BLOCK = 5
MARKOV_RANK = 8
VERIFIER = "verifier"  # a folder of the temporary working directory, so that no machine's path gets into a config

Tensors = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the folders of the cases go")
    out = parser.parse_args().out.resolve()
    logger.remove()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.use_deterministic_algorithms(True)  # makes fresh memory NaN too, by which speculators knows what to load
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch, chdir(scratch), torch.no_grad():
        write_verifier(Path(VERIFIER))
        eagle3_cases(out)
        mtp_case(out)
        dflash_cases(out)
        dspark_cases(out)
        zlab_cases(out)


# What all cases share ------------------------------------------------------------------------------------------------


def generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(crc32(name.encode()))


def layer_config(kind: type[PretrainedConfig] = Qwen3Config, **changes: Any) -> PretrainedConfig:
    """A decoder of one layer; ``rope_theta`` and any other field as asked."""
    theta = changes.pop("rope_theta", 10000.0)
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": False,
    }
    return kind(**fields | changes)


def write_verifier(folder: Path) -> None:
    """As much of a target as speculators reads: its config, embeddings, head and final norm."""
    config = layer_config(num_hidden_layers=TARGET_LAYERS)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    weights = {"model.embed_tokens.weight": (VOCAB, WIDTH), "lm_head.weight": (VOCAB, WIDTH)}
    rng = generator(VERIFIER)
    tensors = {name: 0.5 * torch.randn(shape, generator=rng) for name, shape in weights.items()}
    tensors["model.norm.weight"] = 1 + 0.2 * torch.randn(WIDTH, generator=rng)
    save_file(tensors, folder / "model.safetensors")


def target_tables() -> tuple[torch.Tensor, torch.Tensor]:
    """The target's embeddings and output head."""
    tensors = load_file(Path(VERIFIER, "model.safetensors"))
    return tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]


def inputs(name: str, taps: int) -> Tensors:
    """Tokens, and residual streams that grow with depth and are off centre, as real ones are."""
    rng = generator(f"inputs of {name}")
    scale = torch.linspace(0.6, 1.8, taps)[:, None]
    features = torch.randn(LENGTH, taps, WIDTH, generator=rng) * scale + 0.3 * torch.randn(taps, WIDTH, generator=rng)
    return {"tokens": torch.randint(VOCAB, (LENGTH,), generator=rng), "features": features}


def randomise(model: torch.nn.Module, name: str, skip: tuple[str, ...] = ()) -> None:
    """Weights that all matter: no near-zero or identity initialisation is left. ``skip``: modules of the target."""
    rng = generator(f"weights of {name}")
    for key, weight in sorted(model.named_parameters()):
        if key.split(".")[0] in skip:
            continue
        noise = torch.randn(weight.shape, generator=rng)
        if "norm" in key:
            weight.copy_(1 + 0.2 * noise)
        elif weight.ndim == 1:
            weight.copy_(0.3 * (noise + noise.sign()))
        elif key.split(".")[0] == "lm_head" or "markov_w" in key:
            weight.copy_(0.5 * noise)
        else:
            weight.copy_(0.22 * noise)


def vocab_mappings() -> Tensors:
    """The package's own choice of a draft vocabulary, for made-up token counts."""
    counts = torch.randint(1, 1000, (VOCAB,), generator=generator("token counts")).tolist()
    d2t, t2d = build_vocab_mappings_from_distribution(dict(enumerate(counts)), DRAFT_VOCAB, VOCAB)
    return {"d2t": d2t, "t2d": t2d}


def load(folder: Path) -> SpeculatorModel:
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(folder, config=config).eval()


def saved(model: SpeculatorModel, folder: Path, borrowed: tuple[str, ...]) -> SpeculatorModel:
    """The model as read back from the checkpoint that it wrote, with weights of its own by then."""
    randomise(model, folder.name, (*borrowed, "verifier_lm_head", "verifier_norm"))
    model.save_pretrained(folder)
    (folder / "config.py").unlink(missing_ok=True)  # the package's own source, which save_pretrained adds
    loaded = load(folder)
    for key, weight in model.state_dict().items():
        if not torch.equal(weight, loaded.state_dict()[key]):
            raise SystemExit(f"{folder.name}: {key} did not survive being saved and loaded")
    return loaded


def write_reference(folder: Path, tensors: Tensors, package: str, taps: list[int] | None, **meta: Any) -> None:
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise SystemExit(f"{folder.name}: {key} is not finite")
    facts = {
        "case": folder.name,
        "package": package,
        "version": version(package),
        "torch": version("torch").split("+")[0],
        "transformers": version("transformers"),
        "target_vocab": VOCAB,
        "target_layers": TARGET_LAYERS,
        "taps": taps,
    }
    contiguous = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
    save_file(contiguous, folder / "reference.safetensors", {"meta": json.dumps(facts | meta)})
    print(folder.name, {key: list(tensor.shape) for key, tensor in tensors.items()})


@contextmanager
def recorded(module: torch.nn.Module) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Input and output of each call of a module."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    hook = module.register_forward_hook(lambda _module, args, output: calls.append((args[0], output)))
    try:
        yield calls
    finally:
        hook.remove()


# EAGLE-3 -------------------------------------------------------------------------------------------------------------

EAGLE3_TAPS = [2, 6, 9]  # indices of hidden states: 0 is the embeddings. What the reference takes of 12 layers


def eagle3_cases(out: Path) -> None:
    llama = {"kind": LlamaConfig, "rms_norm_eps": 1e-5}
    eagle3_case(out / "eagle3_plain", llama)
    eagle3_case(
        out / "eagle3_norm_before_residual",
        llama | {"rope_theta": 500000.0},
        norm_before_residual=True,
        draft_vocab_size=VOCAB,
    )
    eagle3_case(out / "eagle3_norm_before_fc", llama, norm_before_fc=True)
    eagle3_case(out / "eagle3_fc_norm", llama, fc_norm=True)
    eagle3_case(out / "eagle3_norm_output", llama, norm_output=True, norm_before_residual=True)
    eagle3_case(
        out / "eagle3_qwen3_two_layers",
        {"num_hidden_layers": 2, "head_dim": 16, "rope_theta": 1000000.0},
        target_layer_ids=[1, 3, 5, 8, 11],
        draft_vocab_size=VOCAB,
    )
    eagle3_renamed(out / "eagle3_plain", out / "eagle3_reference_yuhuili", {}, None, None)
    block_outputs = [tap - 1 for tap in EAGLE3_TAPS]
    nested = {"eagle_aux_hidden_state_layer_ids": block_outputs, "use_aux_hidden_state": True}
    more = {"eagle_config": nested, "rope_theta": 10000.0, "head_dim": 8}
    eagle3_renamed(out / "eagle3_plain", out / "eagle3_reference_nested", more, block_outputs, "block_output")


def eagle3_case(folder: Path, layer: dict[str, Any], **changes: Any) -> None:
    arguments = {
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": False,
        "target_layer_ids": EAGLE3_TAPS,
        "ttt_steps": STEPS,
        "verifier_name_or_path": VERIFIER,
        "draft_attn_impl": "eager",
    }
    arguments |= changes
    model = Eagle3DraftModel.from_training_args(layer_config(**layer), **vocab_mappings(), **arguments)
    model = saved(model, folder, ("embed_tokens",))
    taps = arguments["target_layer_ids"]
    given = inputs(folder.name, len(taps))
    tensors = given | {"embed": model.embed_tokens.weight} | eagle3_outputs(model, **given)
    write_reference(folder, tensors, "speculators", taps, tap_index="hidden_state", steps=STEPS)


def eagle3_outputs(model: SpeculatorModel, tokens: torch.Tensor, features: torch.Tensor) -> Tensors:
    """The logits of every training-time-test step, on the batch as the package's own data pipeline shifts it."""
    pairs = len(tokens) - 1
    batch = shift_batch(
        {
            "input_ids": tokens,
            "hidden_states": features.flatten(1),
            "verifier_last_hidden_states": features[:, -1],
            "loss_mask": torch.ones_like(tokens, dtype=torch.bool),
            "lengths": torch.tensor([len(tokens)]),
            "position_ids": torch.arange(len(tokens)),
        }
    )
    with recorded(model.lm_head) as calls:
        model(
            hidden_states=batch["hidden_states"][None],
            input_ids=batch["input_ids"][None],
            position_ids=batch["position_ids"][None],
            document_ids=torch.zeros(1, pairs, dtype=torch.long),
            ttt_steps=STEPS,
        )
    logits = torch.stack([output[0] for _, output in calls])
    step, index = torch.arange(STEPS)[:, None], torch.arange(len(tokens))
    return {"logits": torch.nn.functional.pad(logits, (0, 0, 0, 1)), "valid": index + step + 1 < len(tokens)}


def eagle3_renamed(plain: Path, folder: Path, more: dict[str, Any], taps: list[int] | None, index: str | None) -> None:
    """The plain case in the layout of the first published EAGLE-3 heads: other names, no embeddings, flat config."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(plain / "model.safetensors")
    del tensors["embed_tokens.weight"]
    renamed = {key.replace("layers.0.", "midlayer."): tensor for key, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "initializer_range": 0.02,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(config | more, indent=2) + "\n", encoding="utf-8")
    Eagle3Converter().convert(
        folder, "converted", VERIFIER, validate=False, eagle_aux_hidden_state_layer_ids=EAGLE3_TAPS
    )
    reference = load_file(plain / "reference.safetensors")
    outputs = eagle3_outputs(load(Path("converted")), reference["tokens"], reference["features"])
    torch.testing.assert_close(outputs["logits"], reference["logits"])
    write_reference(
        folder, reference | outputs, "speculators", taps, tap_index=index, steps=STEPS, same_values_as=plain.name
    )


# MTP -----------------------------------------------------------------------------------------------------------------


def mtp_case(out: Path) -> None:
    """One module used for three steps. The config holds the target's number of layers, as the package writes it."""
    folder = out / "mtp_qwen3"
    config = MTPSpeculatorConfig(
        transformer_layer_config=layer_config(num_hidden_layers=TARGET_LAYERS, rope_theta=1000000.0),
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(VERIFIER),
        ),
    )
    model = MTPDraftModel(config)
    model.load_verifier_weights()
    model = saved(model, folder, ("embed_tokens", "lm_head"))
    given = inputs(folder.name, 1)
    steps, _, _ = model(input_ids=given["tokens"][None], hidden_states=given["features"][None, :, 0])
    logits = torch.cat(steps)
    done = logits.shape[1]
    outputs = {
        "logits": torch.nn.functional.pad(logits, (0, 0, 0, LENGTH - done)),
        "valid": (torch.arange(LENGTH) < done).expand(STEPS, LENGTH),
    }
    tables = {"embed": model.embed_tokens.weight, "head": model.lm_head.weight}
    write_reference(folder, given | tables | outputs, "speculators", None, tap_index="after_final_norm", steps=STEPS)


# DFlash and DSpark by speculators ------------------------------------------------------------------------------------


def dflash_cases(out: Path) -> None:
    block_case(
        out / "dflash_full",
        DFlashDraftModel,
        layer_config(num_hidden_layers=2, rope_theta=1000000.0),
        target_layer_ids=[2, 6, 10],
        draft_vocab_size=VOCAB,
    )
    block_case(
        out / "dflash_reduced",
        DFlashDraftModel,
        layer_config(num_hidden_layers=3, rms_norm_eps=1e-5),
        target_layer_ids=[2, 10],
    )


def dspark_cases(out: Path) -> None:
    full = {"draft_vocab_size": VOCAB}
    dspark_case(out / "dspark_vanilla", markov_head_type="vanilla", **full)
    dspark_case(out / "dspark_gated", markov_head_type="gated")
    dspark_case(out / "dspark_rnn", markov_head_type="rnn", **full)
    dspark_case(out / "dspark_rnn_not_from_anchor", markov_head_type="rnn", sample_from_anchor=False)
    dspark_case(out / "dspark_rank_0", markov_rank=0, confidence_head_with_markov=False)


def dspark_case(folder: Path, **changes: Any) -> None:
    arguments = {"markov_rank": MARKOV_RANK, "target_layer_ids": [3, 9]} | changes
    block_case(folder, DSparkDraftModel, layer_config(rope_theta=1000000.0), **arguments)


def block_case(folder: Path, kind: type[DFlashDraftModel], layer: PretrainedConfig, **changes: Any) -> None:
    arguments = {
        "draft_vocab_size": DRAFT_VOCAB,
        "block_size": BLOCK,
        "mask_token_id": MASK_TOKEN,
        "verifier_name_or_path": VERIFIER,
        "draft_attn_impl": "eager",
    }
    arguments |= changes
    model = kind.from_training_args(layer, **vocab_mappings(), **arguments)
    borrowed = ("embed_tokens",) if model.use_draft_vocab else ("embed_tokens", "lm_head")
    model = saved(model, folder, borrowed)
    taps = arguments["target_layer_ids"]
    given = inputs(folder.name, len(taps))
    tensors = given | {"embed": model.embed_tokens.weight}
    if not model.use_draft_vocab:
        tensors["head"] = model.lm_head.weight
    tensors |= block_outputs(model, **given)
    write_reference(
        folder,
        tensors,
        "speculators",
        taps,
        tap_index="hidden_state",
        block_size=BLOCK,
        mask_token_id=MASK_TOKEN,
        sample_from_anchor=model.config.sample_from_anchor,
    )


def block_outputs(model: DFlashDraftModel, tokens: torch.Tensor, features: torch.Tensor) -> Tensors:
    """One forward pass of all blocks. Anchors, there drawn at random, are ours; the loss is not computed."""
    anchors = torch.tensor(ANCHORS)
    core: ModuleType = dspark_core if isinstance(model, DSparkDraftModel) else dflash_core
    given: list[tuple[Any, ...]] = []

    def no_loss(*args: Any, **_: Any) -> tuple[None, dict[str, Any]]:
        given.append(args)
        return None, {}

    with (
        patch.object(dflash_core, "select_anchors", lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))),
        patch.object(core, "compute_metrics", no_loss),
        recorded(model.lm_head) as calls,
    ):
        model(
            hidden_states=features.flatten(1)[None],
            input_ids=tokens[None],
            loss_mask=torch.ones(1, len(tokens)),
            verifier_last_hidden_states=torch.zeros(1, len(tokens), WIDTH),
            document_ids=torch.zeros(1, len(tokens), dtype=torch.long),
            max_anchors=len(anchors),
        )
    [(hidden, _)], [(logits, _, confidence, *_)] = calls, given
    shape = (len(anchors), model.block_size)
    outputs = {"anchors": anchors, "hidden": hidden.view(*shape, -1), "logits": logits.view(*shape, -1)}
    if core is dspark_core:
        outputs["confidence_logits"] = confidence.view(shape)
    return outputs


# DFlash by its authors -----------------------------------------------------------------------------------------------


def zlab_cases(out: Path) -> None:
    taps = [1, 5, 8]  # outputs of blocks: hidden states 2, 6 and 9
    basic = {"mask_token_id": MASK_TOKEN, "target_layer_ids": taps}
    zlab_case(out / "dflash_zlab", basic, block_size=BLOCK, rope_theta=1000000.0)
    scaled = {"input_embedding_scale": 2.5, "output_multiplier": 0.7, "final_logit_softcapping": 4.0}
    zlab_case(out / "dflash_zlab_scaled", basic | scaled | {"block_size": BLOCK}, head_dim=16, rms_norm_eps=1e-5)


def zlab_case(folder: Path, dflash_config: dict[str, Any], **changes: Any) -> None:
    extra = {"dflash_config": dflash_config, "num_target_layers": TARGET_LAYERS}
    model = ZLabModel(layer_config(num_hidden_layers=2, **extra, **changes))
    randomise(model, folder.name)
    model.save_pretrained(folder)
    model = ZLabModel.from_pretrained(folder).eval()
    taps = dflash_config["target_layer_ids"]
    given = inputs(folder.name, len(taps))
    embed, head = target_tables()
    blocks = [zlab_block(model, anchor, embed, **given) for anchor in ANCHORS]
    logits = [model.compute_logits(hidden, lambda hidden: hidden @ head.T) for hidden in blocks]
    tensors = given | {"embed": embed, "head": head, "anchors": torch.tensor(ANCHORS), "logits": torch.cat(logits)}
    tensors["hidden"] = torch.cat(blocks)
    write_reference(
        folder, tensors, "dflash", taps, tap_index="block_output", block_size=BLOCK, mask_token_id=MASK_TOKEN
    )


def zlab_block(model: Any, anchor: int, embed: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
    """Hidden states of the block at an anchor, the same whether its context came at once or in two increments."""
    at_once = zlab_increments(model, [anchor], embed, **given)
    halves = zlab_increments(model, [anchor // 2, anchor], embed, **given)
    torch.testing.assert_close(at_once, halves, rtol=1e-4, atol=1e-5)
    return at_once


def zlab_increments(
    model: Any, anchors: list[int], embed: torch.Tensor, tokens: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """As in ``dflash_generate``: hand in the features since the last anchor, draft a block, crop it from the cache."""
    target = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=embed))
    scale = float(_draft_value(model.config, "input_embedding_scale", 1.0))
    cache = _make_cache(model.config)
    for before, anchor in zip([0, *anchors], anchors, strict=False):
        block = torch.full((1, model.block_size), model.mask_token_id)
        block[0, 0] = tokens[anchor]
        hidden = model(
            target_hidden=features[None, before:anchor].flatten(2),
            noise_embedding=_raw_input_embeddings(target, block, scale),
            position_ids=torch.arange(before, anchor + model.block_size)[None],
            past_key_values=cache,
            use_cache=True,
        )
        _crop_to(cache, anchor)
    return hidden


if __name__ == "__main__":
    main()
