"""A causal language model that can be asked for several tokens a row, at uneven positions, and take them back.

Legend: B rows, S tokens in this forward, P tokens of a prompt, V vocabulary, D hidden width, m taps.

Any Hugging Face causal LM with full or sliding-window attention runs, by the fastest of our ways that it fits. A model
that cannot take tokens back is refused when it is loaded, with the reason.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specbench import fused, memory
from specbench.cache import RaggedCache, bucketed
from specbench.errors import ConfigError, RunError, nearest
from specbench.fused import FusedDecoder
from specbench.graphs import Run
from specbench.prepack import prepack
from specbench.quantise import quantise
from specbench.unmodified import Unmodified, decoder_blocks, final_norm

log = logging.getLogger(__name__)

# root mean square error of logits, relative to their standard deviation: between the same passes, and that rounding
# may cause between passes of other shapes
SAME_PASSES = 1e-3
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
TAKEN = "specbench takes causal LMs with full or sliding-window attention"
MASK_KINDS = ("full_attention", "sliding_attention")
ENGINES = ("auto", "plain")
PREFILL_CHUNK = 512  # tokens; bounds the memory of a prompt's attention masks
SPARE_CACHES = 2  # kept with their recordings for the next texts
LEAST_RECORDED = 256  # slots
DRAFT_SLOTS = 64  # of a recorded cache, past its text
LOGIT_BYTES = 12  # a logit, its float32 copy, and its part in a comparison


@dataclass(frozen=True)
class Output:
    """``logits`` [B, S, V] in the model's dtype; ``taps`` [B, S, m, D], the residual streams asked for, or None."""

    logits: Tensor
    taps: Tensor | None


