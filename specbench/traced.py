"""A module's operations written down once and run again without Python.

Between two operations the interpreter spends microseconds, and evicts from the processor's caches what the next one
needs; in a small model's step that is a fifth of the time. A trace keeps the operations alone. It holds for every size
of its inputs, as sizes are read from them, and computes the very same numbers.
"""

import logging
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)


class Traced:
    """``module``, traced at the first call for each set of further arguments."""

    def __init__(self, module: nn.Module, name: str):
        """``name`` is for people."""
        self.module = module
        self._name = name
        self._made: dict[Hashable, Callable[..., Any]] = {}
        self.traced = True

    def __call__(self, *inputs: Any, **constants: Hashable) -> Any:
        """``module(*inputs, **constants)``, for tensors and lists of tensors as inputs. The module must not decide
        anything by what tensors hold. One that cannot be traced says so once and runs as it is."""
        key = tuple(sorted(constants.items()))
        if key not in self._made:
            self._made[key] = self._trace(inputs, constants)
        return self._made[key](*inputs)

    def _trace(self, inputs: tuple[Any, ...], constants: dict[str, Hashable]) -> Callable[..., Any]:
        bound = _Bound(self.module, constants)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what it takes for a constant, and of its own age
                return torch.jit.trace(bound, inputs, check_trace=False)
        except Exception as error:  # whatever it stumbles over
            if self.traced:
                log.warning("%s cannot be traced and runs slower: %s", self._name, repr(error)[:200])
            self.traced = False
            return bound


class _Bound(nn.Module):
    def __init__(self, module: nn.Module, constants: dict[str, Hashable]):
        super().__init__()
        self.module = module
        self._constants = constants

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs, **self._constants)
