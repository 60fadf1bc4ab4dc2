"""The two ways a run can end badly: the question was wrong, or the machine failed to answer it."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """The user asked for something that cannot be run. The message says what to type instead."""


class RunError(RuntimeError):
    """A run that was well asked for could not be finished. Its record says why."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """A sentence that lists the choices and, where one is close, the nearest: for the end of an error.

    >>> nearest("egle", ["eagle", "mtp"])
    "Did you mean 'eagle'? Choices: eagle, mtp."
    """
    choices = sorted(choices)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    guess = f"Did you mean '{close[0]}'? " if close else ""
    return f"{guess}Choices: {', '.join(choices)}."
