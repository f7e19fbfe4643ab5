from math import exp, log

import pytest

from ranker.errors import ConfigError
from ranker.losses.bce import BCE


def test_value_by_hand(value):
    # max_label 4: targets 3/4 and 0. Doc 1 at score 1: 0.75 ln(1 + e^-1) + 0.25 ln(1 + e) = 0.75 * 0.313262 + 0.25 *
    # 1.313262 = 0.563262. Doc 2 at score 0: ln 2 = 0.693147. Mean 0.628204.
    assert value(BCE(max_label=4.0), [[1.0, 0.0]], [[3, 0]]) == pytest.approx(0.628204, abs=1e-6)


def test_positive_weight_by_hand(value):
    # Weight 2 on the relevant part alone: doc 1: 2 * 0.75 * 0.313262 + 0.25 * 1.313262 = 0.798208; doc 2 as before;
    # mean 0.745678.
    assert value(BCE(max_label=4.0, positive_weight=2.0), [[1.0, 0.0]], [[3, 0]]) == pytest.approx(0.745678, abs=1e-6)


def test_labels_beyond_the_bounds_count_as_the_bounds(value):
    assert value(BCE(), [[0.3, -0.4]], [[7, -2]]) == value(BCE(), [[0.3, -0.4]], [[1, 0]])


def test_same_as_loop(same_as_loop):
    def group_value(scores, labels):
        total = 0.0
        for score, label in zip(scores, labels, strict=True):
            target, probability = label / 3.0, 1 / (1 + exp(-score))
            total -= 2.5 * target * log(probability) + (1 - target) * log(1 - probability)
        return total / max(len(scores), 1)

    same_as_loop(BCE(max_label=3.0, positive_weight=2.5), group_value)


@pytest.mark.parametrize("option", ["max_label", "positive_weight"])
@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_refuses_options_that_are_not_positive(option, wrong):
    with pytest.raises(ConfigError, match=rf"^loss\.{option}: expected a finite number above 0, got {wrong!r}; set"):
        BCE(**{option: wrong})
