import pytest

from ranker.losses.hinge import Hinge


def test_value_by_hand(value):
    # Group 1, labels 2 > 1 > 0: gaps 1 - 0.5 = 0.5, 1 - 2 = -1, 0.5 - 2 = -1.5 lack 0.5, 2, 2.5 of the margin: mean 5 /
    # 3. Group 2: gap 3 lacks nothing: 0. Group 3: no ordered pair: 0, but it counts. Mean over groups: 5 / 9 =
    # 0.555556.
    scores, labels = [[1.0, 0.5, 2.0], [3.0, 0.0], [1.0, 2.0]], [[2, 1, 0], [1, 0], [1, 1]]
    assert value(Hinge(), scores, labels) == pytest.approx(0.555556, abs=1e-6)
    # Margin 4: lacks 3.5, 5, 5.5 (mean 14 / 3), 1 and 0: (14 / 3 + 1) / 3 = 1.888889.
    assert value(Hinge(margin=4.0), scores, labels) == pytest.approx(1.888889, abs=1e-6)


def test_same_as_loop(same_as_loop):
    def group_value(scores, labels):
        lacks = [
            max(0.0, 1.5 - (scores[i] - scores[j]))
            for i in range(len(scores))
            for j in range(len(scores))
            if labels[i] > labels[j]
        ]
        return sum(lacks) / len(lacks) if lacks else 0.0

    same_as_loop(Hinge(margin=1.5), group_value)
