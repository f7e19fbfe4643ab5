"""Statistics of code lengths: clustered errors, least detectable differences, tests, measures of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from ranker.evaluation.significance import holm, randomisation_test

POWER, LEVEL = 0.8, 0.05


def cluster_sums(values: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Return the sum of the values of each cluster.

    Args:
        values: [targets]
        clusters: Cluster of each value, [targets].

    Returns:
        float64 [clusters], in sorted order of the clusters.
    """
    _, indices = np.unique(clusters, return_inverse=True)
    return np.bincount(indices, weights=values.astype(np.float64))


def clustered_error(values: np.ndarray, clusters: np.ndarray) -> float:
    r"""Return the standard error of a sum over targets, clustered by query; NaN for fewer than two clusters.

    .. math:: \sqrt{\frac{Q}{Q-1} \sum_q (D_q - \bar D)^2}

    where :math:`D_q` is the sum of the values of cluster q, and Q is the number of clusters.

    Args:
        values: [targets]
        clusters: Query of each target, [targets].

    >>> clustered_error(np.array([1.0, 2.0, 3.0, 0.0]), np.array(["a", "a", "b", "c"]))  # sums 3, 3, 0
    3.0
    """
    sums = cluster_sums(values, clusters)
    if len(sums) < 2:
        return float("nan")
    return float(np.sqrt(len(sums) / (len(sums) - 1) * np.sum((sums - sums.mean()) ** 2)))


def detectable_by_queries(values: np.ndarray, clusters: np.ndarray) -> float:
    """Return the least true difference of two sums that a test at 5% finds with 80% power.

    For many queries, this is 2.80 clustered standard errors. For few queries, quantiles of Student's t replace 2.80.

    Args:
        values: Difference of each target, [targets].
        clusters: Query of each target, [targets].
    """
    queries = len(np.unique(clusters))
    return _quantiles(queries - 1) * clustered_error(values, clusters)


def detectable_by_seeds(lengths: Sequence[float]) -> float:
    """Return the least true difference of two means over seeds that a test at 5% finds with 80% power; NaN for 1 seed.

    For S seeds with standard deviation s, this is 2.80 s sqrt(2 / S). For few seeds, quantiles of Student's t replace
    2.80.

    >>> round(detectable_by_seeds([10.0, 11.0, 12.0]), 3)
    3.035
    """
    seeds = len(lengths)
    if seeds < 2:
        return float("nan")
    return float(_quantiles(2 * (seeds - 1)) * np.std(lengths, ddof=1) * np.sqrt(2 / seeds))


def _quantiles(freedom: int) -> float:
    """Return t(0.975) + t(0.8) of Student's t, which tends to z(0.975) + z(0.8) = 2.80 with many degrees of freedom."""
    if freedom < 1:
        return float("nan")
    return float(stats.t.ppf(1 - LEVEL / 2, freedom) + stats.t.ppf(POWER, freedom))


@dataclass(frozen=True)
class Difference:
    """Code length of A minus code length of B, in bits per target.

    Args:
        mean: Mean over targets.
        low: Lower end of the 95% bootstrap interval over queries.
        high: Upper end of the interval.
        detectable: Least detectable difference.
        p_value: p-value of the paired randomisation test over queries, not corrected for multiple comparisons.
    """

    mean: float
    low: float
    high: float
    detectable: float
    p_value: float

    @property
    def tied(self) -> bool:
        """Whether the absolute difference is at most the least detectable difference."""
        return not abs(self.mean) > self.detectable


def compare_bits(
    first: np.ndarray,
    second: np.ndarray,
    queries: np.ndarray,
    seed_lengths: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Difference:
    """Compare the code lengths of two runs on the same targets.

    The least detectable difference is computed over queries and, with several seeds, also over seeds; the larger value
    is used. Seeds are paired, because both runs have the same permutation and initial weights for a seed.

    Args:
        first: Bits of each target in run A, means over seeds [targets].
        second: Bits of each target in run B, means over seeds [targets].
        queries: Query of each target, [targets].
        seed_lengths: Bits per target of each seed, for run A and for run B.
    """
    values = first.astype(np.float64) - second
    targets = len(values)
    sums = cluster_sums(values, queries)
    sizes = cluster_sums(np.ones(targets), queries)
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(sums), (1000, len(sums)))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    detectable = detectable_by_queries(values, queries) / targets
    if seed_lengths is not None and len(seed_lengths[0]) > 1:
        paired = np.asarray(seed_lengths[0]) - np.asarray(seed_lengths[1])
        by_seeds = _quantiles(len(paired) - 1) * float(np.std(paired, ddof=1)) / np.sqrt(len(paired))
        detectable = float(np.nanmax([detectable, by_seeds]))
    low, high = np.quantile(means, [0.025, 0.975])
    return Difference(
        float(values.mean()), float(low), float(high), detectable, randomisation_test(sums, num_samples=5_000)
    )


def holm_by_layer(differences: Mapping[int, Difference]) -> dict[int, float]:
    """Return layer -> p-value after Holm's correction over the layers."""
    corrected = holm({str(layer): difference.p_value for layer, difference in differences.items()})
    return {layer: corrected[str(layer)] for layer in differences}


# layer measures
# --------------------------------------------------------------------------------------------------------------


def centre_of_gravity(compression: Mapping[int, float], control: Mapping[int, float]) -> float:
    """Return the mean layer; its weights are the compression above the control's. NaN if no layer exceeds the control.

    Args:
        compression: layer -> compression
        control: layer -> compression of the control; a missing layer counts 1.

    >>> centre_of_gravity({0: 1.0, 1: 2.0, 2: 4.0}, {0: 1.0, 1: 1.0, 2: 1.0})
    1.75
    """
    weights = {layer: max(0.0, value - control.get(layer, 1.0)) for layer, value in compression.items()}
    total = sum(weights.values())
    return sum(layer * weight for layer, weight in weights.items()) / total if total > 0 else float("nan")


def expected_layer(compression: Mapping[int, float]) -> float:
    """Return the expected layer at which the information appears (Tenney et al., ACL 2019, arXiv:1905.05950).

    The published measure scores probes that read all layers up to l. Here the score of l is the highest compression of
    a single layer up to l. NaN if no layer has a higher compression than layer 0.

    >>> expected_layer({0: 1.0, 1: 2.0, 2: 1.5, 3: 3.0})
    2.0
    """
    layers = sorted(compression)
    best = np.maximum.accumulate([compression[layer] for layer in layers])
    gains = np.diff(best)
    return float(np.dot(layers[1:], gains) / gains.sum()) if gains.sum() > 0 else float("nan")


def last_layer_drop(compression: Mapping[int, float]) -> float:
    """Return the share of the best layer's compression that is lost at the last layer.

    >>> last_layer_drop({0: 1.0, 1: 4.0, 2: 3.0})
    0.25
    """
    return 1 - compression[max(compression)] / max(compression.values())
