from math import exp, log

import pytest
import torch

from ranker.losses.listnet import ListNet


def test_value_by_hand(value):
    # Labels (1, 0): P = (e, 1) / (e + 1) = (0.731059, 0.268941). Scores (0, 1): Q = (0.268941, 0.731059), ln Q =
    # (-1.313262, -0.313262). -(0.731059 * -1.313262 + 0.268941 * -0.313262) = 1.044320. The second group has equal
    # labels: 0. Mean 0.522160.
    assert value(ListNet(), [[0.0, 1.0], [3.0, 0.0]], [[1, 0], [2, 2]]) == pytest.approx(0.522160, abs=1e-6)


def test_temperatures_by_hand(value):
    # Labels over 0.5: P = softmax(2, 0) = (0.880797, 0.119203). Scores over 2: ln Q of (0, 0.5) = (-0.974077,
    # -0.474077). 0.880797 * 0.974077 + 0.119203 * 0.474077 = 0.914475.
    loss = ListNet(label_temperature=0.5, score_temperature=2.0)
    assert value(loss, [[0.0, 1.0]], [[1, 0]]) == pytest.approx(0.914475, abs=1e-6)


def test_gradient_is_the_difference_of_the_probabilities():
    scores = torch.tensor([[0.0, 1.0]], requires_grad=True)
    ListNet()(scores, torch.tensor([[1, 0]]), torch.ones(1, 2, dtype=torch.bool)).backward()
    # Q - P = 0.268941 - 0.731059.
    torch.testing.assert_close(scores.grad, torch.tensor([[-0.462117, 0.462117]]), atol=1e-6, rtol=0)


def test_same_as_loop(same_as_loop):
    def group_value(scores, labels):
        if len(set(labels)) < 2:
            return 0.0
        wanted, shown = [exp(label / 0.5) for label in labels], [exp(score / 1.5) for score in scores]
        return -sum(w / sum(wanted) * log(s / sum(shown)) for w, s in zip(wanted, shown, strict=True))

    same_as_loop(ListNet(label_temperature=0.5, score_temperature=1.5), group_value)
