import pytest

from ranker.losses.mse import MSE


def test_value_by_hand(value):
    # Group 1: (1 - 3)^2 = 4, (0.5 + 2)^2 = 6.25, (0 - 0)^2 = 0: 10.25 / 3 = 3.416667. Group 2, one doc: (2 - 5)^2 = 9.
    # Mean over groups: 6.208333; a mean over all docs would be 19.25 / 4 = 4.8125.
    assert value(MSE(), [[1.0, 0.5, 0.0], [2.0]], [[3.0, -2.0, 0.0], [5.0]]) == pytest.approx(6.208333, abs=1e-6)


def test_same_as_loop(same_as_loop):
    def group_value(scores, labels):
        errors = [(score - label) ** 2 for score, label in zip(scores, labels, strict=True)]
        return sum(errors) / len(errors) if errors else 0.0

    same_as_loop(MSE(), group_value, grades=(-3.2, 0.1, 1.7, 4.4))
