"""Any Hugging Face causal LM with full or sliding-window attention, run as its authors wrote it.

It is handed a ``RaggedCache``, explicit positions and masks; residual streams are collected by hooks.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specbench.cache import RaggedCache, visible
from specbench.errors import ConfigError


class Unmodified:
    """``model``'s own forward; called like ``FusedDecoder``."""

    kind = "transformers"

    def __init__(self, model: PreTrainedModel, windows: dict[str, int | None], name: str):
        """``windows``: how far back each kind of attention sees, None for all. Raises ConfigError, naming ``name``, if
        the model takes no cache or no positions."""
        self.model = model
        self._windows = windows
        self.blocks = decoder_blocks(model, name)
        self._additive_mask = model.config._attn_implementation == "eager"
        self._cache_argument, self._logits_to_keep = _forward_arguments(model, name)

    def __call__(
        self,
        tokens: Tensor,
        cache: RaggedCache,
        taps: Sequence[int] = (),
        last_only: bool = False,
    ) -> tuple[Tensor, ...]:
        """tokens [B, S] at the slots ``cache`` was told -> logits [B, S, V] (of the last token alone: [B, 1, V]); and,
        if there are ``taps``, the residual streams after those numbers of blocks [B, S, m, D]."""
        slots = cache.locate(tokens)
        arguments: dict[str, Any] = {self._cache_argument: cache, "position_ids": cache.position_ids(slots)}
        if last_only and self._logits_to_keep:
            arguments["logits_to_keep"] = 1
        masks = {kind: self._mask(visible(slots, cache.ids, window)) for kind, window in self._windows.items()}
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        with self._tapped(taps) as streams:
            logits = self.model(input_ids=tokens, attention_mask=mask, use_cache=True, **arguments).logits
        if last_only:
            logits = logits[:, -1:]
        return (logits, torch.stack([streams[i] for i in taps], dim=2)) if taps else (logits,)

    def _mask(self, seen: Tensor) -> Tensor:
        """seen [B, S, T'] -> mask [B, 1, S, T'] as the model's attention wants it."""
        if self._additive_mask:
            dtype = self.model.dtype
            hidden = torch.finfo(dtype).min
            seen = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, hidden)
        return seen[:, None]

    @contextmanager
    def _tapped(self, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Collect residual streams by hooks on just the blocks asked for."""
        streams: dict[int, Tensor] = {}
        handles = []
        try:
            for i in taps:
                if i == 0:
                    handles.append(self.blocks[0].register_forward_pre_hook(_keep_input(streams), with_kwargs=True))
                else:
                    handles.append(self.blocks[i - 1].register_forward_hook(_keep_output(streams, i)))
            yield streams
        finally:
            for handle in handles:
                handle.remove()


def decoder_blocks(model: PreTrainedModel, name: str) -> nn.ModuleList:
    """The list of decoder blocks, found by its length in the decoder."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ConfigError(f"{name}: found no list of {count} decoder blocks in {type(model).__name__}")


def final_norm(model: PreTrainedModel) -> nn.Module | None:
    """The norm between the last block and the output head: the last child of the decoder that is one; None where there
    is none."""
    norms = [child for key, child in model.get_decoder().named_children() if "norm" in key or key == "ln_f"]
    return norms[-1] if norms else None


def _keep_input(streams: dict[int, Tensor]) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        streams[0] = args[0] if args else kwargs["hidden_states"]

    return hook


def _keep_output(streams: dict[int, Tensor], i: int) -> Callable[..., None]:
    def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        streams[i] = output[0] if isinstance(output, tuple) else output

    return hook


def _forward_arguments(model: PreTrainedModel, name: str) -> tuple[str, bool]:
    """The name of the cache argument, and whether logits can be computed for the last token alone."""
    parameters = inspect.signature(model.forward).parameters
    for argument in ("cache", "past_key_values"):
        if argument in parameters and "position_ids" in parameters:
            return argument, "logits_to_keep" in parameters
    raise ConfigError(f"{name} ({type(model).__name__}) takes no cache with explicit positions")
