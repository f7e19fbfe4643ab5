from functools import partial
from math import exp, log2

import pytest
import torch

from ranker.errors import ConfigError
from ranker.losses.lambda_loss import LambdaLoss


def test_value_by_hand(value):
    # Labels (0, 1, 3) at ranks (1, 2, 3), scores (2, 1, 0). Gains 2^y - 1 = (0, 1, 7); best DCG = 7 + 1 / log2(3) =
    # 7.630930; G = (0, 0.131046, 0.917319). 1/D = (1, 0.630930, 0.5). Pair (b, a): rho 0.369070, delta at distance 1 =
    # 1 - 0.630930 = 0.369070; |dG| 0.131046; log2(1 + e^1) = 1.894636 Pair (c, a): rho 0.5, delta at distance 2 =
    # 0.630930 - 0.5 = 0.130930; |dG| 0.917319; log2(1 + e^2) = 3.068508 Pair (c, b): rho 0.130930, delta at distance 1
    # = 0.369070; |dG| 0.786274; log2(1 + e^1) = 1.894636 mu 0:  0.369070 * 0.248284 + 0.5 * 2.814802 + 0.130930 *
    # 1.489703 = 0.091634 + 1.407401 + 0.195046 = 1.694082 mu 10: plus 10 * (0.369070 * 0.248284 + 0.130930 * 2.814802 +
    # 0.369070 * 1.489703)        = 10 * (0.091634 + 0.368541 + 0.549805) = 10.099805; in all 11.793887
    scores, labels = [[2.0, 1.0, 0.0]], [[0, 1, 3]]
    assert value(LambdaLoss(mu=0.0), scores, labels) == pytest.approx(1.694082, abs=1e-6)
    assert value(LambdaLoss(), scores, labels) == pytest.approx(11.793887, abs=5e-6)


def test_k_by_hand(value):
    # As above with k = 1: best DCG@1 = 7, G = (0, 1/7, 1), 1/D = (1, 0, 0). Pair (c, b) lies wholly beyond rank 1.
    # mu 0: 1 * 1/7 * 1.894636 + 1 * 1 * 3.068508 = 3.339171.
    # mu 1: plus 0.369070 * 1/7 * 1.894636 + 0.130930 * 1 * 3.068508 = 0.099893 + 0.401759; in all 3.840823.
    scores, labels = [[2.0, 1.0, 0.0]], [[0, 1, 3]]
    assert value(LambdaLoss(mu=0.0, k=1), scores, labels) == pytest.approx(3.339171, abs=1e-6)
    assert value(LambdaLoss(mu=1.0, k=1), scores, labels) == pytest.approx(3.840823, abs=1e-6)


def test_ranks_carry_no_gradient_and_weights_scale_it():
    scores = torch.tensor([[1.0, 0.0]], requires_grad=True)
    LambdaLoss(mu=1.0)(scores, torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool)).backward()
    # Weight 2 * 0.369070 * 1; d log2(1 + e^x) = sigmoid(1) / ln 2 = 0.731059 / 0.693147 = 1.054695; product 0.778513.
    torch.testing.assert_close(scores.grad, torch.tensor([[0.778513, -0.778513]]), atol=2e-6, rtol=0)


def test_ties_are_ranked_with_the_lower_label_first(value):
    # Three equal scores, labels (1, 0, 0) in any order: the relevant doc has rank 3. rho: |1 - 0.5| and |0.630930 -
    # 0.5|, each times log2(2) = 1: 0.630930.
    for labels in ([1, 0, 0], [0, 1, 0], [0, 0, 1]):
        assert value(LambdaLoss(mu=0.0), [[0.5, 0.5, 0.5]], [labels]) == pytest.approx(0.630930, abs=1e-6)


def _group_value(scores, labels, sigma, mu, k):
    docs = sorted(zip(scores, labels, strict=True), key=lambda doc: (-doc[0], doc[1]))
    depth = k or len(docs)
    gains = [2 ** max(label, 0) - 1 for _, label in docs]
    best = sum(gain / log2(2 + place) for place, gain in enumerate(sorted(gains, reverse=True)[:depth]))
    total = 0.0
    for i, (score_i, label_i) in enumerate(docs, start=1):
        for j, (score_j, label_j) in enumerate(docs, start=1):
            if label_i > label_j and best > 0 and min(i, j) <= depth:
                worth_i, worth_j = ((1 / log2(1 + rank) if rank <= depth else 0.0) for rank in (i, j))
                delta = abs(1 / log2(1 + abs(i - j)) - 1 / log2(2 + abs(i - j)))
                gain = abs(gains[i - 1] - gains[j - 1]) / best
                total += (abs(worth_i - worth_j) + mu * delta) * gain * log2(1 + exp(-sigma * (score_i - score_j)))
    return total


@pytest.mark.parametrize(("sigma", "mu", "k"), [(1.0, 10.0, None), (0.6, 0.0, 3), (1.3, 2.0, 2), (1.0, 5.0, 100)])
def test_same_as_loop(same_as_loop, sigma, mu, k):
    loss = LambdaLoss(sigma=sigma, mu=mu, k=k)
    same_as_loop(loss, partial(_group_value, sigma=sigma, mu=mu, k=k), grades=(-2.0, 0.0, 0.0, 1.0, 2.0, 3.0))


@pytest.mark.parametrize(("option", "wrong"), [("mu", -0.5), ("mu", float("nan")), ("k", 0), ("sigma", 0.0)])
def test_refuses_senseless_options(option, wrong):
    with pytest.raises(ConfigError, match=rf"^loss\.{option}: expected .*, got {wrong!r}; set loss\.{option}"):
        LambdaLoss(**{option: wrong})
