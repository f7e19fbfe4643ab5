from math import exp, log

import pytest

from ranker.losses.marginal_likelihood import MarginalLikelihood


def test_value_by_hand(value):
    # Group 1: p = (3/4, 1/4) for scores (ln 3, 0); the reader's likelihoods are 0.1 and 0.5. Sum: 0.075 + 0.125 = 0.2;
    # -ln 0.2 + ln 0.5 = 0.916291. Group 2: a single doc: 0. Mean: 0.458145.
    scores, labels = [[log(3.0), 0.0], [5.0]], [[log(0.1), log(0.5)], [-3.0]]
    assert value(MarginalLikelihood(), scores, labels) == pytest.approx(0.458145, abs=1e-6)


def test_temperature_by_hand(value):
    # scores 2 ln 3 and 0 at temperature 2 are those of group 1 above
    loss = MarginalLikelihood(temperature=2.0)
    assert value(loss, [[2 * log(3.0), 0.0]], [[log(0.1), log(0.5)]]) == pytest.approx(0.916291, abs=1e-6)


def test_same_as_loop(same_as_loop):
    def group_value(scores, labels):
        if not scores:
            return 0.0
        total = sum(map(exp, scores))
        answer = sum(exp(score) / total * exp(label) for score, label in zip(scores, labels, strict=True))
        return -log(answer) + max(labels)

    same_as_loop(MarginalLikelihood(), group_value, (-9.0, -2.5, -1.0, -0.1))