class CausalLM:
    """A model with its tokenizer, ready to decode.

    engine ``auto``: Llama-shaped models run by our own forward (``Fused``), others by transformers'; on a CPU linear
    layers are prepacked (``prepack``), on a GPU steps are recorded as CUDA graphs (``graphs``). ``plain``: what Hugging
    Face loads, unmodified.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        files: dict[str, str] | None = None,
        engine: str = "auto",
        quant: str | None = None,
        record: bool | None = None,
    ):
        """``name`` is for people; ``files`` maps each weight file to its SHA-256; ``quant``: int8 or int4 (see
        ``quantise``). ``record``: whether forwards of all rows are recorded and replayed; None: on a GPU. Raises
        ConfigError for a model that cannot run."""
        if engine not in ENGINES:
            raise ConfigError(f"target.engine={engine} is unknown. {nearest(engine, ENGINES)}")
        if engine == "plain" and quant is not None:
            raise ConfigError(f"target.quant={quant} changes the model, which target.engine=plain forbids; drop one")
        self.name = name
        self.quant = quant
        self.files = files or {}
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.blocks = decoder_blocks(model, name)
        self.final_norm = final_norm(model)
        self.vocab_size: int = model.get_output_embeddings().out_features
        self.width: int = model.get_input_embeddings().embedding_dim  # of the residual stream
        self.parameters = sum(p.numel() for p in model.parameters())
        kinds = _layer_kinds(model, self.config, name)
        window = getattr(self.config, "sliding_window", None)
        self._windows = {kind: window if kind == "sliding_attention" else None for kind in sorted(set(kinds))}
        self._record = self.device.type == "cuda" and engine != "plain" if record is None else record
        self._spare: list[RaggedCache] = []
        self.bytes_per_slot = 0  # keys and values of a token; known after the first forward
        self._decoder: FusedDecoder | Unmodified = Unmodified(model, self._windows, name)
        whole = whole_logits(model, name)
        reason = fused.unfit(model)
        if engine == "auto":
            if reason is None:
                self._decoder = FusedDecoder(model, kinds, self._windows, name)
                memory.release()
            else:
                log.info("%s runs by transformers' own forward, which is slower: %s", name, reason)
            if quant is not None:
                quantise(self.blocks, quant)
                whole = whole_logits(model, name)  # it is another model now
            prepack(model)
            memory.release()
        self.weight_bytes, self.pass_bytes = _weight_bytes(model)
        self.bytes_per_slot = check_rollback(self, whole).bytes_per_slot

    @property
    def recorded(self) -> bool:
        """Whether forwards are recorded and replayed, as on a GPU."""
        return self._record

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Within it forwards run as they are, for caches and shapes that will not come again: recording one takes as
        long as many of them."""
        before, self._record = self._record, False
        try:
            yield
        finally:
            self._record = before

    @property
    def engine(self) -> str:
        """Whose forward it runs by, ``fused`` (ours) or ``transformers``, and whether it is traced or recorded."""
        return f"{self._decoder.kind}, recorded" if self._record else self._decoder.kind

    def attended(self, cached: int, steps: int) -> int:
        """Slots that a forward of ``steps`` tokens a row attends to, after ``cached`` ones."""
        return recorded_slots(cached) if self._record else bucketed(cached + steps)

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

    def new_cache(self, batch: int, slots: int, steps: int = 1) -> RaggedCache:
        """An empty cache for ``batch`` rows of ``slots`` tokens, ``steps`` of them in a forward.

        Raises RunError, with the largest batch that fits, where there is no memory for it.
        """
        if self._record:
            slots = max(slots, recorded_slots(slots - steps))
            for cache in self._spare:
                if (cache.batch, cache.slots) == (batch, slots):
                    self._spare.remove(cache)
                    return cache
        row_bytes = bucketed(slots) * self.bytes_per_slot + steps * self.vocab_size * LOGIT_BYTES
        free = memory.available(self.device)
        if batch * row_bytes > free and self._spare:
            self._spare.clear()
            free = memory.available(self.device)
        if batch * row_bytes > free:
            raise RunError(
                f"batch_size={batch} with texts of up to {slots} tokens needs {batch * row_bytes / 2**30:.1f} GiB for "
                f"keys, values and logits, and {free / 2**30:.1f} GiB is free; the largest batch that fits is "
                f"{free // row_bytes}"
            )
        limit = self.context - 1 if self.context else None
        return RaggedCache(batch, slots, self.device, max_position=limit, whole=self._record)

    def recycle(self, cache: RaggedCache) -> None:
        """Take back a cache that is no longer needed; recordings made on it serve the next texts."""
        if len(cache.recordings):
            cache.clear()
            self._spare = [cache, *self._spare][:SPARE_CACHES]

    def prepare(self, cache: RaggedCache, steps: Sequence[int], taps: Sequence[int] = ()) -> None:
        """Record forwards of each number of ``steps`` a row ahead of time, where they are recorded at all."""
        for count in steps if self._record else ():
            if (count, *taps, False) not in cache.recordings:
                self.forward(torch.zeros(cache.batch, count, dtype=torch.long, device=self.device), cache, taps=taps)

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
        the last token alone. The logits are valid until the next forward on the same cache.
        """
        for i in taps:
            if not 0 <= i <= len(self.blocks):
                raise ConfigError(f"tap {i} does not exist: {self.name} has taps 0..{len(self.blocks)}")
        cache.place(tokens.shape[1], row)

        def run(tokens: Tensor) -> tuple[Tensor, ...]:
            return self._decoder(tokens, cache, tuple(taps), last_only)

        outputs = self._replay(run, tokens, cache, (*taps, last_only)) if self._record and row is None else run(tokens)
        return Output(outputs[0], outputs[1] if taps else None)

    def prefill(self, tokens: Tensor, cache: RaggedCache, row: int, taps: Sequence[int] = ()) -> Output:
        """Run a whole prompt [P] through a row of ``cache`` and commit it: logits [1, 1, V] of its last token, taps
        [1, P, m, D]."""
        collected: list[Any] = []
        for chunk in tokens.split(PREFILL_CHUNK):
            output = self.forward(chunk[None], cache, row=row, taps=taps, last_only=True)
            cache.advance(torch.tensor(len(chunk)), row=row)
            collected.append(output.taps)
        return Output(output.logits, torch.cat(collected, dim=1) if taps else None)

    def _replay(self, run: Run, tokens: Tensor, cache: RaggedCache, kind: tuple[int, ...]) -> tuple[Tensor, ...]:
        """``run(tokens)`` by its recording; a model that cannot be recorded says so once and runs without."""
        try:
            logits, *streams = cache.recordings.replay((tokens.shape[1], *kind), run, tokens)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning("%s cannot be recorded as a CUDA graph and runs without: %s", self.name, error)
            self._record = False
            return run(tokens)
        return logits, *(stream.clone() for stream in streams)  # drafters keep these for later

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings [..., D] of ``tokens`` [...], scaled as the model scales them; without learned positions."""
        embedded = self.model.get_input_embeddings()(tokens)
        scale = getattr(self.config, "embedding_multiplier", None)  # Granite
        return embedded if scale is None else embedded * scale

    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm of ``hidden`` [..., D] (the residual stream after the last block), which ``head`` expects.

        Raises ConfigError for a model that has none.
        """
        if self.final_norm is None:
            raise ConfigError(f"{self.name} has no final norm of the usual kind, which this drafter needs")
        return self.final_norm(hidden)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of ``hidden`` [..., D] (taken after the final norm); see ``scaled``."""
        return self.scaled(self.model.get_output_embeddings()(hidden))

    def scaled(self, logits: Tensor) -> Tensor:
        """Bare products with rows of the output matrix, [...], scaled and bent as the model does it."""
        scale = getattr(self.config, "logit_scale", None)  # Cohere
        if getattr(self.config, "logits_scaling", None):  # Granite
            scale = 1 / self.config.logits_scaling
        if scale is not None:
            logits = logits * scale
        cap = getattr(self.config, "final_logit_softcapping", None)  # Gemma 2
        return logits if cap is None else torch.tanh(logits / cap) * cap


