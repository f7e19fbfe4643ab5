import pytest

from ranker.errors import ConfigError
from ranker.losses.margin_mse import MarginMSE

TEACHER = (-3.2, 0.1, 0.1, 1.7, 4.4, 9.0)


def test_value_by_hand(value):
    # Group 1, teacher 9 > 6 > 1: gaps 3, 8, 5; student 2, 1.5, 1: gaps 0.5, 1, 0.5; errors 2.5, 7, 4.5:
    # (6.25 + 49 + 20.25) / 3 = 25.166667. Group 2: teacher's gap 1, student's -1: 4. Group 3: one doc: 0. Mean
    # 29.166667 / 3 = 9.722222.
    scores, labels = [[2.0, 1.5, 1.0], [0.0, 1.0], [7.0]], [[9.0, 6.0, 1.0], [1.0, 0.0], [5.0]]
    assert value(MarginMSE(), scores, labels) == pytest.approx(9.722222, abs=1e-5)
    # Only pairs of the best doc: (6.25 + 49) / 2 = 27.625; then 4 and 0: 31.625 / 3 = 10.541667.
    assert value(MarginMSE(pairs="best"), scores, labels) == pytest.approx(10.541667, abs=1e-5)


def test_a_constant_between_teacher_and_student_costs_nothing(value):
    assert value(MarginMSE(), [[2.0, 1.0, -3.0]], [[102.0, 101.0, 97.0]]) == 0.0


def test_same_as_loop(same_as_loop):
    def group_value(scores, labels):
        pairs = [(i, j) for i in range(len(scores)) for j in range(len(scores)) if labels[i] > labels[j]]
        return sum((scores[i] - scores[j] - labels[i] + labels[j]) ** 2 for i, j in pairs) / max(len(pairs), 1)

    same_as_loop(MarginMSE(), group_value, grades=TEACHER)


def test_best_pairs_same_as_loop(same_as_loop):
    def group_value(scores, labels):
        errors = []
        for best_score, best_label in zip(scores, labels, strict=True):
            if best_label == max(labels):
                rest = [(s, y) for s, y in zip(scores, labels, strict=True) if y < best_label]
                errors += [(best_score - s - best_label + y) ** 2 for s, y in rest]
        return sum(errors) / max(len(errors), 1)

    same_as_loop(MarginMSE(pairs="best"), group_value, grades=TEACHER)


def test_refuses_unknown_pairs():
    with pytest.raises(ConfigError, match=r"^loss\.pairs: expected one of ordered, best; got 'all'; set"):
        MarginMSE(pairs="all")
