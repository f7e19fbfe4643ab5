"""A range of numbers that a key may have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ranker.data.parsing import shown

LARGEST = 2**31 - 1  # the largest count; numpy and torch store many counts in 32 bits


@dataclass(frozen=True)
class Range:
    """A range of numbers.

    Args:
        low: The lower bound.
        high: The upper bound.
        above: Whether the lower bound is excluded.
        below: Whether the upper bound is excluded.
    """

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False

    def fault(self, value: Any) -> str:
        """Return why a number is outside the range; empty for a number inside and for a value that is not a number.

        >>> Range(1).fault(0), Range(0, 1).fault(0.5), Range(0, above=True).fault(math.inf)
        ('expected at least 1, got 0', '', 'expected a finite number above 0, got inf')
        """
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return ""
        if isinstance(value, int) and self.high == math.inf and value > LARGEST:
            return f"expected at most {LARGEST}, got {shown(value)}"
        low = value > self.low if self.above else value >= self.low
        high = value < self.high if self.below else value <= self.high
        infinite = isinstance(value, float) and not math.isfinite(value)
        return "" if low and high and not infinite else f"expected {self._words()}, got {shown(value)}"

    def _words(self) -> str:
        if self.low == -math.inf:
            return "a finite number"
        if self.high == math.inf:
            return f"a finite number above {self.low:g}" if self.above else f"at least {self.low:.17g}"
        if (self.low, self.high, self.above, self.below) == (0, 1, False, False):
            return "a share from 0 to 1"
        low = f"{'a number above' if self.above else 'at least'} {self.low:g}"
        return f"{low} and {'below' if self.below else 'at most'} {self.high:.17g}"
