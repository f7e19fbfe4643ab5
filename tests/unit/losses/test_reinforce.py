from itertools import permutations
from math import exp, log, log2

import pytest
import torch

from ranker.errors import ConfigError
from ranker.losses.reinforce import Reinforce, _log_probability

BOTH = torch.ones(1, 2, dtype=torch.bool)


def test_value_and_gradient_by_hand():
    """Two rankings of two docs with scores ln 3 and 0, one of each order; only the first doc is relevant.

    Rewards 1 and 1 / log2(3) = 0.630930; baselines are the other's reward. Value: 1 - 0.815465 = 0.184535. The order's
    probability is 3/4; d ln(3/4) / ds_1 = 1/4, d ln(1/4) / ds_1 = -3/4. Gradient of s_1:
    -1/2 (0.369070 * 1/4 + -0.369070 * -3/4) = -0.184535.
    """
    scores = torch.tensor([[log(3.0), 0.0]], dtype=torch.float64, requires_grad=True)
    labels, loss = torch.tensor([[1.0, 0.0]]), Reinforce(samples=2)
    found = set()
    for seed in range(40):
        value = loss(scores, labels, BOTH, seed=seed)
        (gradient,) = torch.autograd.grad(value, scores)
        found.add((round(value.item(), 6), round(gradient[0, 0].item(), 6), round(gradient[0, 1].item(), 6)))
    one_of_each = (0.184535, -0.184535, 0.184535)
    assert found == {one_of_each, (0.0, 0.0, 0.0), (0.36907, 0.0, 0.0)}  # two equal rankings teach nothing


def test_probabilities_of_rankings_by_hand():
    # Plackett-Luce for scores ln 1, ln 2, ln 3: P(3, 2, 1) = 3/6 * 2/3 = 1/3, P(1, 2, 3) = 1/6 * 2/5 = 1/15
    scores = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64).log()
    orders = torch.tensor([[[2, 1, 0]], [[0, 1, 2]]])
    got = _log_probability(scores, torch.ones(1, 3, dtype=torch.bool), orders)[:, 0].exp()
    assert got.tolist() == pytest.approx([1 / 3, 1 / 15], rel=1e-12)


def test_the_mean_over_many_draws_is_the_exact_expectation_and_its_gradient():
    labels, start = [2.0, 0.0, 1.0], [0.2, 0.7, -0.4]
    scores = torch.tensor([start], dtype=torch.float64, requires_grad=True)
    exact = torch.zeros((), dtype=torch.float64)
    ideal = 3.0 + 1.0 / log2(3)
    for order in permutations(range(3)):
        probability = torch.ones((), dtype=torch.float64)
        for i, doc in enumerate(order):
            probability = probability * scores[0, doc].exp() / sum(scores[0, other].exp() for other in order[i:])
        reward = sum((2 ** labels[doc] - 1) / log2(2 + i) for i, doc in enumerate(order)) / ideal
        exact = exact + probability * (1 - reward)
    (expected,) = torch.autograd.grad(exact, scores)
    drawn = Reinforce(samples=40_000)(scores, torch.tensor([labels]), torch.ones(1, 3, dtype=torch.bool), seed=3)
    (gradient,) = torch.autograd.grad(drawn, scores)
    assert drawn.item() == pytest.approx(exact.item(), abs=0.004)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=0.004)


def test_draws_depend_on_the_step_and_the_group_alone():
    rng = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 5, generator=rng, dtype=torch.float64)
    labels, mask = torch.tensor([[3.0, 0.0, 1.0, 0.0, 2.0]]).repeat(4, 1), torch.ones(4, 5, dtype=torch.bool)
    loss, ids = Reinforce(), torch.tensor([3, 8, 5, 2])

    def each(rows, seed=7):
        return [loss(scores[[r]], labels[[r]], mask[[r]], seed, ids[[r]]).item() for r in rows]

    together = loss(scores, labels, mask, 7, ids).item()
    assert together == pytest.approx(sum(each(range(4))) / 4, abs=1e-12)
    assert each([0]) != each([0], seed=8) and each([0]) != [loss(scores[[0]], labels[[0]], mask[[0]], 7).item()]
    assert each([0]) != each([0], seed=7 + 2**40)


def test_ranks_below_k_have_no_reward():
    # nDCG@1 of any ranking is 0 or 1, with probability exp(1) / (exp(1) + 1) of 1
    value = Reinforce(samples=20_000, k=1)(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]]), BOTH)
    assert value.item() == pytest.approx(1 / (1 + exp(1)), abs=0.01)


def test_refuses_options_out_of_range():
    with pytest.raises(ConfigError, match=r"^loss\.samples: expected at least 2, got 1; set"):
        Reinforce(samples=1)
    with pytest.raises(ConfigError, match=r"^loss\.k: expected a rank of 1 or more, or null for all ranks, got 0"):
        Reinforce(k=0)
