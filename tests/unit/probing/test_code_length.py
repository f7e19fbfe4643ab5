"""Worked examples of the online code, to 1e-6."""

import math

import numpy as np
import pytest

from ranker.errors import ConfigError
from ranker.probing.code_length import CodeLength, counting_code, macro_f1, online_code, portion_ends

ENDS = [1, 2, 4, 8]


def test_given_probabilities() -> None:
    code = online_code(np.array([0.3, 0.5, 0.5, 1, 0.5, 1, 0.5, 0.5]), ENDS, classes=2)
    assert code.bits == pytest.approx(6, abs=1e-6)
    assert code.compression() == pytest.approx(8 / 6, abs=1e-6)
    assert code.legacy_mixed == pytest.approx(4.465736, abs=1e-6)
    assert code.compression("legacy_mixed") == pytest.approx(1.791418, abs=1e-6)


def test_given_probabilities_that_are_no_powers_of_two() -> None:
    code = online_code(np.array([0.5, 0.5, 0.5, 0.8, 0.8, 0.9, 0.5, 0.4]), ENDS, classes=2)
    assert code.bits == pytest.approx(6.117787, abs=1e-6)
    assert code.compression() == pytest.approx(1.307662, abs=1e-6)
    assert code.legacy_mixed == pytest.approx(4.547380, abs=1e-6)
    assert code.compression("legacy_mixed") == pytest.approx(1.759255, abs=1e-6)


@pytest.mark.parametrize(
    ("labels", "bits", "compression"),
    [([1, 1, 1, 1, 1, 1, 1, 0], 5.789103, 1.381907), ([1, 0, 1, 1, 0, 1, 0, 0], 9.924813, 0.806061)],
)
def test_a_probe_that_learns_the_label_prior(labels: list[int], bits: float, compression: float) -> None:
    code = counting_code(np.array(labels), ENDS, classes=2)
    assert code.sum() == pytest.approx(bits, abs=1e-6)
    assert 8 / code.sum() == pytest.approx(compression, abs=1e-6)
    assert code[0] == 1, "block 1 is sent with the uniform code"


def test_published_lengths_in_bits() -> None:
    """ELMo layer 1, part of speech, as published: 900 targets of 45 classes in block 1, compression 53.06."""
    mixed, first = 96.02 * 1024, 900 * math.log2(45)
    bits = first + (mixed - first) / math.log(2)
    # by hand: (98324.48 - 4942.667) / 0.6931472 + 4942.667
    assert first == pytest.approx(4942.667, abs=1e-3)
    assert bits == pytest.approx(139_664.0, abs=0.5)
    assert 53.06 * mixed / bits == pytest.approx(37.35, abs=5e-3), "the uniform length stays, the code's grows"
    code = CodeLength(classes=45, first=900, targets=10_000, later_bits=1234.5)
    assert code.legacy_mixed == pytest.approx(4942.667 + 1234.5 * 0.693147, abs=1e-2)
    assert code.bits == pytest.approx(4942.667 + 1234.5, abs=1e-3)


def test_portion_ends() -> None:
    assert portion_ends(40_000) == [40, 80, 160, 320, 640, 1280, 2500, 5000, 10000, 20000, 40000]
    assert sum(portion_ends(40_000)[:-1]) == pytest.approx(1.0005 * 40_000), "pairs trained on over all portions"
    assert portion_ends(3_000)[0] == 3, "0.001 * 3000 is a little less than 3 in floating point"
    assert portion_ends(8) == [1, 2, 4, 8], "empty and repeated ends are dropped"
    assert portion_ends(1) == [1]


@pytest.mark.parametrize("fractions", [[], [0.5], [0.5, 0.5, 1.0], [0.0, 1.0], [1.0, 0.5]])
def test_portions_that_do_not_rise_to_1(fractions: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"portions: expected rising shares"):
        portion_ends(100, fractions)


def test_reading_rules() -> None:
    """Better than uniform iff above 1; the empirical prior gives log2 k / H(Y); perfect after block 1 gives n / t1."""
    uniform = online_code(np.full(100, 0.25), [1, 10, 100], classes=4)
    assert uniform.compression() == pytest.approx(1)
    perfect = online_code(np.ones(1000), [1, 1000], classes=4)
    assert perfect.compression() == pytest.approx(1000)
    rng = np.random.default_rng(0)
    labels = rng.choice(4, 200_000, p=[0.7, 0.1, 0.1, 0.1])
    shares = np.bincount(labels) / len(labels)
    entropy = -(shares * np.log2(shares)).sum()
    prior = counting_code(labels, portion_ends(len(labels)), 4)
    assert 2 * len(labels) / prior.sum() == pytest.approx(2 / entropy, rel=2e-3)


def test_macro_f1_ignores_absent_classes() -> None:
    """By hand: class 0 has precision 1/2 and recall 1, class 2 has 1 and 1/2; class 1 neither occurs nor is told."""
    assert macro_f1(np.array([0, 0, 2]), np.array([0, 2, 2])) == pytest.approx((2 / 3 + 2 / 3) / 2)
