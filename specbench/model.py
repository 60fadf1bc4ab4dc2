"""A causal language model that can be asked for several tokens a row, at uneven positions, and take them back.

Legend: B rows, S tokens in this forward, V vocabulary, D hidden width, m taps.

Any Hugging Face causal LM with full or sliding-window attention runs unmodified: it is handed a ``RaggedCache``,
explicit positions and masks. A model that cannot take tokens back is refused when it is loaded, with the reason.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specbench.cache import RaggedCache
from specbench.errors import ConfigError
from specbench.prepack import prepack

# root mean square error of logits, relative to their standard deviation: between the same passes, and that rounding
# may cause between passes of other shapes
SAME_PASSES = 1e-3
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
TAKEN = "specbench takes causal LMs with full or sliding-window attention"
MASK_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Output:
    """``logits`` [B, S, V] in the model's dtype; ``taps`` [B, S, m, D], the residual streams asked for, or None."""

    logits: Tensor
    taps: Tensor | None


class CausalLM:
    """A model with its tokenizer, ready to decode. Runs what Hugging Face loads unmodified, but for one thing: on
    a CPU its linear layers are prepacked (see ``prepack``) unless ``pack=False``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        files: dict[str, str] | None = None,
        pack: bool = True,
    ):
        """``name`` is for people; ``files`` maps each weight file to its SHA-256."""
        self.name = name
        self.files = files or {}
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.blocks = _decoder_blocks(model, self.config.num_hidden_layers, name)
        self.vocab_size: int = model.get_output_embeddings().out_features
        self.parameters = sum(p.numel() for p in model.parameters())
        self._masks = _mask_windows(model, self.config, name)
        self._additive_mask = model.config._attn_implementation == "eager"
        self._cache_argument, self._logits_to_keep = _forward_arguments(model, name)
        if pack:
            prepack(model)
        check_rollback(self)

    @property
    def context(self) -> int | None:
        """Largest number of tokens, prompt included, that the model can decode; None if it names no limit.

        Rotary embeddings that change their frequencies for the whole text once it grows past a length (longrope,
        dynamic) are used up to that length: beyond it a cached key no longer is what it would be now.
        """
        limit = getattr(self.config, "max_position_embeddings", None)
        rope = getattr(self.config, "rope_parameters", None) or {}
        for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
            if parameters.get("rope_type") in ("longrope", "dynamic"):
                original = parameters.get("original_max_position_embeddings") or getattr(
                    self.config, "original_max_position_embeddings", None
                )
                limit = min(filter(None, (limit, original)), default=None)
        return limit

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every end-of-sequence id of the generation config (or, failing that, of the config and tokenizer)."""
        generation = getattr(self.model, "generation_config", None)
        for ids in (getattr(generation, "eos_token_id", None), self.config.eos_token_id, self.tokenizer.eos_token_id):
            if ids is not None:
                return frozenset(ids if isinstance(ids, list | tuple) else [ids])
        return frozenset()

    def encode(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation (role, content) that the model is to answer.

        Through the chat template, which writes its own begin-of-sequence token, so none is added; a base model without
        a template takes the bare texts, a blank line between them, with whatever its tokenizer adds at the front.
        """
        if self.tokenizer.chat_template:
            return self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        return self.tokenizer("\n\n".join(m["content"] for m in messages)).input_ids

    def new_cache(self, batch: int, slots: int) -> RaggedCache:
        """An empty cache for ``batch`` rows of ``slots`` tokens."""
        return RaggedCache(batch, slots, self.device, max_position=self.context - 1 if self.context else None)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        cache: RaggedCache,
        *,
        row: int | None = None,
        taps: Sequence[int] = (),
        last_only: bool = False,
    ) -> Output:
        """Run ``tokens`` [B, S] at the rows' next positions and leave their keys and values in ``cache``.

        The cache's lengths stay as they are: the caller commits what it keeps with ``cache.advance``.
        ``row`` runs a single row alone (tokens [1, S]). ``taps``: i asks for the residual stream after i decoder
        blocks (0: embeddings; number of blocks: before the final norm). ``last_only`` computes logits [B, 1, V] of
        the last token alone.
        """
        slots, attended = cache.place(tokens.shape[1], row)
        arguments: dict[str, Any] = {self._cache_argument: cache, "position_ids": cache.position_ids()}
        if last_only and self._logits_to_keep:
            arguments["logits_to_keep"] = 1
        with self._tapped(taps) as streams:
            logits = self.model(
                input_ids=tokens, attention_mask=self._attention_mask(slots, attended), use_cache=True, **arguments
            ).logits
        if last_only:
            logits = logits[:, -1:]
        return Output(logits, torch.stack([streams[i] for i in taps], dim=2) if taps else None)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings [..., D] of ``tokens`` [...], scaled as the model scales them."""
        return self.model.get_input_embeddings()(tokens)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of ``hidden`` [..., D] (taken after the final norm)."""
        return self.model.get_output_embeddings()(hidden)

    def _attention_mask(self, slots: Tensor, attended: Tensor) -> Tensor | dict[str, Tensor]:
        """Masks [B, 1, S, T'] by kind of layer: which of the ``attended`` slots each of the written ``slots`` sees."""
        distance = slots[:, None, :, None] - attended  # [B, 1, S, T']
        masks = {}
        for kind, window in self._masks.items():
            visible = distance >= 0
            if window is not None:
                visible &= distance < window
            if self._additive_mask:
                hidden = torch.finfo(self.dtype).min
                visible = torch.zeros_like(visible, dtype=self.dtype).masked_fill_(~visible, hidden)
            masks[kind] = visible
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @contextmanager
    def _tapped(self, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Collect residual streams by hooks on just the blocks asked for."""
        streams: dict[int, Tensor] = {}
        handles = []
        try:
            for i in taps:
                if not 0 <= i <= len(self.blocks):
                    raise ConfigError(f"tap {i} does not exist: {self.name} has taps 0..{len(self.blocks)}")
                if i == 0:
                    handles.append(self.blocks[0].register_forward_pre_hook(_keep_input(streams), with_kwargs=True))
                else:
                    handles.append(self.blocks[i - 1].register_forward_hook(_keep_output(streams, i)))
            yield streams
        finally:
            for handle in handles:
                handle.remove()


def check_rollback(lm: CausalLM) -> None:
    """Prove on a few tokens that ``lm`` can take tokens back; raises ConfigError if it cannot.

    Two ragged rows are run, filled with junk, rolled back and run on. The logits must be those of the same passes
    without the junk, and, as far as the precision tells, those of each row in one plain forward.
    """
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, lm.vocab_size, (2, 12), generator=generator).to(lm.device)
    junk = torch.randint(0, lm.vocab_size, (2, 3), generator=generator).to(lm.device)
    starts = [5, 8]

    def ragged(with_junk: bool) -> Tensor:
        cache = lm.new_cache(2, 16)
        for row, start in enumerate(starts):
            lm.forward(text[row : row + 1, :start], cache, row=row)
            cache.advance(torch.tensor(start), row=row)
        if with_junk:
            lm.forward(junk, cache)
        block = torch.stack([text[row, start : start + 3] for row, start in enumerate(starts)])
        return lm.forward(block, cache).logits.float()

    try:
        rolled_back, clean = ragged(with_junk=True), ragged(with_junk=False)
        with torch.inference_mode():
            whole = lm.model(input_ids=text, use_cache=False).logits.float()
    except (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError, NotImplementedError) as error:
        raise ConfigError(
            f"{lm.name} does not run with a ragged cache ({type(error).__name__}: {error}); {TAKEN}"
        ) from error
    plain = torch.stack([whole[row, start : start + 3] for row, start in enumerate(starts)])
    for expected, allowed in ((clean, SAME_PASSES), (plain, ROUNDING[lm.dtype])):
        off = ((rolled_back - expected).square().mean().sqrt() / expected.std()).item()
        if not off <= allowed:
            raise ConfigError(
                f"{lm.name} cannot take tokens back: after a rollback its logits are off by {off:.1%} of their spread "
                f"(allowed {allowed:.1%}); {TAKEN}"
            )


def _keep_input(streams: dict[int, Tensor]) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        streams[0] = args[0] if args else kwargs["hidden_states"]

    return hook


def _keep_output(streams: dict[int, Tensor], i: int) -> Callable[..., None]:
    def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        streams[i] = output[0] if isinstance(output, tuple) else output

    return hook


def _decoder_blocks(model: PreTrainedModel, count: int, name: str) -> nn.ModuleList:
    """The list of decoder blocks, found by its length in the decoder."""
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ConfigError(f"{name}: found no list of {count} decoder blocks in {type(model).__name__}")


def _mask_windows(model: PreTrainedModel, config: Any, name: str) -> dict[str, int | None]:
    """Window by kind of layer: {"full_attention": None, "sliding_attention": 512}, whichever the model has."""
    if getattr(model, "_is_stateful", False):
        raise ConfigError(
            f"{name} ({type(model).__name__}) keeps recurrent state, which cannot be rolled back after a rejected "
            f"draft; {TAKEN}"
        )
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    unknown = sorted(set(kinds) - set(MASK_KINDS))
    if unknown:
        raise ConfigError(f"{name} has layers of kind {', '.join(unknown)}; specbench takes {' and '.join(MASK_KINDS)}")
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(set(kinds))}


def _forward_arguments(model: PreTrainedModel, name: str) -> tuple[str, bool]:
    """The name of the cache argument, and whether logits can be computed for the last token alone."""
    parameters = inspect.signature(model.forward).parameters
    for argument in ("cache", "past_key_values"):
        if argument in parameters and "position_ids" in parameters:
            return argument, "logits_to_keep" in parameters
    raise ConfigError(f"{name} ({type(model).__name__}) takes no cache with explicit positions")
