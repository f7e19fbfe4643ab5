from math import exp, log

import pytest

from ranker.errors import ConfigError
from ranker.losses.distill_ranknet import DistillRankNet
from ranker.losses.ranknet import RankNet


def test_value_by_hand(value):
    # The teacher's order is doc 3, 1, 2; scores 1, 0, 2. Gaps of its pairs (3,1), (3,2), (1,2): 1, 2, 1:
    # ln(1 + e^-1) = 0.313262, ln(1 + e^-2) = 0.126928, 0.313262: mean 0.251151. The second group has no order: 0.
    assert value(DistillRankNet(), [[1.0, 0.0, 2.0], [1.0]], [[4.0, 3.0, 9.0], [1.0]]) == pytest.approx(
        0.251151 / 2, abs=1e-6
    )


def test_weights_by_hand(value):
    # The same pairs have ranks 1 + 2, 1 + 3, 2 + 3: (0.313262 / 3 + 0.126928 / 4 + 0.313262 / 5) / (1/3 + 1/4 + 1/5)
    # = (0.104421 + 0.031732 + 0.062652) / 0.783333 = 0.253794.
    loss = DistillRankNet(weights="inverse_ranks")
    assert value(loss, [[1.0, 0.0, 2.0]], [[4.0, 3.0, 9.0]]) == pytest.approx(0.253794, abs=1e-6)


def test_equal_weights_are_ranknet(value):
    scores, labels = [[0.3, -1.2, 2.0, 0.1], [1.0, 2.0]], [[9.0, 0.5, 0.4, 0.4], [-1.0, 3.0]]
    assert value(DistillRankNet(sigma=2.0), scores, labels) == pytest.approx(value(RankNet(sigma=2.0), scores, labels))


def test_same_as_loop(same_as_loop):
    def group_value(scores, labels):
        def rank(i):
            places = [place for place, other in enumerate(sorted(labels, reverse=True), 1) if other == labels[i]]
            return sum(places) / len(places)

        docs = range(len(labels))
        pairs = [(i, j) for i in docs for j in docs if labels[i] > labels[j]]
        weights = [1 / (rank(i) + rank(j)) for i, j in pairs]
        losses = [log(1 + exp(-1.7 * (scores[i] - scores[j]))) for i, j in pairs]
        return sum(w * v for w, v in zip(weights, losses, strict=True)) / sum(weights) if pairs else 0.0

    same_as_loop(DistillRankNet("inverse_ranks", sigma=1.7), group_value, grades=(-3.2, 0.1, 0.1, 1.7, 4.4, 9.0))


def test_other_weights_are_refused():
    with pytest.raises(ConfigError, match=r"loss\.weights: expected one of equal, inverse_ranks; got 'top'"):
        DistillRankNet(weights="top")
