"""Numbers to classes."""

import numpy as np
import pytest

from ranker.errors import ConfigError
from ranker.probing.binning import METHODS, fit_bins


@pytest.mark.parametrize("method", METHODS)
def test_every_bin_is_reachable(method: str) -> None:
    values = np.random.default_rng(0).normal(3, 2, 5_000)
    bins = fit_bins(values, 10, method)
    assert bins.num_bins == 10
    assert sorted(set(bins(values))) == list(range(10))


def test_scaled_values_fall_into_ten_bins_not_nine() -> None:
    """The published edges 1/9, 2/9, ..., 1 leave bin 9 empty; k bins have k - 1 inner edges."""
    scaled = np.array([0, 0.05, 0.2, 0.5, 0.95, 1])
    assert np.digitize(scaled, np.arange(1, 10) / 9, right=True).tolist() == [0, 0, 1, 4, 8, 8]
    bins = fit_bins(scaled, 10, "minmax")
    assert bins(scaled).tolist() == [0, 0, 2, 5, 9, 9]


def test_mean2std_is_the_clipped_scale() -> None:
    rng = np.random.default_rng(1)
    values = rng.gamma(2, 3, 2_000)
    bins = fit_bins(values, 10)
    probe = rng.gamma(2, 3, 500)
    z = np.clip(0.25 * (probe - values.mean()) / values.std() + 0.5, 0, 1)
    assert bins(probe).tolist() == np.minimum(np.floor(z * 10), 9).astype(int).tolist()
    assert (bins.mean, bins.std) == (values.mean(), values.std())


def test_a_value_on_an_edge_belongs_to_the_bin_above() -> None:
    bins = fit_bins(np.array([0.0, 1.0]), 4, "minmax")
    assert bins.edges.tolist() == [0.25, 0.5, 0.75]
    assert bins(np.array([0.25, 0.5, 0.75, 0.2499999])).tolist() == [1, 2, 3, 0]


def test_outliers_squeeze_minmax_but_not_mean2std() -> None:
    values = np.append(np.random.default_rng(2).normal(0, 1, 1000), 1e3)
    assert len(set(fit_bins(values, 10, "minmax")(values))) == 2
    assert fit_bins(values, 10, "quantile")(values).max() == 9


def test_quantiles_of_many_equal_values_give_fewer_bins_all_reachable() -> None:
    values = np.array([0.0] * 90 + list(range(1, 11)))
    bins = fit_bins(values, 10, "quantile")
    assert set(bins(values)) == set(range(bins.num_bins))


def test_faults() -> None:
    with pytest.raises(ConfigError, match="binning: expected one of"):
        fit_bins(np.arange(3.0), 10, "deciles")
    with pytest.raises(ConfigError, match="bins: expected at least 2"):
        fit_bins(np.arange(3.0), 1)
    assert fit_bins(np.ones(5), 10).num_bins == 1, "equal values are one class, which the data builder refuses"
