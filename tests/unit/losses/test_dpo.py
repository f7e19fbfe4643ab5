from math import exp, log

import pytest

from ranker.errors import ConfigError
from ranker.losses.dpo import DPO


def test_value_by_hand(value):
    # Scores minus the reference's. Group 1 at beta 0.5: gaps 2, 4, 2, so 1, 2, 1: ln(1 + e^-1) + ln(1 + e^-2) + ln(1 +
    # e^-1) = 0.313262 + 0.126928 + 0.313262 = 0.753452; / 3 = 0.251151. Group 2: the model prefers the worse doc by 2
    # more than the reference: ln(1 + e) = 1.313262. Mean: 0.782206.
    relative, labels = [[4.0, 2.0, 0.0], [0.0, 2.0]], [[2, 1, 0], [1, 0]]
    assert value(DPO(beta=0.5), relative, labels) == pytest.approx(0.782206, abs=1e-6)


def test_same_as_loop(same_as_loop):
    def group_value(relative, labels):
        pairs = [(i, j) for i in range(len(labels)) for j in range(len(labels)) if labels[i] > labels[j]]
        return sum(log(1 + exp(-0.1 * (relative[i] - relative[j]))) for i, j in pairs) / max(len(pairs), 1)

    same_as_loop(DPO(), group_value)


def test_refuses_a_beta_that_is_not_positive():
    with pytest.raises(ConfigError, match=r"^loss\.beta: expected a finite number above 0, got 0\.0; set"):
        DPO(beta=0.0)
