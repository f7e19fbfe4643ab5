"""Test two runs on the same queries: randomisation test, t-test, Holm's correction, wins and losses."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np

_EXACT_QUERIES = 12  # up to 12 queries, all sign patterns are counted: 2 ** 12 is less than the default num_samples
_SIGNS_AT_ONCE = 1 << 22


def randomisation_test(differences: np.ndarray, num_samples: int = 20_000, seed: int = 0) -> float:
    """Return the two-sided p-value of Fisher's paired randomisation test.

    The p-value is the share of random sign patterns whose mean is at least as far from 0 as the observed mean. With up
    to 12 nonzero differences, all patterns are counted. With more differences, m = `num_samples` patterns are drawn.
    Let b be the number of drawn patterns whose mean is at least as far from 0. The observed pattern is added:
    p = (b + 1) / (m + 1), so p is never 0 (Smucker, Allan and Carterette, CIKM 2007).

    Args:
        differences: Run minus baseline, float64 [queries].
        num_samples: Sign patterns to draw.
        seed: Seed of the draw; the same seed gives the same p-value.

    >>> randomisation_test(np.array([0.1, 0.2, 0.3]))  # 2 of 8 patterns: all plus, all minus
    0.25
    """
    changed = differences[differences != 0]  # the sign of 0 changes nothing
    if len(changed) == 0:
        return 1.0
    observed = abs(changed.sum()) - 1e-12 * np.abs(changed).sum()  # equal sums may differ in the last bits
    if len(changed) <= _EXACT_QUERIES:
        patterns = np.arange(2 ** len(changed))[:, None] >> np.arange(len(changed)) & 1
        return float(np.mean(np.abs((1.0 - 2.0 * patterns) @ changed) >= observed))
    generator = np.random.default_rng(seed)
    at_least, left = 0, num_samples
    while left:
        rows = min(left, max(1, _SIGNS_AT_ONCE // len(changed)))
        negative = np.unpackbits(
            generator.integers(0, 256, (rows, -(-len(changed) // 8)), np.uint8), axis=1, count=len(changed)
        )
        sums = changed.sum() - 2.0 * (negative @ changed)
        at_least += int(np.count_nonzero(np.abs(sums) >= observed))
        left -= rows
    return (at_least + 1) / (num_samples + 1)


def t_test(differences: np.ndarray) -> float:
    """Return the two-sided p-value of the paired t-test; 1 for a single query, or if no query differs.

    Args:
        differences: Run minus baseline, float64 [queries].

    >>> round(t_test(np.array([1.0, 2.0, 3.0])), 6)
    0.07418
    """
    if len(differences) < 2 or not differences.any():
        return 1.0
    from scipy import stats  # imported here, because the import takes a second

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # if all differences are equal, t is infinite and p is 0
        return float(stats.ttest_1samp(differences, 0.0).pvalue)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Apply Holm's step-down correction (1979) over measures, which controls the family-wise error rate.

    >>> holm({"AP": 0.01, "RR": 0.04, "P@10": 0.03})
    {'AP': 0.03, 'RR': 0.06, 'P@10': 0.06}
    """
    corrected: dict[str, float] = {}
    lowest = 0.0
    for i, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        lowest = max(lowest, min(1.0, (len(p_values) - i) * p_values[name]))
        corrected[name] = lowest
    return {name: corrected[name] for name in p_values}


def wins_losses_ties(differences: np.ndarray) -> tuple[int, int, int]:
    """Return the numbers of queries on which the run is better, worse, and equal (up to 1e-12).

    Args:
        differences: Run minus baseline, float64 [queries].

    >>> wins_losses_ties(np.array([0.5, -0.1, 0.0, 0.2]))
    (2, 1, 1)
    """
    wins, losses = int(np.count_nonzero(differences > 1e-12)), int(np.count_nonzero(differences < -1e-12))
    return wins, losses, len(differences) - wins - losses


def p_text(value: float) -> str:
    """Return a p-value as tables show it.

    >>> p_text(0.0004), p_text(0.02)
    ('<0.001', '0.020')
    """
    return "<0.001" if value < 0.001 else f"{value:.3f}"
