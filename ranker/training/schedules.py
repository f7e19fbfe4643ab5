"""Learning rate schedules: a factor on the learning rate for each optimizer step.

The factor is above 0 in every step. In the first step it is 1 / warm-up steps. A decay would reach its end value one
step after the last one. After the warm-up, the factors equal those of transformers' schedules of the same name. In
transformers, the warm-up begins at 0, which wastes the first step.
"""

from __future__ import annotations

import math


def warmup_steps(warmup: float, total: int) -> int:
    """Return the number of warm-up steps. A value below 1 is a share of all steps; a value from 1 on is the number.

    >>> warmup_steps(0.1, 314), warmup_steps(40, 314)
    (31, 40)
    """
    return int(warmup * total) if warmup < 1 else min(int(warmup), total)


def _warm(step: int, warm: int) -> float | None:
    return step / warm if step <= warm and warm else None


def linear(step: int, total: int, warmup: float = 0.1, end: float = 0.0) -> float:
    """Return the factor of a linear schedule: up to 1 at the last warm-up step, 1 once more, then towards `end`.

    Args:
        step: Optimizer step, from 1.
        total: Number of optimizer steps.
        warmup: Number of warm-up steps, or their share of all steps if it is below 1.
        end: Factor that a step after the last one would have.

    >>> linear(31, 314), linear(32, 314), round(linear(314, 314), 6) == round(1 / 283, 6), linear(1, 1)
    (1.0, 1.0, True, 1.0)
    """
    warm = warmup_steps(warmup, total)
    rising = _warm(step, warm)
    if rising is not None:
        return rising
    return end + (1 - end) * max(total - step + 1, 0) / max(total - warm, 1)


def cosine(step: int, total: int, warmup: float = 0.1, end: float = 0.0) -> float:
    """Return the factor of a cosine schedule: linear warm-up, then half a cosine (Loshchilov and Hutter, 2017).

    The arguments are those of `linear`.

    >>> round(cosine(61, 100, warmup=20), 3), cosine(100, 100, warmup=20) > 0, cosine(1, 1)
    (0.5, True, 1.0)
    """
    warm = warmup_steps(warmup, total)
    rising = _warm(step, warm)
    if rising is not None:
        return rising
    done = min((step - 1 - warm) / max(total - warm, 1), 1.0)
    return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * done))


def constant(step: int, total: int, warmup: float = 0.1) -> float:
    """Return the factor of a constant schedule: linear warm-up, then 1. The arguments are those of `linear`.

    >>> constant(5, 100), constant(100, 100)
    (0.5, 1.0)
    """
    rising = _warm(step, warmup_steps(warmup, total))
    return 1.0 if rising is None else rising
