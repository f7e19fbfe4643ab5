from math import exp, log

import pytest
import torch

from ranker.losses.p_listmle import PListMLE


def test_value_by_hand(value):
    # Order by label: scores 0, 2, 1, with the choices 2.407606, 0.313262, 0 of ListMLE and the weights 2^2 - 1 = 3,
    # 2^1 - 1 = 1, 0: (3 * 2.407606 + 0.313262) / 4 = 1.884020. The second group has equal labels: 0. Mean 0.942010.
    assert value(PListMLE(), [[2.0, 0.0, 1.0], [3.0, 1.0]], [[1.5, 8.0, -1.0], [2.0, 2.0]]) == pytest.approx(
        0.942010, abs=1e-6
    )


def test_long_groups_do_not_overflow():
    # 2^400 overflows float32 and float16; the first choice among 400 equal scores costs ln 400, weights 1/2, 1/4, ...
    labels = torch.arange(400.0).unsqueeze(0)
    loss = PListMLE()(torch.zeros(1, 400), labels, torch.ones(1, 400, dtype=torch.bool))
    assert loss.item() == pytest.approx(sum(log(400 - i) / 2 ** (i + 1) for i in range(399)), rel=1e-5)


def test_same_as_loop(same_as_loop):
    def group_value(scores, labels):
        total = weight_sum = 0.0
        for score, label in zip(scores, labels, strict=True):
            if label > min(labels):
                places = [place for place, other in enumerate(sorted(labels, reverse=True), 1) if other == label]
                weight = 2 ** (len(labels) - sum(places) / len(places)) - 1
                below = sum(exp(other) for other, grade in zip(scores, labels, strict=True) if grade <= label)
                total, weight_sum = total + weight * (log(below) - score), weight_sum + weight
        return total / weight_sum if weight_sum else 0.0

    same_as_loop(PListMLE(), group_value)
