from math import exp, log

import pytest
import torch

from ranker.errors import ConfigError
from ranker.losses.ranknet import RankNet


def test_value_by_hand(value):
    # Group 1: gaps 1, 3, 2: ln(1 + e^-1) + ln(1 + e^-3) + ln(1 + e^-2) = 0.313262 + 0.048587 + 0.126928 = 0.488777; / 3
    # = 0.162926. Group 2: gap -1: ln(1 + e) = 1.313262. Group 3 has no ordered pair: 0. Mean: (0.162926 + 1.313262) / 3
    # = 0.492063.
    scores, labels = [[3.0, 2.0, 0.0], [0.0, 1.0], [4.0]], [[2, 1, 0], [1, 0], [1]]
    assert value(RankNet(), scores, labels) == pytest.approx(0.492063, abs=1e-6)


def test_sigma_by_hand(value):
    # Gap 1 at sigma 2: ln(1 + e^-2) = 0.126928.
    assert value(RankNet(sigma=2.0), [[1.0, 0.0]], [[1, 0]]) == pytest.approx(0.126928, abs=1e-6)


def test_far_pairs_keep_all_digits():
    # ln(1 + e^-40) is e^-40 to 17 digits, and a pair 40 the wrong way round costs 40 + e^-40.
    scores, both = torch.tensor([[40.0, 0.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    assert RankNet()(scores, torch.tensor([[1, 0]]), both).item() == pytest.approx(exp(-40), rel=1e-12)
    scores = torch.tensor([[25.0, 0.0]], dtype=torch.float64)
    assert RankNet()(scores, torch.tensor([[0, 1]]), both).item() == pytest.approx(25 + exp(-25), rel=1e-15)


def test_same_as_loop(same_as_loop):
    def group_value(scores, labels):
        pairs = [(i, j) for i in range(len(scores)) for j in range(len(scores)) if labels[i] > labels[j]]
        return sum(log(1 + exp(-0.7 * (scores[i] - scores[j]))) for i, j in pairs) / max(len(pairs), 1)

    same_as_loop(RankNet(sigma=0.7), group_value)


def test_refuses_a_sigma_that_is_not_positive():
    with pytest.raises(ConfigError, match=r"^loss\.sigma: expected a finite number above 0, got -1\.0; set"):
        RankNet(sigma=-1.0)