def recorded_slots(text: int) -> int:
    """Slots of a row of a recorded cache, for ``text`` tokens and the drafts after them: few sizes, so that recordings
    serve many texts, and the same for every draft length, so that all arms attend to as many."""
    return int(max(LEAST_RECORDED, 1 << max(0, text - 1).bit_length())) + DRAFT_SLOTS


def check_rollback(lm: CausalLM, whole: Tensor) -> RaggedCache:
    """Prove on a few tokens that ``lm`` can take tokens back; raises ConfigError if it cannot. Returns the cache.

    Two ragged rows are run, filled with junk, rolled back and run on. The logits must be those of the same passes
    without the junk, and, as far as the precision tells, ``whole``: those of the model as it came, of each row in one
    plain forward (see ``whole_logits``).
    """
    text = _check_text(lm.vocab_size, lm.device)
    junk = text.flip(1)[:, :CHECKED]

    def ragged(with_junk: bool) -> tuple[Tensor, RaggedCache]:
        cache = lm.new_cache(2, text.shape[1])
        for row, start in enumerate(CHECK_STARTS):
            lm.forward(text[row : row + 1, :start], cache, row=row)
            cache.advance(torch.tensor(start), row=row)
        if with_junk:
            lm.forward(junk, cache)
        block = torch.stack([text[row, start : start + CHECKED] for row, start in enumerate(CHECK_STARTS)])
        return lm.forward(block, cache).logits.float(), cache

    with _refusing(lm.name):
        (rolled_back, _), (clean, cache) = ragged(with_junk=True), ragged(with_junk=False)
    plain = torch.stack([whole[row, start : start + CHECKED] for row, start in enumerate(CHECK_STARTS)])
    for expected, allowed in ((clean, SAME_PASSES), (plain, ROUNDING[lm.dtype])):
        off = ((rolled_back - expected).square().mean().sqrt() / expected.std()).item()
        if not off <= allowed:
            raise ConfigError(
                f"{lm.name} cannot take tokens back: after a rollback its logits are off by {off:.1%} of their spread "
                f"(allowed {allowed:.1%}); {TAKEN}"
            )
    return cache


@torch.inference_mode()
def whole_logits(model: PreTrainedModel, name: str) -> Tensor:
    """Logits [2, tokens, V], float32, of the rows of ``check_rollback`` by one forward of the model itself."""
    vocab_size = model.get_output_embeddings().out_features
    with _refusing(name):
        return model(input_ids=_check_text(vocab_size, model.device), use_cache=False).logits.float()


CHECK_STARTS, CHECKED = (5, 8), 3  # tokens before a row's block, and in it


def _check_text(vocab_size: int, device: torch.device) -> Tensor:
    size = (2, max(CHECK_STARTS) + CHECKED + 1)
    return torch.randint(0, vocab_size, size, generator=torch.Generator().manual_seed(0)).to(device)


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Whatever goes wrong inside means that the model is not one of ours."""
    try:
        yield
    except RunError:  # no memory: not the model's fault
        raise
    except (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError, NotImplementedError) as error:
        raise ConfigError(
            f"{name} does not run with a ragged cache ({type(error).__name__}: {error}); {TAKEN}"
        ) from error


def _layer_kinds(model: PreTrainedModel, config: Any, name: str) -> list[str]:
    """The kind of attention of each block, of ``MASK_KINDS``."""
    if getattr(model, "_is_stateful", False):
        raise ConfigError(
            f"{name} ({type(model).__name__}) keeps recurrent state, which cannot be rolled back after a rejected "
            f"draft; {TAKEN}"
        )
    # one that the model's own configuration knows: else it is a stray, which transformers does not heed
    window = getattr(config, "sliding_window", None) if hasattr(type(config), "sliding_window") else None
    every = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [every] * config.num_hidden_layers
    unknown = sorted(set(kinds) - set(MASK_KINDS))
    if unknown:
        raise ConfigError(f"{name} has layers of kind {', '.join(unknown)}; specbench takes {' and '.join(MASK_KINDS)}")
    return list(kinds)


def _weight_bytes(model: PreTrainedModel) -> tuple[int, int]:
    """Bytes of all weights, in whatever layout, each counted once; and of those that every pass reads: all but an
    embedding table that is not the head's as well, of which a pass reads a few rows."""
    held = {}
    for module in model.modules():
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            held[id(tensor)] = tensor.numel() * tensor.element_size()
    table = model.get_input_embeddings().weight
    shared = getattr(model.get_output_embeddings(), "weight", None) is table
    return sum(held.values()), sum(held.values()) - (0 if shared else held[id(table)])
