from math import exp, log

import pytest

from ranker.losses.listmle import ListMLE


def test_value_by_hand(value):
    # Order by label: scores 0, 2, 1. First choice: ln(1 + e^2 + e^1) - 0 = 2.407606; second: ln(e^2 + e^1) - 2 =
    # 0.313262; the last is certain. Sum 2.720868. The second group has equal labels: 0. Mean 1.360434.
    assert value(ListMLE(), [[2.0, 0.0, 1.0], [3.0, 1.0]], [[1.5, 8.0, -1.0], [2.0, 2.0]]) == pytest.approx(
        1.360434, abs=1e-6
    )


def test_ties_share_their_denominator(value):
    # Labels 1, 1, 0 with scores 1, 0, 0: denominator e + 2 for both: 2 ln(4.718282) - 1 = 2.102889.
    assert value(ListMLE(), [[1.0, 0.0, 0.0]], [[1.0, 1.0, 0.0]]) == pytest.approx(2.102889, abs=1e-6)


def test_same_as_loop_over_distinct_labels(value):
    # the definition of Xia et al.: docs sorted by label, each against itself and those behind it
    scores, labels = [0.3, -1.2, 2.0, 0.1, 0.9], [3.0, 9.0, -1.0, 2.5, 0.0]
    ordered = [score for _, score in sorted(zip(labels, scores, strict=True), reverse=True)]
    expected = sum(log(sum(exp(other) for other in ordered[i:])) - ordered[i] for i in range(5))
    assert value(ListMLE(), [scores], [labels]) == pytest.approx(expected, rel=1e-6)


def test_same_as_loop(same_as_loop):
    def group_value(scores, labels):
        pairs = list(zip(scores, labels, strict=True))
        return sum(
            log(sum(exp(other) for other, below in pairs if below <= label)) - score
            for score, label in pairs
            if label > min(labels)
        )

    same_as_loop(ListMLE(), group_value)
