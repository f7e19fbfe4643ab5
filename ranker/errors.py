"""Errors that a user can mend: where, what was expected, what came, how to fix it.

Entry scripts print them without a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class RankerError(Exception):
    """A user's mistake or a broken input; its text is one line that says where, expected, got and fix."""

    exit_code = 1


class ConfigError(RankerError):
    """One or several faults in the configuration, each with its dotted key."""


class DataError(RankerError):
    """A missing, broken or contradicting input file or collection."""


class CheckpointError(RankerError):
    """A checkpoint or model folder that is missing, incomplete or does not fit."""


class NonFinite(RankerError):
    """A training step whose loss or gradient is not finite."""

    def __init__(self, message: str, loss: float, grad_norm: float) -> None:
        super().__init__(message)
        self.loss, self.grad_norm = loss, grad_norm


class Preempted(RankerError):
    """The training was asked to stop and has saved all that it needs to go on; 75 is EX_TEMPFAIL of sysexits.h: try again."""

    exit_code = 75

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def did_you_mean(got: str, known: Sequence[str]) -> str:
    """The end of an error message: the known name nearest to what was given, or all known names.

    >>> did_you_mean("monobret", ["colbert", "monobert"]), did_you_mean("x", ["b", "a"])
    ('; did you mean monobert?', '; expected one of a, b')
    """
    near = difflib.get_close_matches(got, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f"; expected one of {', '.join(sorted(known))}" if known else ""
