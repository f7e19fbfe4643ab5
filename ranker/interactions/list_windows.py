"""Score long lists in windows (overlapping parts of a list), and merge the scores of the windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ranker.errors import ConfigError

MERGES = ("mean", "sliding")
Part = tuple[int, np.ndarray]  # index of a list in the batch, and indices of some of its docs in the list
ScoreParts = Callable[[Sequence[Part]], list[np.ndarray]]


@dataclass(frozen=True)
class ListWindows:
    """How a model reads a long list at inference: it is divided into windows, whose docs are read together.

    Args:
        size: Number of docs of a window. A list of at most this length is read whole. None: all lists are read whole.
        stride: Number of docs between the starts of two windows; None: half of `size`.
        merge: How a doc gets one score. `mean`: its mean score over all windows that contain it. `sliding`: windows
            are read one after another, from the end of the list to its start. Each window is sorted by its scores
            before the next is read, so its best docs are also in the next window (Sun et al., 2023, arXiv:2304.09542).

    Raises:
        ConfigError: A value is out of range.
    """

    size: int | None = None
    stride: int | None = None
    merge: str = "mean"

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 2:
            raise ConfigError(f"window: expected at least 2 docs, or null; got {self.size}")
        if self.stride is not None and (self.size is None or not 1 <= self.stride <= self.size):
            raise ConfigError(f"stride: expected 1 to window={self.size} docs, or null; got {self.stride}")
        if self.merge not in MERGES:
            raise ConfigError(f"merge: expected one of {', '.join(MERGES)}; got {self.merge!r}")

    @property
    def step(self) -> int:
        """Number of docs between the starts of two windows."""
        assert self.size is not None
        return self.stride or max(1, self.size // 2)

    def are_whole(self, docs: int) -> bool:
        """Return whether a list of `docs` docs is read whole."""
        return self.size is None or docs <= self.size

    def windows(self, docs: int) -> list[np.ndarray]:
        """Return the windows of a list, from its start to its end. The last window is moved back so that it is full.

        >>> [window.tolist() for window in ListWindows(4, 2).windows(7)]
        [[0, 1, 2, 3], [2, 3, 4, 5], [3, 4, 5, 6]]
        """
        if self.are_whole(docs):
            return [np.arange(docs)]
        assert self.size is not None
        starts = [*range(0, docs - self.size, self.step), docs - self.size]
        return [np.arange(start, start + self.size) for start in starts]


def score_lists(counts: Sequence[int], windows: ListWindows, score: ScoreParts) -> list[np.ndarray]:
    """Return the scores of the docs of each list, each [docs].

    With `merge=sliding`, a list of n docs that is longer than a window gets scores by rank: the first doc of the final
    order gets n, the second n - 1, and the last 1.

    Args:
        counts: Number of docs of each list.
        windows: How lists are divided.
        score: Function that returns the scores of each part (a whole list or a window), [docs of the part].
    """
    whole = [number for number, docs in enumerate(counts) if windows.are_whole(docs)]
    scores: dict[int, np.ndarray] = {}
    if whole:
        scores |= zip(whole, score([(number, np.arange(counts[number])) for number in whole]), strict=True)
    longer = [number for number in range(len(counts)) if number not in scores]
    if longer:
        merge = _mean if windows.merge == "mean" else _sliding
        scores |= merge({number: counts[number] for number in longer}, windows, score)
    return [scores[number] for number in range(len(counts))]


def _mean(counts: dict[int, int], windows: ListWindows, score: ScoreParts) -> dict[int, np.ndarray]:
    parts = [(number, places) for number, docs in counts.items() for places in windows.windows(docs)]
    sums = {number: np.zeros((2, docs)) for number, docs in counts.items()}
    for (number, places), values in zip(parts, score(parts), strict=True):
        sums[number][0, places] += values
        sums[number][1, places] += 1
    return {number: total / seen for number, (total, seen) in sums.items()}


def _sliding(counts: dict[int, int], windows: ListWindows, score: ScoreParts) -> dict[int, np.ndarray]:
    assert windows.size is not None
    orders = {number: np.arange(docs) for number, docs in counts.items()}
    starts = {number: docs - windows.size for number, docs in counts.items()}
    while starts:
        parts = [(number, orders[number][start : start + windows.size]) for number, start in starts.items()]
        for (number, places), values in zip(parts, score(parts), strict=True):
            start = starts[number]
            orders[number][start : start + windows.size] = places[np.argsort(-values, kind="stable")]
        starts = {number: max(0, start - windows.step) for number, start in starts.items() if start}
    scores = {}
    for number, order in orders.items():
        scores[number] = np.empty(len(order))
        scores[number][order] = np.arange(len(order), 0, -1)
    return scores
