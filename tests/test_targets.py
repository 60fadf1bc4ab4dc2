import logging
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from conftest import plain_greedy, prompts, tiny
from huggingface_hub.errors import LocalEntryNotFoundError
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig

from specbench import __main__, cli, record
from specbench.errors import ConfigError
from specbench.targets import DTYPES, byte_tokenizer, load_hf, load_tiny, resolve_device, resolve_dtype

CPU = torch.device("cpu")


def save(lm, folder):
    """Both model and tokenizer, of an ``lm`` loaded with engine="plain"."""
    lm.model.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tiny("llama", engine="plain"), tmp_path_factory.mktemp("models") / "small")


def load(folder, dtype="float32", **more):
    return load_hf(str(folder), dtype=dtype, device="cpu", **more)


# a local folder


def test_loaded_model_says_what_the_saved_one_said(folder, llama):
    for prompt in prompts(llama):
        assert plain_greedy(load(folder), prompt, 12) == plain_greedy(llama, prompt, 12)


def test_loaded_model_reads_a_conversation_as_the_saved_one_did(folder, llama):
    messages = [{"role": "user", "content": "Grüße?"}, {"role": "assistant", "content": "Yes"}]
    assert load(folder).encode(messages) == llama.encode(messages)


def test_loaded_model_has_the_end_ids_and_context_of_the_saved_one(folder, llama):
    loaded = load(folder)
    assert (loaded.eos_ids, loaded.context, loaded.parameters) == (llama.eos_ids, llama.context, llama.parameters)


@pytest.mark.parametrize("dtype", DTYPES)
def test_model_is_loaded_in_the_dtype_asked_for(folder, dtype):
    assert load(folder, dtype).dtype == DTYPES[dtype]


def test_model_goes_by_the_name_of_its_folder(folder):
    assert load(f"{folder}/").name == "small"
    assert load(folder, name="mine").name == "mine"


def test_files_that_make_the_model_are_digested(folder):
    assert {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
    } <= set(load(folder).files)


def test_file_that_is_no_part_of_the_model_is_not_digested(folder):
    before = load(folder).files
    (folder / "notes.md").write_text("mine")
    assert load(folder).files == before


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    path = tmp_path_factory.mktemp("models") / "tied"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model, path


TEXT = torch.arange(3, 23)[None]


@torch.inference_mode()
def logits(model):
    return model(input_ids=TEXT, use_cache=False).logits.float()


def test_tied_embeddings_stay_tied(tied):
    model, path = tied
    lm = load(path, engine="plain")
    head, embedding = lm.model.get_output_embeddings().weight, lm.model.get_input_embeddings().weight
    assert head.data_ptr() == embedding.data_ptr()
    assert lm.parameters == sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(logits(lm.model), logits(model))


def test_tied_head_in_bfloat16_says_the_same_within_its_precision(tied):
    model, path = tied
    expected = logits(model)
    assert (logits(load(path, "bfloat16").model) - expected).square().mean().sqrt() < 0.05 * expected.std()


# weights are never unpickled


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.bin", "adapter.pt"])
def test_pickled_weights_are_refused_and_not_opened(llama, tmp_path, name):
    path = save(tiny("llama", engine="plain"), tmp_path / "pickled")
    (path / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Trap(tmp_path / "sprung")}, path / name)
    with pytest.raises(ConfigError, match=r"cannot load a causal LM from .*pickled"):
        load(path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_folder_that_lacks_a_file_is_refused_by_name(llama, tmp_path, missing):
    path = save(tiny("llama", engine="plain"), tmp_path / "partial")
    (path / missing).unlink()
    with pytest.raises(ConfigError, match=r"cannot load a causal LM from .*partial"):
        load(path)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_folder_with_a_damaged_file_is_refused_by_name(llama, tmp_path, file):
    path = save(tiny("llama", engine="plain"), tmp_path / "damaged")
    (path / file).write_bytes((path / file).read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"cannot load a causal LM from .*damaged"):
        load(path)


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "a/b/c"])
def test_folder_that_does_not_exist_is_refused_by_name(path):
    with pytest.raises(
        ConfigError, match=rf"model folder {path} does not exist; give a folder or a hub id like org/name"
    ):
        load(path)


# the hub


def test_hub_id_with_no_network_says_how_to_go_on(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot fetch org/name from .*target=hf target\.path=FOLDER"):
        load("org/name")


def http_error(name):
    """An error of the library that the hub's client speaks HTTP with."""
    http = sys.modules.get("httpx2") or sys.modules["httpx"]
    return getattr(http, name)("no route")


@pytest.mark.parametrize(
    "error",
    [
        lambda: LocalEntryNotFoundError("nothing in the cache"),
        lambda: ConnectionError("no route"),
        lambda: OSError("disk"),
        lambda: http_error("ProxyError"),
        lambda: http_error("ReadTimeout"),
        lambda: http_error("RemoteProtocolError"),
    ],
    ids=["not cached", "connection", "disk", "proxy", "timeout", "protocol"],
)
def test_hub_that_cannot_be_reached_says_how_to_go_on(monkeypatch, error):
    def fail(*what, **how):
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=r"cannot fetch org/name from .*target=hf target\.path=FOLDER"):
        load("org/name")


@pytest.mark.parametrize("bad", ["nowhere at all", "-x/y", "a..b/c"])
def test_name_that_can_be_no_hub_id_is_refused(bad):
    with pytest.raises(ConfigError, match="cannot fetch"):
        load(bad)


@pytest.mark.parametrize("trusted", [False, True])
def test_code_is_fetched_from_the_hub_only_where_it_is_trusted(folder, llama, monkeypatch, trusted):
    asked = []

    def fetch(repo, allow_patterns):
        asked.append((repo, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    lm = load("org/some-model", trust_remote_code=trusted)
    ((repo, patterns),) = asked
    assert (repo, lm.name) == ("org/some-model", "some-model")
    assert ("*.py" in patterns) == trusted
    assert {"*.safetensors", "*.json", "*.jinja"} <= set(patterns)
    assert [pattern for pattern in patterns if pattern.endswith((".bin", ".pt", "*"))] == []
    assert plain_greedy(lm, [5, 6, 7], 4) == plain_greedy(llama, [5, 6, 7], 4)


# what auto means, and what is no device or dtype


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_where_the_processor_multiplies_it(monkeypatch, native, expected):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    assert resolve_dtype("auto", CPU) == expected


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_where_the_gpu_multiplies_it(monkeypatch, native, expected):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    assert resolve_dtype("auto", torch.device("cuda")) == expected


@pytest.mark.parametrize("name", DTYPES)
def test_dtype_that_is_named_is_taken(name):
    assert resolve_dtype(name, CPU) == DTYPES[name]


@pytest.mark.parametrize("name", ["float64", "int8", "fp16", ""])
def test_unknown_dtype_is_refused_with_the_choices(name):
    with pytest.raises(ConfigError, match=f"dtype={name} is unknown.*Choices: auto, bfloat16, float16, float32"):
        resolve_dtype(name, CPU)


@pytest.mark.parametrize(("there", "expected"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_a_gpu_where_there_is_one(monkeypatch, there, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert resolve_device("auto").type == expected


def test_gpu_where_there_is_none_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device=cuda:0 was asked for and there is no CUDA device"):
        resolve_device("cuda:0")


@pytest.mark.parametrize("name", ["gpu", "tpu", "meta", "mps", ""])
def test_unknown_device_is_refused_with_the_choices(name):
    with pytest.raises(ConfigError, match=f"device={name} is unknown; use auto, cpu or cuda"):
        resolve_device(name)


def test_unknown_family_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"target\.family=lama is unknown\. Did you mean 'llama'\?"):
        load_tiny("lama")


def test_tiny_model_leaves_the_random_state_as_it_was():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    load_tiny(layers=1, seed=7)
    assert torch.equal(torch.get_rng_state(), before)


# a small model beside the target


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["specbench"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(cli, "out", Console(width=80))
    monkeypatch.setattr(cli, "err", Console(width=80, stderr=True))
    (tmp_path / "prompts.jsonl").write_text(f'{{"turns": "{"One two. " * 10}"}}\n')
    options = ["target=tiny", "drafter=small_lm", "dataset=jsonl", "dataset.path=prompts.jsonl", "results_dir=results"]
    logger = logging.getLogger("specbench")
    handlers, level, propagate = logger.handlers, logger.level, logger.propagate
    yield [*options, "dtype=float32", "device=cpu", "max_new_tokens=6", "k=2"]
    logger.handlers, logger.level, logger.propagate = handlers, level, propagate


def test_small_model_in_a_folder_drafts_for_its_own_kind(command, folder):
    assert __main__.main([*command, f"drafter.model={folder}"]) == 0
    (run,) = [record.read(path) for path in record.find([Path("results")])]
    assert run["metrics"]["acceptance_rate"] == 1  # it is the target
    assert run["drafter"]["model"] == "small"
    assert "model.safetensors" in run["drafter"]["files"]


def test_small_model_with_another_tokenizer_is_refused_by_name(command, tmp_path, capsys):
    stranger = load_tiny(layers=1, engine="plain")
    stranger.tokenizer.add_tokens(["stranger"])
    save(stranger, tmp_path / "strange")
    assert __main__.main([*command, "drafter.model=./strange"]) == 2
    said = capsys.readouterr().err
    assert "drafter.model=strange has another tokenizer than target tiny-llama: 1 tokens differ" in said
    assert not Path("results").exists()


def test_small_model_that_is_nowhere_is_refused(command, capsys):
    assert __main__.main([*command, "drafter.model=./nowhere"]) == 2
    assert "model folder ./nowhere does not exist" in capsys.readouterr().err


def test_small_model_with_too_short_a_context_fails_its_arm_alone(command, tmp_path, capsys):
    save(load_tiny(layers=1, context=64, engine="plain"), tmp_path / "short")
    assert __main__.main([*command, "drafter.model=./short", "+drafter@compare.ngram=ngram"]) == 1
    runs = {run["drafter"]["name"]: run for run in (record.read(path) for path in record.find([Path("results")]))}
    assert {name: run["status"] for name, run in runs.items()} == {"small_lm": "failed", "ngram": "ok"}
    assert runs["small_lm"]["error"].startswith("RunError: ")
    assert "do not fit the context of short (64 tokens)" in runs["small_lm"]["error"]
