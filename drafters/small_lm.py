"""A small language model drafts for a large one: the original speculative decoding (Leviathan et al. 2023; Chen et
al. 2023). Any causal LM with the target's tokenizer serves.

The small model has its own ragged cache. After a round it holds the keys of the drafts it was fed; those that were
rejected are forgotten by shortening the rows, and what was committed beyond its cache is fed first in the next round.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters import distilled, shipped
from drafters.checkpoints.files import Written
from drafters.neural import SEED, Passages, Sum, Unrolled, check_types
from drafters.proposing import Proposal, check_proposal
from specbench.cache import RaggedCache
from specbench.drafting import Batch, Drafter
from specbench.errors import ConfigError, RunError
from specbench.model import CausalLM
from specbench.targets import load_hf
from specbench.verification import Draft


class SmallLM(Drafter):
    """Drafts with ``model``: a local folder or hub id; ``shipped`` for the one that comes with the target; None for a
    new one by ``network``, to be trained (see ``drafters.distilled``).

    proposal: ``greedy`` takes the most likely token; ``sample`` draws from the small model's law, transformed exactly
    as the target's (temperature, top-k, ...), and hands that law on for the accept/residual rule.
    engine: as a target's (see ``CausalLM``).
    """

    taps = ()

    def __init__(
        self,
        model: str | Path | CausalLM | None = None,
        proposal: str = "greedy",
        engine: str = "auto",
        network: distilled.Options | None = None,
    ):
        check_proposal(proposal)
        self._network = network or distilled.Options()
        check_types(self._network)
        self._ids: Tensor | None = None
        self._learned_from: Sequence[str] = ()
        self._source = model
        self._folder: Path | None = None  # that the model was read from
        self._engine = engine
        self.proposal = proposal
        self._cache: RaggedCache | None = None  # of the batch under way

    def bind(self, target: CausalLM) -> None:
        """Load the small model beside the target; refuse another tokenizer."""
        source = self._source
        if source is None:
            raise ConfigError(
                "drafter=small_lm needs a model: drafter.model=FOLDER_OR_HUB_ID, or train one: python -m "
                "drafters.training drafter=small_lm target=…"
            )
        if source == shipped.SHIPPED:
            source = shipped.find("small_lm", target, "drafter.model")
        if not isinstance(source, CausalLM) and Path(source).is_dir():
            self._folder = Path(source)
        if isinstance(source, CausalLM):
            self.lm = source
        elif distilled.is_one(Path(source)):
            self.lm, self._ids = distilled.read(str(source), target, self._engine)
            self._learned_from = shipped.prompts_of(str(source), target)
        else:
            dtype = str(target.dtype).removeprefix("torch.")
            self.lm = load_hf(str(source), dtype=dtype, device=str(target.device), engine=self._engine)
        check_same_tokenizer(target, self.lm)
        self._vocab_size = target.vocab_size
        self._known = self.lm.model.get_input_embeddings().num_embeddings  # tokens it can read

    def build(self, target: CausalLM) -> distilled.SmallModel:
        """A new small LM, to be trained."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return distilled.build(self._network, target)

    def unroll(self, model: distilled.SmallModel, target: CausalLM, passages: Passages, k: int) -> Unrolled:
        """See ``neural.Neural``."""
        return Unrolled([model.head(h) for h in self.hidden(model, target, passages, k)])

    def hidden(self, model: distilled.SmallModel, target: CausalLM, passages: Passages, k: int) -> list[Tensor]:
        """See ``distilled.hidden``."""
        return distilled.hidden(model, target, passages, k)

    def last_sum(self, model: distilled.SmallModel) -> Sum:
        """See ``distilled.last_sum``."""
        return distilled.last_sum(model)

    def write(self, model: distilled.SmallModel, target: CausalLM) -> Written:
        """See ``distilled.write``."""
        return distilled.write(model, target)

    def start(self, batch: Batch, taps: object) -> None:
        """Prefill the small model's own cache with the prompts. Raises RunError where its context is too short."""
        longest = batch.tokens.shape[1]
        if self.lm.context is not None and longest > self.lm.context:
            raise RunError(
                f"texts of up to {longest} tokens do not fit the context of {self.lm.name} ({self.lm.context} tokens)"
            )
        if self._cache is not None:
            self.lm.recycle(self._cache)
            self._cache = None  # should there be no room for the next
        self._cache = self.lm.new_cache(len(batch), longest)
        self.lm.prepare(self._cache, (1, 2))
        for row in range(len(batch)):
            tokens = torch.tensor(batch.requests[row].tokens, device=batch.device).clamp(max=self._known - 1)
            self.lm.prefill(tokens, self._cache, row)

    def propose(self, batch: Batch, k: int) -> Draft:
        """k autoregressive steps of the small model."""
        if k == 0:
            return Draft.empty(len(batch), batch.device)
        assert self._cache is not None
        committed = torch.from_numpy(batch.lengths)
        self._cache.rewind(committed - 1)  # what it was fed of rejected drafts goes; it never holds the last token
        logits = self._catch_up(batch, self._cache)
        proposal = Proposal(batch, self.proposal, self._vocab_size, self._ids)
        for step in range(k):
            tokens = proposal.add(fit_vocabulary(logits, self._vocab_size) if self._ids is None else logits)
            if step < k - 1:
                logits = self.lm.forward(tokens[:, None], self._cache).logits[:, -1]
                self._cache.advance(torch.ones(len(batch), dtype=torch.long))
        return proposal.draft()

    def checkpoint_folder(self) -> Path | None:
        """See ``Drafter``."""
        return self._folder

    def learned_from(self) -> Sequence[str]:
        """See ``Drafter``."""
        return self._learned_from

    def describe(self) -> dict[str, Any]:
        """The small model's name, size and files."""
        return {
            "model": self.lm.name,
            "engine": self.lm.engine,
            "parameters": self.lm.parameters,
            "files": self.lm.files,
        }

    def _catch_up(self, batch: Batch, cache: RaggedCache) -> Tensor:
        """Feed each row what was committed since the last round; returns logits [B, V] after the last token.

        Rows lag by one or two tokens (two after a full accept): shorter ones are padded on the right, and the padding
        is not committed to the cache.
        """
        lengths = torch.from_numpy(batch.lengths)
        lag = lengths - cache.lengths  # [B], at least 1
        columns = cache.lengths[:, None] + torch.arange(int(lag.max()))
        columns = torch.minimum(columns, lengths[:, None] - 1)
        pending = torch.from_numpy(batch.tokens).gather(1, columns).to(batch.device, non_blocking=True)
        pending = pending.clamp(max=self._known - 1)  # the target's padding ids may not exist here
        logits = self.lm.forward(pending, cache).logits
        cache.advance(lag)
        last = (lag - 1).to(batch.device, non_blocking=True)
        return logits[torch.arange(len(batch), device=batch.device), last]


def fit_vocabulary(logits: Tensor, size: int) -> Tensor:
    """``logits`` [B, V'] cut, or padded with -inf, to ``size``: vocabularies of one tokenizer may be padded apart."""
    if logits.shape[-1] >= size:
        return logits[..., :size]
    return torch.nn.functional.pad(logits, (0, size - logits.shape[-1]), value=-torch.inf)


def check_same_tokenizer(target: CausalLM, small: CausalLM) -> None:
    """Raise ConfigError unless both models mean the same text by the same ids."""
    ours, theirs = target.tokenizer.get_vocab(), small.tokenizer.get_vocab()
    if ours == theirs:
        return
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    example = differing[0]
    raise ConfigError(
        f"drafter.model={small.name} has another tokenizer than target {target.name}: {len(differing)} tokens differ "
        f"(for example {example!r} is {theirs.get(example)} there and {ours.get(example)} here); "
        "use a model of the target's own family"
    )
