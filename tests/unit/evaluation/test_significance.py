"""Paired tests against values worked out by hand and against scipy."""

import numpy as np
import pytest
from scipy import stats

from ranker.evaluation.significance import holm, randomisation_test, t_test, wins_losses_ties


def test_randomisation_by_hand():
    assert randomisation_test(np.array([1.0, 1.0, 1.0, 1.0])) == 2 / 16  # all plus, all minus
    assert randomisation_test(np.array([1.0, -1.0])) == 1.0
    assert randomisation_test(np.array([3.0, 1.0, -1.0])) == 6 / 8  # sums -5 -3 -3 -1 1 3 3 5: six of |3| or more
    assert randomisation_test(np.array([0.3, -0.1])) == 1.0  # sums 0.2 0.4 -0.4 -0.2
    assert randomisation_test(np.array([0.5])) == 1.0
    assert randomisation_test(np.zeros(5)) == 1.0
    assert randomisation_test(np.array([])) == 1.0


def test_differences_of_zero_change_nothing():
    assert (
        randomisation_test(np.array([0.0, 0.1, 0.0, 0.2, 0.3])) == randomisation_test(np.array([0.1, 0.2, 0.3])) == 0.25
    )


def test_equal_sums_count_although_their_last_bits_differ():
    """Tenths 1 2 -3 4 sum to 4; of the 16 sums 10 8 6 4 4 2 2 0 and their mirrors, ten are 4 or further from 0."""
    differences = np.array([0.1, 0.2, -0.3, 0.4])
    assert randomisation_test(differences) == 10 / 16
    assert randomisation_test(differences[::-1]) == 10 / 16


@pytest.mark.parametrize("seed", range(5))
def test_exact_randomisation_equals_scipy(seed):
    generator = np.random.default_rng(seed)
    a, b = generator.normal(size=(2, 11))
    reference = stats.permutation_test(
        (a, b), lambda x, y: np.mean(x - y), permutation_type="samples", n_resamples=np.inf
    )
    assert randomisation_test(a - b) == pytest.approx(reference.pvalue, abs=1e-12)


@pytest.mark.parametrize("shift", [0.0, 0.15, 0.3])
def test_sampled_randomisation_is_near_the_exact_value(shift):
    """14 differences have 16,384 patterns, which scipy counts; 20,000 samples err by less than 0.015 (4 sigma)."""
    differences = np.random.default_rng(7).normal(shift, 0.4, size=14)
    reference = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=np.inf, vectorized=True
    )
    assert randomisation_test(differences) == pytest.approx(reference.pvalue, abs=0.015)


def test_sampled_p_value_is_never_zero_and_repeats_by_seed():
    differences = np.random.default_rng(1).normal(5.0, 0.1, size=200)
    assert randomisation_test(differences, num_samples=999) == 1 / 1000
    noise = np.random.default_rng(2).normal(0.05, 1.0, size=300)
    assert randomisation_test(noise, seed=3) == randomisation_test(noise, seed=3)
    assert randomisation_test(noise, seed=3) != randomisation_test(noise, seed=4)
    assert randomisation_test(noise) == randomisation_test(-noise)


def test_sampled_blocks_draw_all_samples(monkeypatch):
    noise = np.random.default_rng(2).normal(0.05, 1.0, size=40)
    monkeypatch.setattr("ranker.evaluation.significance._SIGNS_AT_ONCE", 400)  # 10 rows a block
    p_value = randomisation_test(noise, num_samples=1005)
    assert p_value * 1006 == pytest.approx(round(p_value * 1006), abs=1e-9)
    assert p_value == pytest.approx(t_test(noise), abs=0.06)


def test_p_values_are_uniform_where_nothing_differs():
    """Under the null hypothesis 5 % of the p-values lie below 0.05: 500 draws, 25 expected, 4 sigma = 19.5."""
    generator = np.random.default_rng(0)
    small = sum(randomisation_test(generator.normal(size=15), num_samples=499) <= 0.05 for _ in range(500))
    assert 6 <= small <= 44


def test_t_test_equals_scipy_and_hand():
    a, b = np.random.default_rng(0).normal(size=(2, 50))
    assert t_test(a - b) == pytest.approx(stats.ttest_rel(a, b).pvalue, abs=1e-14)
    assert t_test(np.array([1.0, 2.0, 3.0])) == pytest.approx(
        2 * stats.t.sf(2 * np.sqrt(3), df=2), abs=1e-12
    )  # mean 2, sd 1, n 3


def test_t_test_at_its_edges():
    assert t_test(np.zeros(4)) == 1.0
    assert t_test(np.array([0.3])) == 1.0
    assert t_test(np.full(4, 0.25)) == 0.0


def test_holm_by_hand():
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02}
    )
    assert holm({"a": 0.5, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    assert holm({"a": 0.02}) == {"a": 0.02}
    assert list(holm({"z": 0.9, "a": 0.1})) == ["z", "a"]


def test_wins_losses_ties():
    assert wins_losses_ties(np.array([0.5, -0.1, 0.0, 1e-15, -1e-15, 2.0])) == (2, 1, 3)
