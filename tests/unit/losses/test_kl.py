from math import exp, log

import pytest
import torch

from ranker.losses.kl import KL


def test_value_by_hand(value):
    # Teacher gap 1: p = (0.731059, 0.268941); student gap -1: q = (0.268941, 0.731059); ln(p / q) = (1, -1):
    # 0.731059 - 0.268941 = 0.462117. The second group has one doc: 0. Mean 0.231059.
    assert value(KL(), [[3.0, 4.0], [2.0]], [[6.0, 5.0], [1.0]]) == pytest.approx(0.231059, abs=1e-6)


def test_direction_and_temperature_by_hand(value):
    # Temperature 2: teacher (2, 0) -> p = softmax(1, 0) = (0.731059, 0.268941); student equal: q = 1/2.
    # ln 2 + 0.731059 ln 0.731059 + 0.268941 ln 0.268941 = 0.693147 - 0.229012 - 0.353191 = 0.110944.
    # The other way round, KL(q || p), it would be -ln 2 - (ln 0.731059 + ln 0.268941) / 2 = 0.120115.
    assert value(KL(temperature=2.0), [[1.0, 1.0]], [[2.0, 0.0]]) == pytest.approx(0.110944, abs=1e-6)


def test_two_temperatures_by_hand(value):
    # Teacher (4, 0) / 4 -> p = softmax(1, 0) = (0.731059, 0.268941); student (2, 0) / 2 the same: 0. With the student
    # divided by 4, too, it would not be.
    loss = KL(temperature=2.0, teacher_temperature=4.0)
    assert value(loss, [[2.0, 0.0]], [[4.0, 0.0]]) == pytest.approx(0.0, abs=1e-6)
    assert value(KL(temperature=4.0), [[2.0, 0.0]], [[4.0, 0.0]]) > 0.02


def test_equals_the_library_function():
    rng = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(4, 6, generator=rng), torch.randn(4, 6, generator=rng)
    expected = torch.nn.functional.kl_div(
        scores.log_softmax(1), labels.log_softmax(1), log_target=True, reduction="batchmean"
    )
    torch.testing.assert_close(KL()(scores, labels, torch.ones(4, 6, dtype=torch.bool)), expected)


def test_same_as_loop(same_as_loop):
    def group_value(scores, labels):
        teacher, student = [exp(label / 1.5) for label in labels], [exp(score / 1.5) for score in scores]
        shares = [(t / sum(teacher), s / sum(student)) for t, s in zip(teacher, student, strict=True)]
        return sum(p * log(p / q) for p, q in shares)

    same_as_loop(KL(temperature=1.5), group_value, grades=(-3.2, 0.1, 0.1, 1.7, 4.4, 9.0))
