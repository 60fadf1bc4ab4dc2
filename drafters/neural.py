"""What all trained drafters have in common: where their network comes from, and what is said of it.

A family gives a ``Spec`` (what its network is made of), ``Options`` (what a user may choose of a new one) and a reader
of published checkpoints; a drafter is one of these at work for a target."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from drafters.checkpoints.files import Loaded, Written
from drafters.draft_model import DraftModel
from drafters.proposing import check_proposal
from specbench.drafting import Batch, Drafter
from specbench.errors import ConfigError
from specbench.model import CausalLM
from specbench.verification import Draft, Verdict

SEED = 0  # of the weights of a new network that have nothing to start from


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

    def start(self, batch: Batch, taps: list[Tensor]) -> None: ...  # noqa: D102

    def propose(self, batch: Batch, k: int) -> Draft: ...  # noqa: D102

    def observe(self, batch: Batch, verdict: Verdict, taps: Tensor) -> None: ...  # noqa: D102


class Neural(Drafter):
    """A drafter with a network.

    checkpoint: a folder or hub id, of any of the family's published layouts; None for a new network by ``network``,
    which knows only what it takes over from the target.
    proposal: ``greedy`` takes the most likely token; ``sample`` draws it, and hands on the law it was drawn from.
    """

    spec_type: ClassVar[Callable[..., Spec]]

    def __init__(self, checkpoint: str | None, proposal: str, network: Options, default: Options):
        check_proposal(proposal)
        if checkpoint is not None and network != default:
            raise ConfigError(
                f"drafter.network describes a new network, and drafter.checkpoint={checkpoint} brings its own; drop one"
            )
        self.proposal = proposal
        self.spec: Any = None
        self._checkpoint = checkpoint
        self._options = network
        self._files: dict[str, str] = {}

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

    def build(self, target: CausalLM) -> DraftModel:
        """The network on the target's device, as it is trained and saved. Raises ConfigError where it does not fit."""
        if self._checkpoint is None:
            self.spec = self.settle(self._options.spec(target))
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(SEED)
                model = self.spec.model(target).to(target.device)
                self.begin(model, target)
        else:
            loaded = self.read(self._checkpoint, target)
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
        self._parameters = model.parameters_own
        model.pack()
        self._loop = self.make_loop(model, target)

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

    def describe(self) -> dict[str, Any]:
        """Size, files, and all of the network's own choices."""
        return {
            "checkpoint": self._checkpoint,
            "files": self._files,
            "parameters": self._parameters,
            "network": asdict(self.spec),
        }
