from math import exp, log

import pytest
import torch

from ranker.losses.pointwise_cross_entropy import PointwiseCrossEntropy


def test_value_by_hand(value):
    # Group 1: score 2, relevant: ln(1 + e^-2) = 0.126928; score 1, not relevant: ln(1 + e^1) = 1.313262; mean 0.720095.
    # Group 2: score 0, relevant (grade 3): ln 2 = 0.693147. Mean over groups: 0.706621; over the three docs it would be
    # 0.711112.
    assert value(PointwiseCrossEntropy(), [[2.0, 1.0], [0.0]], [[1, 0], [3]]) == pytest.approx(0.706621, abs=1e-6)


def test_equals_cross_entropy_of_two_logits():
    logits = torch.randn(7, 2, generator=torch.Generator().manual_seed(0))
    relevant = torch.tensor([[1, 0, 0, 1, 0, 1, 0]])
    score = (logits[:, 1] - logits[:, 0]).unsqueeze(0)
    expected = torch.nn.functional.cross_entropy(logits, relevant[0])
    torch.testing.assert_close(PointwiseCrossEntropy()(score, relevant, relevant >= 0), expected)


def test_same_as_loop(same_as_loop):
    def group_value(scores, labels):
        losses = [
            log(1 + exp(-score)) if label > 0 else log(1 + exp(score))
            for score, label in zip(scores, labels, strict=True)
        ]
        return sum(losses) / len(losses) if losses else 0.0

    same_as_loop(PointwiseCrossEntropy(), group_value, grades=(-2.0, 0.0, 1.0, 3.0))
