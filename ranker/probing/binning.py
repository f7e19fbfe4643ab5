"""Turn numbers into classes: k bins with exactly k - 1 inner edges, which are fitted to the training part only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ranker.errors import ConfigError

METHODS = ("mean2std", "minmax", "quantile")


@dataclass(frozen=True)
class Bins:
    """Bins with their inner edges. A value on an edge belongs to the bin above it.

    Args:
        method: Method that set the edges, one of `METHODS`.
        edges: Inner edges in rising order, float64 [k - 1].
        mean: Mean of the training values.
        std: Population standard deviation of the training values.
    """

    method: str
    edges: np.ndarray
    mean: float
    std: float

    @property
    def num_bins(self) -> int:
        """Number of classes k."""
        return len(self.edges) + 1

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Return the bin of each value, int64."""
        return np.searchsorted(self.edges, values, side="right").astype(np.int64)

    def record(self) -> dict[str, Any]:
        """Return the bins as JSON values, for the record of the data."""
        return {"method": self.method, "edges": self.edges.tolist(), "mean": self.mean, "std": self.std}


def fit_bins(values: np.ndarray, num_bins: int = 10, method: str = "mean2std") -> Bins:
    """Fit the edges to the training values.

    `mean2std` splits the range from mean - 2 std to mean + 2 std into equal bins; values outside this range belong to
    the first or last bin. `minmax` splits the whole range into equal bins, so that outliers make the other bins coarse.
    `quantile` gives bins with about the same number of values, and fewer than `num_bins` bins if many values are equal.

    Args:
        values: Training values, float64 [targets].
        num_bins: Number of classes k.
        method: `mean2std`, `minmax` or `quantile`.

    Raises:
        ConfigError: An unknown method or fewer than two bins.

    >>> fit_bins(np.array([0.0, 1.0]), num_bins=4, method="minmax")(np.array([-1, 0.2, 0.25, 0.9, 7])).tolist()
    [0, 0, 1, 3, 3]
    """
    if method not in METHODS:
        raise ConfigError(f"binning: expected one of {', '.join(METHODS)}; got {method!r}")
    if num_bins < 2:
        raise ConfigError(f"bins: expected at least 2, got {num_bins}")
    mean, std = float(np.mean(values)), float(np.std(values))
    inner = np.arange(1, num_bins) / num_bins
    if method == "mean2std":
        edges = mean + 4 * std * (inner - 0.5)
    elif method == "minmax":
        low, high = float(np.min(values)), float(np.max(values))
        edges = low + (high - low) * inner
    else:
        edges = np.quantile(values, inner)
    edges = np.unique(edges)
    if method == "quantile":
        edges = edges[edges > np.min(values)]  # the bin below such an edge would be empty
    if std == 0:
        edges = edges[:0]
    return Bins(method, edges, mean, std)
