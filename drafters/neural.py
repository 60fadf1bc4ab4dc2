"""What all trained drafters have in common: where their network comes from, and what is said of it.

A family gives a ``Spec`` (what its network is made of), ``Options`` (what a user may choose of a new one) and a reader
of published checkpoints; a drafter is one of these at work for a target."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, get_args, get_type_hints

import torch
from torch import Tensor, nn

from drafters import shipped
from drafters.checkpoints.files import Loaded, Written
from drafters.draft_model import DraftModel
from drafters.proposing import check_proposal
from specbench.drafting import Batch, Drafter
from specbench.errors import ConfigError
from specbench.model import ROUNDING, CausalLM
from specbench.verification import Draft, Verdict

SEED = 0  # of the weights of a new network that have nothing to start from


@dataclass(frozen=True)
class Passages:
    """Known texts, as training looks at them. Legend: B texts, T tokens of the longest, m taps, D width, A positions.

    tokens [B, T], padded at the end. streams [B, T, m, D]: the target's residual streams at the drafter's taps.
    at [B, A]: positions from which drafts are made. There the target has been through the text up to ``at``, the token
    after it is the last committed one, and draft j (from 0) is a guess at the token at+2+j.
    """

    tokens: Tensor
    streams: Tensor
    at: Tensor

    def tokens_after(self, steps: int) -> Tensor:
        """The tokens [B, A] so many ``steps`` after the positions; past the end of a text, some token."""
        return self.tokens.gather(1, (self.at + steps).clamp(max=self.tokens.shape[1] - 1))


@dataclass(frozen=True)
class Unrolled:
    """What a network makes of passages: for each draft logits [B, A, Vd], given that those before it were right; and
    logits [B, A, K] of being accepted, where it has them."""

    logits: Sequence[Tensor]
    confidence: Tensor | None = None


@dataclass(frozen=True)
class Sum:
    """The last residual stream of a network, as a sum: the ``norm`` that reads it, and linear ``layers`` whose outputs
    are added up in it as they are, in an order in which each can be fitted to what those before it leave over. It is
    fitted for the first ``drafts``, which are made at places of their own, and none from another."""

    norm: nn.Module
    layers: Sequence[nn.Linear]
    drafts: int = 1


class Spec(Protocol):
    """What a network is made of. Frozen dataclasses; ``taps`` are the residual streams it reads."""

    @property
    def taps(self) -> tuple[int, ...]: ...  # noqa: D102

    def model(self, target: CausalLM) -> DraftModel:
        """The network with its ends, its weights not set. ``target`` is asked for what it is, not for weights."""


class Options(Protocol):
    """What a user may choose of a new network: the YAML's ``network``."""

    def spec(self, target: CausalLM) -> Spec:
        """The network these options ask for, for ``target``. Raises ConfigError for what cannot be."""


class Loop(Protocol):
    """How a network drafts; the methods are those of ``Drafter``, and there are always taps."""

    def prepare(self, rows: int, slots: int, k: int) -> None: ...  # noqa: D102

    def start(self, batch: Batch, taps: list[Tensor]) -> None: ...  # noqa: D102

    def propose(self, batch: Batch, k: int) -> Draft: ...  # noqa: D102

    def observe(self, batch: Batch, verdict: Verdict, taps: Tensor) -> None: ...  # noqa: D102


