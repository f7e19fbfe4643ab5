"""Compute how many training groups come from each set of a mix, and spread these groups evenly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


def shares(sizes: Sequence[int], weights: Sequence[float], temperature: float | None) -> list[float]:
    """Return each set's share of the training groups: its weight times its size to the power 1 / temperature.

    With temperature 1, shares are in proportion to the sizes. A higher temperature makes the shares more equal
    (Arivazhagan et al., 2019, arXiv:1907.05019, section 4). Raffel et al., 2020 (arXiv:1910.10683, section 3.5.2) also
    limit the sizes.

    Args:
        sizes: Number of groups of each set, at least 1 if the weight is above 0.
        weights: Factor of each set, at least 0, not all 0.
        temperature: Above 0; None ignores the sizes, so that the shares are the weights.

    >>> [round(share, 6) for share in shares([900, 100], [1, 1], 2)]
    [0.75, 0.25]
    >>> shares([900, 100], [1, 3], None)
    [0.25, 0.75]
    """
    power = 0.0 if temperature is None else 1 / temperature
    # Logarithms prevent an overflow at small temperatures
    logs = [
        math.log(weight) + power * math.log(size) if weight else -math.inf
        for size, weight in zip(sizes, weights, strict=True)
    ]
    parts = [math.exp(value - max(logs)) for value in logs]
    return [part / math.fsum(parts) for part in parts]


def whole_numbers(parts: Sequence[float], total: int) -> list[int]:
    """Round parts of a total to whole numbers with the sum `total`; the largest remainders, then the first ones, go up.

    >>> whole_numbers([0.5, 0.3, 0.2], 9)
    [4, 3, 2]
    """
    exact = [Fraction(part) * total for part in parts]
    numbers = [math.floor(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda i: (numbers[i] - exact[i], i))
    for i in order[: total - sum(numbers)]:
        numbers[i] += 1
    return numbers


def spread(counts: Sequence[int], first: int) -> list[int]:
    """Return how many of the first `first` places belong to each set if each set's places are spread evenly.

    The k-th place of a set with n places (k from 0) lies at the share (2 k + 1) / (2 n) of the way. Places are sorted
    by this share; in a tie, the first set comes first (the method of Webster and Sainte-Laguë). No number falls when
    `first` rises.

    Args:
        counts: Number of places of each set.
        first: Number of places, from 0 to the sum of `counts`.

    >>> [spread([4, 2], first) for first in range(7)]
    [[0, 0], [1, 0], [1, 1], [2, 1], [3, 1], [3, 2], [4, 2]]
    """
    total = sum(counts)
    if not total:
        return [0] * len(counts)
    numbers = [(2 * count * first + total) // (2 * total) for count in counts]

    def place(i: int, k: int) -> Fraction:
        return Fraction(2 * k + 1, 2 * counts[i])

    while sum(numbers) > first:  # remove the last place; in a tie, that of the last set
        numbers[max((place(i, number - 1), i) for i, number in enumerate(numbers) if number)[1]] -= 1
    while sum(numbers) < first:
        numbers[min((place(i, number), i) for i, number in enumerate(numbers) if number < counts[i])[1]] += 1
    return numbers
