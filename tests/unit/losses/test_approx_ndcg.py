from math import exp, log2

import pytest
import torch

from ranker.losses.approx_ndcg import ApproxNDCG


def test_value_by_hand(value):
    # Scores (1, 0), labels (0, 2): the relevant doc's rank is 1 + sigmoid(1) = 1.731059; its gain 3 over the best DCG 3
    # is 1. 1 - 1 / log2(2.731059) = 1 - 0.689912 = 0.310088. The second group has nothing relevant: 0. Mean 0.155044.
    assert value(ApproxNDCG(), [[1.0, 0.0], [1.0, 2.0]], [[0, 2], [0, 0]]) == pytest.approx(0.155044, abs=1e-6)


def test_alpha_by_hand(value):
    # sigmoid(2) = 0.880797: 1 - 1 / log2(2.880797) = 1 - 0.655107 = 0.344893.
    assert value(ApproxNDCG(alpha=2.0), [[1.0, 0.0]], [[0, 2]]) == pytest.approx(0.344893, abs=1e-6)


def test_a_steep_sigmoid_gives_ndcg():
    # Labels by score: 0, 3, 1, 2: DCG = 7 / log2(3) + 1 / 2 + 3 / log2(5) = 4.416508 + 0.5 + 1.292030 = 6.208538;
    # best: 7 + 3 / log2(3) + 1 / 2 = 9.392789; nDCG = 0.660990.
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0]], dtype=torch.float64)
    loss = ApproxNDCG(alpha=1000.0)(scores, torch.tensor([[0, 3, 1, 2]]), torch.ones(1, 4, dtype=torch.bool))
    assert loss.item() == pytest.approx(1 - 0.660990, abs=1e-6)


def test_labels_of_any_size_stay_finite(value):
    # 2^200 overflows float32; the second doc's share of the gain is 2^-100: 1 - 1 / log2(2.5) = 0.243529 for two equal
    # scores.
    assert value(ApproxNDCG(), [[0.0, 0.0]], [[200, 100]]) == pytest.approx(0.243529, abs=1e-6)


def test_same_as_loop(same_as_loop):
    def group_value(scores, labels):
        gains = [2 ** max(label, 0) - 1 for label in labels]
        best = sum(gain / log2(2 + place) for place, gain in enumerate(sorted(gains, reverse=True)))
        if best == 0:
            return 0.0
        dcg = 0.0
        for i, gain in enumerate(gains):
            rank = 1 + sum(1 / (1 + exp(1.7 * (scores[i] - scores[j]))) for j in range(len(scores)) if j != i)
            dcg += gain / log2(1 + rank)
        return 1 - dcg / best

    same_as_loop(ApproxNDCG(alpha=1.7), group_value, grades=(-1.0, 0.0, 0.0, 1.0, 2.0, 3.0))
