"""Kendall's tau between the rankings for several orders of the candidates, with values computed by hand."""

import pytest

from ranker.evaluation.orders import order_sensitivity


def test_by_hand():
    runs = [
        {"a": {"x": 3.0, "y": 2.0, "z": 1.0}, "b": {"x": 2.0, "y": 1.0}, "c": {"x": 0.5}},
        {"a": {"x": 2.0, "y": 3.0, "z": 1.0}, "b": {"x": 2.0, "y": 1.0}, "c": {"x": 0.7}},  # one of a's 3 pairs swapped
        {"a": {"x": 1.0, "y": 2.0, "z": 3.0}, "b": {"x": 0.0, "y": 1.0}, "c": {"x": 0.1}},  # all pairs reversed
    ]
    # tau = 1 - 2 * swapped / pairs: a: 1/3, -1 and -1/3; b: 1, -1 and -1; c has no pair
    content = order_sensitivity(runs, {"a": {"x": 1}, "b": {"x": 1}}, ["RR"])
    assert content["orders"] == 3
    assert content["kendall_tau"] == {"mean": pytest.approx(-1 / 3), "lowest": pytest.approx(-1 / 3), "queries": 2}
    assert content["measures"]["RR"]["values"] == pytest.approx([1, 0.75, (1 / 3 + 1 / 2) / 2])
    assert order_sensitivity([{"c": {"x": 1.0}}] * 2, {}, ["RR"])["kendall_tau"]["mean"] is None
