from math import exp, log2

import pytest

from ranker.losses.adr_mse import ADRMSE


def test_value_by_hand(value):
    # Scores (1, 0), the teacher prefers the second: smooth ranks 1 + sigmoid(-1) = 1.268941 and 1 + sigmoid(1) =
    # 1.731059 against ranks 2 and 1: (0.731059^2 / log2(3) + 0.731059^2 / log2(2)) / 2 = (0.337197 + 0.534447) / 2
    # = 0.435822. The second group has one doc, at rank 1: 0. Mean 0.217911.
    assert value(ADRMSE(), [[1.0, 0.0], [4.0]], [[-3.0, 7.5], [2.0]]) == pytest.approx(0.217911, abs=1e-6)


def test_ties_share_the_mean_of_their_ranks(value):
    # Labels 5, 1, 1: ranks 1, 2.5, 2.5; equal scores put all at 2: (1 + 2 * 0.25 / log2(3.5)) / 3 = 0.425550.
    assert value(ADRMSE(), [[0.0, 0.0, 0.0]], [[5.0, 1.0, 1.0]]) == pytest.approx(0.425550, abs=1e-6)


def test_only_the_order_of_the_labels_counts(value):
    scores = [[0.3, -1.2, 2.0]]
    assert value(ADRMSE(), scores, [[9.0, 0.5, 0.4]]) == value(ADRMSE(), scores, [[3.0, 2.0, -100.0]])


def test_same_as_loop(same_as_loop):
    def group_value(scores, labels):
        total = 0.0
        for i, label in enumerate(labels):
            places = [place for place, other in enumerate(sorted(labels, reverse=True), 1) if other == label]
            rank = sum(places) / len(places)
            smooth = 1 + sum(1 / (1 + exp(1.7 * (scores[i] - scores[j]))) for j in range(len(scores)) if j != i)
            total += (rank - smooth) ** 2 / log2(1 + rank)
        return total / max(1, len(labels))

    same_as_loop(ADRMSE(alpha=1.7), group_value, grades=(-3.2, 0.1, 0.1, 1.7, 4.4, 9.0))
