"""Errors that a user can fix. A message says where, what was expected, what was found, and how to fix it.

Entry scripts print them without a traceback.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class RankerError(Exception):
    """A user's mistake or a broken input. The message is one line: `where: expected ..., got ...; fix`."""

    exit_code = 1


class ConfigError(RankerError):
    """One or several faults in the configuration. Each fault is one line that begins with the dotted key."""


class DataError(RankerError):
    """An input file or collection that is missing, broken or contradictory."""


class CheckpointError(RankerError):
    """A checkpoint or model folder that is missing, incomplete or incompatible."""


class NonFinite(RankerError):
    """A training step whose loss or gradient is NaN or infinite.

    Args:
        message: The message.
        loss: The step's loss.
        grad_norm: The norm of the step's gradient.
    """

    def __init__(self, message: str, loss: float, grad_norm: float) -> None:
        super().__init__(message)
        self.loss, self.grad_norm = loss, grad_norm


class Preempted(RankerError):
    """A training that stopped on a signal and saved everything that it needs to resume.

    Its exit code 75 is EX_TEMPFAIL of sysexits.h: try again.
    """

    exit_code = 75

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def did_you_mean(got: str, known: Sequence[str]) -> str:
    """Return the end of an error message: the known name that is closest to `got`, or else all known names.

    >>> did_you_mean("monobret", ["colbert", "monobert"]), did_you_mean("x", ["b", "a"])
    ('; did you mean monobert?', '; expected one of a, b')
    """
    near = difflib.get_close_matches(got, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f"; expected one of {', '.join(sorted(known))}" if known else ""


def shorten(message: str) -> str:
    """Return a message of at most 800 characters; the middle of a longer message, a long value, is left out."""
    return message if len(message) < 800 else f"{message[:300]} ... {message[-200:]}"


@contextmanager
def errors_of(path: str) -> Iterator[None]:
    """Add the source to errors of the block: in a set of a mix, `data.train: ...` becomes `data.sets.NAME.train: ...`.

    Args:
        path: Dotted path of the source's node: `data.sets.NAME`, or `data`, which changes nothing.

    Raises:
        RankerError: The error of the block with the added path.
    """
    try:
        yield
    except RankerError as error:
        text = str(error)
        if path == "data" or text.startswith(f"{path}.") or not text:
            raise
        named = re.sub(r"(^|(?<=\s))data\.(?=\w+[:=])", f"{path}.", text)
        raise type(error)(named if named.startswith(path) else f"{path}: {named}") from error
