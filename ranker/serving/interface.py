"""The protocol of a model that the server can run, and the errors for which a request gets no scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ranker.errors import RankerError


class Tokenized(Protocol):
    """The tokenized pairs of a request.

    Attributes:
        sizes: Tokens that each pair adds to a batch, int64 [pairs].
        whole: Whether a pair's score depends on the request's other pairs, so that all of them go into one batch.
    """

    @property
    def sizes(self) -> np.ndarray: ...
    @property
    def whole(self) -> bool: ...


@dataclass(frozen=True)
class Part:
    """Pairs `start` to `end` (exclusive) of a request, which are in one batch."""

    pairs: Tokenized
    start: int
    end: int


class Model(Protocol):
    """A model that the server can run.

    Attributes:
        max_tokens: Token budget of a batch.
        computes_aside: Whether a launched batch is computed while the thread does something else, as on a GPU.
    """

    max_tokens: int
    computes_aside: bool

    def tokenize(self, pairs: Sequence[tuple[str, str]]) -> Tokenized:
        """Tokenize a request's pairs of a query and a doc, at least one; several threads call this."""
        ...

    def launch(self, parts: Sequence[Part]) -> Callable[[], np.ndarray]:
        """Start to score the parts' pairs; one thread calls this.

        Returns:
            A function that waits for the scores and returns them, one part after another, float32 [pairs]. The same
            thread calls this function once, perhaps after it has launched the next batch.
        """
        ...


class Unavailable(Exception):
    """The server accepts no requests now: the model is loading, the server is stopping, or the queue is full.

    Args:
        message: The message.
        is_full: Whether the queue is full.
        retry_seconds: Seconds after which a request may succeed.
    """

    def __init__(self, message: str, is_full: bool = False, retry_seconds: int = 1) -> None:
        super().__init__(message)
        self.is_full, self.retry_seconds = is_full, retry_seconds


class ScoringFailed(Exception):
    """The model raised an error on a request's pairs, or gave a score that is not finite."""


def require_finite(model: Model) -> Model:
    """Score a pair, so that the first request does not wait for compilation and allocation; return the model.

    Raises:
        RankerError: The score is not finite.
    """
    if not np.isfinite(model.launch([Part(model.tokenize([("a", "b")]), 0, 1)])()).all():
        raise RankerError("checkpoint: expected finite scores, got NaN or infinity; look at the weights")
    return model