class Neural(Drafter):
    """A drafter with a network.

    checkpoint: a folder or hub id, of any of the family's published layouts; ``shipped`` for the one that comes with
    the target; None for a new network by ``network``, which knows only what it takes over from the target.
    proposal: ``greedy`` takes the most likely token; ``sample`` draws it, and hands on the law it was drawn from.
    """

    spec_type: ClassVar[Callable[..., Spec]]
    family: ClassVar[str]  # what it is called on the command line

    def __init__(self, checkpoint: str | None, proposal: str, network: Options, default: Options):
        check_proposal(proposal)
        if checkpoint is not None and network != default:
            raise ConfigError(
                f"drafter.network describes a new network, and drafter.checkpoint={checkpoint} brings its own; drop "
                "one, or say drafter.checkpoint=null"
            )
        if checkpoint is not None and not isinstance(checkpoint, str):
            raise ConfigError(f"drafter.checkpoint={checkpoint} is neither a folder nor a hub id")
        check_types(network)
        self.proposal = proposal
        self.spec: Any = None
        self._checkpoint = checkpoint
        self._options = network
        self._path: str | None = None  # of the checkpoint that was read
        self._files: dict[str, str] = {}
        self._learned_from: Sequence[str] = ()

    @abstractmethod
    def read(self, path: str, target: CausalLM) -> Loaded:
        """A checkpoint, for a target. Raises ConfigError for one of another kind, or that does not fit."""

    @abstractmethod
    def write(self, model: DraftModel, target: CausalLM) -> Written:
        """``model``, which ``build`` gave, as a checkpoint. Raises ConfigError for what the layout cannot say."""

    def settle(self, spec: Any) -> Any:
        """The spec with whatever the drafter's own settings add to it."""
        return spec

    @abstractmethod
    def begin(self, model: DraftModel, target: CausalLM) -> None:
        """Give a new ``model`` what it can take over from the target. Runs without gradients."""

    @abstractmethod
    def make_loop(self, model: DraftModel, target: CausalLM) -> Loop:
        """Make ready to draft with ``model``, which is bound and packed."""

    @abstractmethod
    def features(self, streams: Tensor, target: CausalLM) -> Tensor:
        """What the network reads [B, S, F] of the target's residual streams [B, S, m, D] at its taps."""

    @abstractmethod
    def hidden(self, model: DraftModel, target: CausalLM, passages: Passages, k: int) -> Sequence[Tensor]:
        """For each of ``k`` drafts what the output head reads [B, A, D], at many positions of known texts at once."""

    def unroll(self, model: DraftModel, target: CausalLM, passages: Passages, k: int) -> Unrolled:
        """``k`` drafts at many positions of known texts at once, with gradients, as in training."""
        return Unrolled([model.head(h) for h in self.hidden(model, target, passages, k)])

    def last_sum(self, model: DraftModel) -> Sum | None:
        """What of a new ``model`` can be fitted before it is trained (see ``drafters.training.start``), if anything."""
        return None

    def build(self, target: CausalLM) -> DraftModel:
        """The network on the target's device, as it is trained and saved. Raises ConfigError where it does not fit."""
        check_ends(target)
        path = self._checkpoint
        if path == shipped.SHIPPED:
            path = shipped.find(self.family, target, "drafter.checkpoint")
        self._path = path
        if path is None:
            self.spec = self.settle(self._options.spec(target))
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(SEED)
                model = self.spec.model(target).to(target.device)
                self.begin(model, target)
        else:
            with _sound(path):
                loaded = self.read(path, target)
                self.spec, self._files = self.settle(self.spec_type(**loaded.fields)), loaded.files
                model = self.spec.model(target)
                loaded.fill(model)
        over = [tap for tap in self.spec.taps if not 0 <= tap <= len(target.blocks)]
        if over:
            raise ConfigError(
                f"the drafter reads the residual stream after block {over[0]}, and {target.name} has "
                f"{len(target.blocks)} blocks; was it trained for another target?"
            )
        self.taps = self.spec.taps
        model.bind(target)
        return model

    def bind(self, target: CausalLM) -> None:
        """Load or make the network, laid out for inference."""
        model = self.build(target)
        self._learned_from = shipped.prompts_of(self._path, target)
        self._parameters = model.parameters_own
        model.pack()
        self._loop = self.make_loop(model, target)

    def prepare(self, rows: int, slots: int, k: int) -> None:
        """See ``Loop``."""
        self._loop.prepare(rows, slots, k)

    def start(self, batch: Batch, taps: list[Tensor] | None) -> None:
        """See ``Loop``."""
        assert taps is not None
        self._loop.start(batch, taps)

    def propose(self, batch: Batch, k: int) -> Draft:
        """See ``Loop``."""
        return self._loop.propose(batch, k)

    def observe(self, batch: Batch, verdict: Verdict, taps: Tensor | None) -> None:
        """See ``Loop``."""
        assert taps is not None
        self._loop.observe(batch, verdict, taps)

    def warnings(self) -> list[str]:
        """A new network is not trained."""
        if self._checkpoint is not None:
            return []
        return [
            f"{type(self).__name__} has no checkpoint and is not trained: its acceptance says nothing of the method "
            "(drafter.checkpoint=FOLDER_OR_HUB_ID)"
        ]

    def checkpoint_folder(self) -> Path | None:
        """See ``Drafter``."""
        return None if self._path is None or not Path(self._path).is_dir() else Path(self._path)

    def learned_from(self) -> Sequence[str]:
        """See ``Drafter``."""
        return self._learned_from

    def describe(self) -> dict[str, Any]:
        """Size, files, and all of the network's own choices."""
        return {
            "checkpoint": self._checkpoint,
            "files": self._files,
            "parameters": self._parameters,
            "network": asdict(self.spec),
        }


def check_types(options: Any) -> None:
    """Raise ConfigError for an option that is not of its kind, as a command line can give it."""
    for name, hint in get_type_hints(type(options)).items():
        value = getattr(options, name)
        kinds = get_args(hint) or (hint,)
        fits = any(_fits(value, kind) for kind in kinds)
        if not fits:
            words = " or ".join(WORDS.get(kind, "null") for kind in kinds)
            raise ConfigError(f"drafter.network.{name}={value} is not {words}")


WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", Sequence[int]: "a list [2,15]"}


def _fits(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == Sequence[int]:
        listed = not isinstance(value, str) and isinstance(value, Sequence)
        return listed and all(type(entry) is int for entry in value)
    return type(value) is kind


def gathered(values: Tensor, at: Tensor) -> Tensor:
    """Rows of ``values`` [B, T, D] at the positions ``at`` [B, A]: [B, A, D]."""
    return values.gather(1, at[..., None].expand(-1, -1, values.shape[-1]))


@torch.inference_mode()
def check_ends(target: CausalLM) -> None:
    """Raise ConfigError unless the target's logits are what ``norm`` and ``head`` make of its last residual stream."""
    tokens = torch.arange(8, device=target.device)[None] % target.vocab_size
    output = target.forward(tokens, target.new_cache(1, 8), taps=(len(target.blocks),))
    assert output.taps is not None
    logits, made = output.logits.float(), target.head(target.norm(output.taps[:, :, 0])).float()
    off = ((made - logits).square().mean().sqrt() / logits.std()).item()
    if not off <= ROUNDING[target.dtype]:
        raise ConfigError(
            f"{target.name} does more than its final norm and output head between the last block and the logits, which "
            "drafting heads do not know of; use a drafter without a head"
        )


@contextmanager
def _sound(checkpoint: str) -> Iterator[None]:
    """Whatever a damaged configuration makes of itself is the checkpoint's fault, said in one line."""
    try:
        yield
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"drafter.checkpoint={checkpoint}: its config.json describes no network ({type(error).__name__}: {error})"
        ) from error
