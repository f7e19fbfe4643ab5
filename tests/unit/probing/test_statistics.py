"""Errors, ties and layer summaries against simulation and hand-computed values."""

import numpy as np
import pytest

from ranker.probing.statistics import (
    Difference,
    centre_of_gravity,
    clustered_error,
    compare_bits,
    detectable_by_queries,
    detectable_by_seeds,
    expected_layer,
    holm_by_layer,
    last_layer_drop,
)


def test_clustered_error_is_the_spread_of_the_sum_when_queries_are_drawn_anew() -> None:
    rng = np.random.default_rng(0)
    queries = np.repeat(np.arange(60), 5)

    def draw() -> np.ndarray:
        return np.repeat(rng.normal(0, 1, 60), 5) + rng.normal(0, 0.5, 300)  # targets of a query go together

    spread = np.std([draw().sum() for _ in range(2000)])
    estimates = [clustered_error(draw(), queries) for _ in range(200)]
    assert np.mean(estimates) == pytest.approx(spread, rel=0.05)
    naive = np.std(draw()) * np.sqrt(300)
    assert naive < 0.6 * spread, "targets taken as independent, the error would be far too small"


def test_clustered_error_by_hand() -> None:
    assert clustered_error(np.array([1.0, 2.0, 3.0, 0.0]), np.array(["a", "a", "b", "c"])) == pytest.approx(3.0)
    assert np.isnan(clustered_error(np.array([1.0, 2.0]), np.array(["a", "a"])))


def test_least_detectable_difference() -> None:
    values, queries = np.random.default_rng(1).normal(size=2000), np.arange(2000)
    assert detectable_by_queries(values, queries) == pytest.approx(2.80 * clustered_error(values, queries), rel=2e-3)
    # 3 seeds: t(0.975, 4) + t(0.8, 4) = 2.7764 + 0.9410, s = 1, sqrt(2/3)
    assert detectable_by_seeds([10, 11, 12]) == pytest.approx((2.7764 + 0.9410) * (2 / 3) ** 0.5, abs=1e-3)
    assert detectable_by_seeds(np.random.default_rng(0).normal(size=500)) == pytest.approx(
        2.80 * (2 / 500) ** 0.5, rel=0.1
    )
    assert np.isnan(detectable_by_seeds([10]))


def test_a_difference_at_the_limit_is_found_in_about_80_percent() -> None:
    rng = np.random.default_rng(2)
    queries = np.repeat(np.arange(50), 4)
    noise = lambda: np.repeat(rng.normal(0, 1, 50), 4)  # noqa: E731
    limit = np.mean([detectable_by_queries(noise(), queries) for _ in range(100)]) / 200
    found = [compare_bits(noise() + limit, np.zeros(200), queries).p_value < 0.05 for _ in range(150)]
    assert 0.68 < np.mean(found) < 0.92


def test_compared_bits() -> None:
    rng = np.random.default_rng(3)
    queries = np.repeat(np.arange(40), 3)
    first = rng.gamma(2, 1, 120)
    noise = 0.5 + rng.normal(0, 0.1, 120)
    shifted = compare_bits(first + noise, first, queries)
    assert shifted.mean == pytest.approx(0.5, abs=0.03)
    assert shifted.low < shifted.mean < shifted.high
    assert shifted.high - shifted.low < 0.1
    assert not shifted.tied
    assert shifted.p_value < 0.001
    same = compare_bits(first + rng.normal(0, 0.1, 120), first, queries)
    assert same.tied
    assert same.p_value > 0.05
    noisy = compare_bits(first + 0.5, first, queries, ([1.0, 3.0, 2.0], [1.5, 0.5, 1.0]))
    assert noisy.tied, "seeds differ more than queries"
    # t(0.975) + t(0.8) of 39 degrees of freedom, times the spread of 40 queries' sums; of 2 degrees, times 1.5 /
    # sqrt(3) over seeds
    by_query = [sum(noise[3 * query : 3 * query + 3]) for query in range(40)]
    assert shifted.detectable == pytest.approx(
        (2.02269 + 0.85112) * np.sqrt(40) * np.std(by_query, ddof=1) / 120, rel=1e-4
    )
    assert compare_bits(first + 0.5, first, queries).detectable == pytest.approx(0, abs=1e-9)
    assert noisy.detectable == pytest.approx((4.30265 + 1.06066) * 1.5 / np.sqrt(3), rel=1e-4)


def test_holm_over_layers() -> None:
    differences = {layer: Difference(1.0, 0.5, 1.5, 0.1, p) for layer, p in enumerate((0.01, 0.04, 0.03))}
    assert holm_by_layer(differences) == pytest.approx({0: 0.03, 1: 0.06, 2: 0.06})


def test_layer_summaries() -> None:
    compression = {0: 1.2, 1: 2.0, 2: 3.0, 3: 2.4}
    prior = dict.fromkeys(compression, 1.2)
    assert centre_of_gravity(compression, prior) == pytest.approx((0.8 * 1 + 1.8 * 2 + 1.2 * 3) / 3.8)
    assert np.isnan(centre_of_gravity({0: 1.0, 1: 0.9}, {0: 1.2, 1: 1.2}))
    assert expected_layer(compression) == pytest.approx((0.8 * 1 + 1.0 * 2) / 1.8)
    assert np.isnan(expected_layer({0: 2.0, 1: 1.0}))
    assert last_layer_drop(compression) == pytest.approx(0.2)
