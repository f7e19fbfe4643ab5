"""Calibrated probabilities: fits against scikit-learn's, errors on held-out queries, values by hand."""

import json

import numpy as np
import pytest
from scipy.special import expit
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from ranker.errors import CheckpointError, DataError
from ranker.evaluation.calibration import METHODS, Calibration, judged_pairs, quality, write_picture


def pairs(seed, count=4000):
    """Scores whose probability of relevance is sigmoid(2 score - 5)."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(1.5, 1.5, count)
    return scores, rng.random(count) < expit(2 * scores - 5)


@pytest.mark.parametrize("method", METHODS)
def test_the_error_falls_on_held_out_pairs(method):
    fitted = Calibration.fit(method, *pairs(0))
    scores, relevant = pairs(1)
    before, after = quality(expit(scores), relevant), quality(fitted(scores), relevant)
    assert after["nll"] < before["nll"] and after["brier"] < before["brier"]
    assert after["ece"] < (0.9 if method == "temperature" else 0.15) * before["ece"]  # no temperature moves the center
    assert (np.diff(fitted(np.sort(scores))) >= 0).all()


def test_platt_is_a_logistic_regression():
    scores, relevant = pairs(0)
    fitted = Calibration.fit("platt", scores, relevant)
    known = LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000).fit(scores[:, None], relevant)
    assert fitted.slope == pytest.approx(known.coef_[0, 0], rel=1e-3)
    assert fitted.offset == pytest.approx(known.intercept_[0], rel=1e-3)


def test_temperature_is_the_best_of_a_grid():
    scores, relevant = pairs(0)
    fitted = Calibration.fit("temperature", scores, relevant)
    losses = {slope: quality(expit(slope * scores), relevant)["nll"] for slope in np.linspace(0.001, 3, 3000)}
    assert fitted.slope == pytest.approx(min(losses, key=losses.get), abs=2e-3) and fitted.offset == 0


def test_isotonic_is_scikit_learn_s():
    scores, relevant = pairs(0, 500)
    scores = scores.round(1)  # with ties
    fitted = Calibration.fit("isotonic", scores, relevant)
    known = IsotonicRegression(out_of_bounds="clip").fit(scores, relevant)
    at = np.linspace(-4, 8, 300)
    np.testing.assert_allclose(fitted(at), known.predict(at), atol=1e-9)


def test_a_descending_score_gets_no_negative_slope():
    scores, relevant = pairs(0)
    assert Calibration.fit("platt", -scores, relevant).slope == pytest.approx(0, abs=1e-6)


def test_quality_by_hand():
    found = quality(np.array([0.1, 0.3, 0.8, 0.6]), np.array([False, True, True, False]), bins=2)
    assert found["ece"] == pytest.approx((2 * abs(0.2 - 0.5) + 2 * abs(0.7 - 0.5)) / 4)
    assert found["brier"] == pytest.approx((0.01 + 0.49 + 0.04 + 0.36) / 4)
    assert found["nll"] == pytest.approx(-np.log([0.9, 0.3, 0.8, 0.4]).mean())


def test_pairs_of_judged_queries():
    run = {"q": {"a": 2.0, "b": 1.0}, "unjudged": {"a": 3.0}}
    scores, relevant = judged_pairs(run, {"q": {"a": 2, "b": 1}}, relevance=2)
    assert scores.tolist() == [2.0, 1.0] and relevant.tolist() == [True, False]


def test_what_is_written_is_read(tmp_path):
    scores, relevant = pairs(0, 300)
    for method in METHODS:
        fitted = Calibration.fit(method, scores, relevant)
        (tmp_path / "c.json").write_text(json.dumps({"map": fitted.record()}))
        assert Calibration.read(tmp_path / "c.json")(scores).tolist() == fitted(scores).tolist()
    assert write_picture(tmp_path, {"before": expit(scores), "after": fitted(scores)}, relevant, "x").stat().st_size
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"expected calibration\.json of ranker calibrate"):
        Calibration.read(tmp_path / "c.json")
    with pytest.raises(DataError, match="expected relevant and other pairs, got 2 pairs, all not relevant"):
        Calibration.fit("platt", np.ones(2), np.zeros(2, bool))
