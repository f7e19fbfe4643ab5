"""Seconds that the parts of a search take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stages:
    """Adds up seconds by the name of a part."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the duration of the block to that part; a GPU's work counts where its result is read."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Return the seconds of all parts since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds
