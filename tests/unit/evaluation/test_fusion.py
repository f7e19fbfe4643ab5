"""Fused scores computed by hand, and tuned weights against a plain loop over ir_measures."""

import ir_measures
import numpy as np
import pytest

from ranker.data.ranking import separate_ties
from ranker.errors import ConfigError
from ranker.evaluation.fusion import Fusion, fuse, simplex, tune

A = {"q1": {"a": 12.0, "b": 8.0, "c": 4.0}, "q2": {"x": 1.0, "y": 1.0}}
B = {"q1": {"c": 0.9, "d": 0.5, "a": 0.1}, "q3": {"z": 0.2}}


def test_reciprocal_ranks_by_hand():
    """q1: a has ranks 1 and 3, b 2, c 3 and 1, d 2. x and y tie, and the larger id comes first."""
    fused = fuse([A, B], Fusion("rrf", k=60), [1.0, 1.0])
    assert fused["q1"] == pytest.approx(
        {"a": 1 / 61 + 1 / 63, "c": 1 / 63 + 1 / 61, "b": 1 / 62, "d": 1 / 62}, abs=1e-15
    )
    assert list(fused["q1"]) == ["c", "a", "d", "b"]
    assert fused["q2"] == {"y": 1 / 61, "x": 1 / 62}
    assert fused["q3"] == {"z": 1 / 61}
    assert list(fused) == ["q1", "q2", "q3"]
    weighted = fuse([A, B], Fusion("rrf", k=0), [0.5, 2.0], depth=2)
    assert weighted == {
        "q1": pytest.approx({"c": 0.5 / 3 + 2, "a": 0.5 + 2 / 3}),
        "q2": {"y": 0.5, "x": 0.25},
        "q3": {"z": 2.0},
    }


def test_weighted_scores_by_hand():
    """Minmax: A gives a 1, b 0.5, c 0 and, as its lowest, d 0; B gives c 1, d 0.5, a 0, b 0. Equal scores become 0."""
    fused = fuse([A, B], Fusion("weighted", scaling="minmax"), [0.7, 0.3])
    assert fused["q1"] == pytest.approx({"a": 0.7, "b": 0.35, "c": 0.3, "d": 0.15})
    assert fused["q2"] == {"y": 0.0, "x": 0.0} and fused["q3"] == {"z": 0.0}
    plain = fuse([A, B], Fusion("weighted", scaling="none"), [1.0, 10.0])
    assert plain["q1"] == pytest.approx({"a": 12 + 1, "b": 8 + 1, "c": 4 + 9, "d": 4 + 5})
    # population deviations: A 4 sqrt(2/3), B sqrt(0.32 / 3); b lies at A's mean, d at B's mean 0.5
    deviations = 4 * (2 / 3) ** 0.5, (0.32 / 3) ** 0.5
    scaled = fuse([A, B], Fusion("weighted", scaling="zscore"), [1.0, 1.0])
    assert scaled["q1"] == pytest.approx(
        {
            "a": 4 / deviations[0] - 0.4 / deviations[1],
            "b": 0 - 0.4 / deviations[1],
            "c": -4 / deviations[0] + 0.4 / deviations[1],
            "d": -4 / deviations[0] + 0,
        }
    )


def test_the_order_of_the_runs_changes_nothing():
    generator = np.random.default_rng(0)
    runs = [{"q": {f"d{i}": float(generator.random()) for i in generator.permutation(40)[:30]}} for _ in range(3)]
    for fusion in (Fusion("rrf"), Fusion("weighted")):
        weights = [0.2, 0.5, 0.3]
        assert fuse(runs, fusion, weights) == fuse(runs[::-1], fusion, weights[::-1])


def test_weights_of_a_simplex():
    assert simplex(3, 0.5) == [(0, 0, 1), (0, 0.5, 0.5), (0, 1, 0), (0.5, 0, 0.5), (0.5, 0.5, 0), (1, 0, 0)]
    assert len(simplex(3, 0.1)) == 66
    with pytest.raises(ConfigError, match="expected a step that divides 1"):
        simplex(2, 0.3)
    with pytest.raises(ConfigError, match="expected at most 2000 combinations of weights, got 92378 for 10 runs"):
        simplex(10, 0.1)


@pytest.mark.parametrize("method", ["rrf", "weighted"])
def test_tuned_weights_are_those_of_a_plain_loop(method):
    """The signal of the first run is stronger, so it deserves more weight; the loop measures with ir_measures alone."""
    generator = np.random.default_rng(3)
    qrels = {f"q{i}": {f"d{j}": int(generator.random() < 0.2) for j in range(20)} | {"d0": 1} for i in range(30)}
    runs = [
        {q: {d: strength * grade + float(generator.normal()) for d, grade in docs.items()} for q, docs in qrels.items()}
        for strength in (1.5, 0.7)
    ]
    unjudged = [run | {"other": {"d0": 1.0}} for run in runs]
    fusion = Fusion(method)
    weights, trials = tune(unjudged, fusion, qrels, "nDCG@10", step=0.25)
    measure = ir_measures.parse_measure("nDCG@10")
    expected = {}
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        fused = separate_ties(fuse(runs, fusion, [share, 1 - share]))  # as in the written run
        expected[share] = ir_measures.calc_aggregate([measure], qrels, fused)[measure]
    assert [trial["value"] for trial in trials] == pytest.approx(list(expected.values()), abs=1e-12)
    best = max(expected, key=expected.get)
    assert weights == [best, 1 - best] and 0 < best < 1


def test_equally_good_weights_stay_equal():
    run = {"q": {"a": 2.0, "b": 1.0}}
    weights, trials = tune([run, run], Fusion(), {"q": {"a": 1}}, "RR@10", step=0.1)
    assert weights == [0.5, 0.5] and {trial["value"] for trial in trials} == {1.0}
