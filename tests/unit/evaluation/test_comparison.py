"""Several runs: tests of all pairs against the tests of one pair, their correction by hand, overlap by hand."""

import numpy as np
import pytest
from scipy import stats

from ranker.evaluation.comparison import compare_pairs, overlap
from ranker.evaluation.metrics import evaluate
from ranker.evaluation.significance import randomisation_test

MEASURES = ["RR", "R@1"]


def test_all_pairs_and_their_correction():
    """Holm's correction, written as a loop: the i-th smallest of m p-values times m - i, and never below the last."""
    generator = np.random.default_rng(1)
    qrels = {f"q{i}": {"a": 1} for i in range(30)}
    runs = {
        name: {q: {"a": shift + float(generator.normal()), "b": 0.0, "c": float(generator.normal())} for q in qrels}
        for name, shift in (("weak", -1.0), ("middle", 0.2), ("strong", 1.5))
    }
    evaluations = {name: evaluate(run, qrels, MEASURES) for name, run in runs.items()}
    found = compare_pairs(evaluations)
    pairs = [("middle", "weak"), ("strong", "weak"), ("strong", "middle")]
    assert [(entry["measure"], entry["run"], entry["baseline"]) for entry in found] == [
        (measure, *pair) for measure in MEASURES for pair in pairs
    ]
    for entry in found:
        after, before = (
            np.array([row[entry["measure"]] for row in evaluations[entry[key]].per_query.values()])
            for key in ("run", "baseline")
        )
        assert entry["delta"] == pytest.approx(after.mean() - before.mean())
        assert entry["p_value"] == randomisation_test(after - before)
        assert entry["p_value_t"] == pytest.approx(stats.ttest_rel(after, before).pvalue)
        assert entry["wins"] == (after > before).sum() and entry["losses"] == (after < before).sum()
    ordered = sorted(found, key=lambda entry: entry["p_value"])
    lowest = 0.0
    for place, entry in enumerate(ordered):
        lowest = max(lowest, min(1.0, entry["p_value"] * (6 - place)))
        assert entry["p_value_holm"] == lowest


def test_overlap_by_hand():
    """q1: b of a b and b d; q2: both of two, where one run has no third; q3 is in one run only; q4 is in neither."""
    one = {"q1": {"a": 3.0, "b": 2.0, "c": 1.0}, "q2": {"x": 2.0, "y": 1.0}, "q3": {"z": 1.0}, "q4": {}}
    other = {"q1": {"b": 9.0, "d": 8.0, "a": 7.0}, "q2": {"y": 5.0, "x": 4.0, "w": 3.0}}
    assert overlap(one, other, 2) == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert overlap(one, other, 3) == pytest.approx((2 / 3 + 2 / 3 + 0) / 3)
    assert overlap(one, one, 2) == 1.0 and overlap({}, {}, 2) == 0.0
