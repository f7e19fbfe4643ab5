from math import exp, log

import pytest
import torch

from ranker.losses.lce import LCE


def test_pc31_one_negative_of_three_is_not_three_negatives(value):
    # ln(1 + 1/e) with one negative, ln(1 + 3/e) with it three times.
    assert value(LCE(), [[1.0, 0.0]], [[1, 0]]) == pytest.approx(0.313262, abs=1e-6)
    assert value(LCE(), [[1.0, 0.0, 0.0, 0.0]], [[1, 0, 0, 0]]) == pytest.approx(0.743668, abs=1e-6)


def test_pc31_fewer_negatives_than_the_group_size_are_masked(value):
    # Group 1 has one negative, group 2 three, in one batch: (0.313262 + 0.743668) / 2 = 0.528465.
    assert value(LCE(), [[1.0, 0.0], [1.0, 0.0, 0.0, 0.0]], [[1, 0], [1, 0, 0, 0]]) == pytest.approx(0.528465, abs=1e-6)


def test_pc53a_a_group_without_docs_counts_zero_and_stops_its_nan():
    scores = torch.tensor([[1.0, 0.0, 0.0], [-torch.inf, -torch.inf, -torch.inf]], requires_grad=True)
    labels = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    loss = LCE()(scores, labels, torch.tensor([[True, True, True], [False, False, False]]))
    loss.backward()
    # ln(1 + 2/e) = 0.551445 over two groups; d/ds of the positive is (p - 1) / 2 with p = e / (e + 2) = 0.576117.
    assert loss.item() == pytest.approx(0.551445 / 2, abs=1e-6)
    torch.testing.assert_close(scores.grad[0], torch.tensor([-0.211942, 0.105971, 0.105971]), atol=1e-6, rtol=0)
    assert (scores.grad[1] == 0).all()


def test_several_positives_stand_against_the_negatives_only(value):
    # Positives at 1 and 2, negatives at 0 and 0: (ln(1 + 2/e) + ln(1 + 2/e^2)) / 2 = (0.551445 + 0.239545) / 2 =
    # 0.395495.
    assert value(LCE(), [[1.0, 2.0, 0.0, 0.0]], [[1, 3, 0, 0]]) == pytest.approx(0.395495, abs=1e-6)


def test_temperature_by_hand(value):
    # Gap 1 at temperature 0.5 is a gap of 2: ln(1 + e^-2) = 0.126928.
    assert value(LCE(temperature=0.5), [[1.0, 0.0]], [[1, 0]]) == pytest.approx(0.126928, abs=1e-6)


def test_groups_without_positive_or_negative_count_zero_and_stay_in_the_denominator(value):
    scores, labels = [[1.0, 0.0], [5.0, 2.0], [1.0, -1.0]], [[1, 0], [0, 0], [1, 2]]
    assert value(LCE(), scores, labels) == pytest.approx(0.313262 / 3, abs=1e-6)


def test_one_positive_equals_cross_entropy():
    scores = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    place = torch.tensor([0, 3, 7, 1, 1])
    labels = torch.nn.functional.one_hot(place, 8)
    expected = torch.nn.functional.cross_entropy(scores, place)
    torch.testing.assert_close(LCE()(scores, labels, torch.ones(5, 8, dtype=torch.bool)), expected)


def test_same_as_loop(same_as_loop):
    def group_value(scores, labels):
        against = sum(exp(score / 0.8) for score, label in zip(scores, labels, strict=True) if label <= 0)
        positives = [exp(score / 0.8) for score, label in zip(scores, labels, strict=True) if label > 0]
        return sum(-log(positive / (positive + against)) for positive in positives) / max(len(positives), 1)

    same_as_loop(LCE(temperature=0.8), group_value, grades=(-1.0, 0.0, 0.0, 1.0, 2.0))
