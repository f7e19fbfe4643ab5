"""Scale teachers' scores query by query, take their mean, and choose docs at the quantiles of the scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranker.data.ragged import ranges
from ranker.errors import ConfigError

SCALINGS = ("none", "zscore", "minmax")


def scaled(scores: np.ndarray, offsets: np.ndarray, scaling: str) -> np.ndarray:
    """Scale the scores of each query.

    `zscore` subtracts the mean and divides by the standard deviation (of the population, ddof 0); `minmax` subtracts
    the smallest and divides by the range. If all scores of a query are equal, the result is 0.

    Args:
        scores: [pairs].
        offsets: Query i has the pairs `offsets[i]` to `offsets[i + 1]`, at least one; integers [queries + 1].
        scaling: `none`, `zscore` or `minmax`.

    Returns:
        float64 [pairs].

    Raises:
        ConfigError: An unknown scaling.

    >>> scaled(np.array([1.0, 3.0, 5.0, 5.0]), np.array([0, 2, 4]), "zscore").tolist()
    [-1.0, 1.0, 0.0, 0.0]
    >>> scaled(np.array([1.0, 3.0, 2.0]), np.array([0, 3]), "minmax").tolist()
    [0.0, 1.0, 0.5]
    """
    if scaling not in SCALINGS:
        raise ConfigError(f"scale: expected one of {', '.join(SCALINGS)}, got {scaling!r}")
    values, sizes = scores.astype(np.float64), np.diff(offsets)
    if scaling == "none" or not len(values):
        return values
    starts = offsets[:-1]
    if scaling == "zscore":
        centred = values - np.repeat(np.add.reduceat(values, starts) / sizes, sizes)
        width = np.sqrt(np.add.reduceat(centred**2, starts) / sizes)
    else:
        lowest = np.minimum.reduceat(values, starts)
        centred, width = values - np.repeat(lowest, sizes), np.maximum.reduceat(values, starts) - lowest
    equal = np.maximum.reduceat(values, starts) == np.minimum.reduceat(
        values, starts
    )  # equal scores may have a deviation slightly above 0 by rounding
    return np.where(np.repeat(equal, sizes), 0.0, centred / np.repeat(np.where(equal, 1.0, width), sizes))


def mean_of_teachers(teachers: Sequence[np.ndarray], offsets: np.ndarray, scaling: str) -> np.ndarray:
    """Return the mean over teachers of their scaled scores, float64 [pairs]; for the arguments see `scaled`."""
    return np.mean([scaled(scores, offsets, scaling) for scores in teachers], axis=0)


def at_quantiles(scores: np.ndarray, offsets: np.ndarray, always: np.ndarray, count: int) -> np.ndarray:
    """Choose docs whose scores cover the whole range of a teacher's scores, not only the best docs.

    A query keeps its docs of `always` and m other docs, `count` docs in all. The m docs are at the quantiles 0, 1/(m -
    1), ..., 1 of the other docs' scores, with rounded ranks. Source of docs at the quantiles of a teacher's scores:
    "Beyond Hard Negatives", arXiv:2604.04734, 2026.

    Args:
        scores: A teacher's scores [pairs].
        offsets: See `scaled`.
        always: Docs that are kept in any case, bool [pairs].
        count: Docs per query.

    Returns:
        Which docs are kept, bool [pairs].

    >>> at_quantiles(np.array([9.0, 8.0, 7.0, 6.0, 5.0, 1.0]), np.array([0, 6]), np.arange(6) == 5, 4).tolist()
    [True, False, True, False, True, True]
    """
    kept = always.copy()
    order = np.lexsort((-scores, np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))))
    order = order[~always[order]]  # the docs that are not in `always`, by query, best first
    query_of = np.searchsorted(offsets, order, side="right") - 1
    others = np.bincount(query_of, minlength=len(offsets) - 1)
    wanted = np.clip(count - (np.diff(offsets) - others), 0, others)
    # chosen doc j of m has the rank j (n - 1) / (m - 1), rounded, among n docs; for m = 1 the best doc is chosen
    steps = np.repeat((others - 1) / np.maximum(wanted - 1, 1), wanted)
    ranks = np.rint(ranges(0, wanted) * steps).astype(np.int64)
    first = np.cumsum(others) - others
    kept[order[np.repeat(first, wanted) + ranks]] = True
    return kept
