"""Minimum description length in bits by online (prequential) coding (Voita and Titov, EMNLP 2020, arXiv:2003.12298).

The labels are sent in blocks. A target of the first block costs log2 k bits. Before each later block, a new probe is
trained on all labels sent so far, and a target of the block costs -log2 p(label) bits with the probability of this
probe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ranker.errors import ConfigError

FRACTIONS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)
UNITS = ("bits", "legacy_mixed")


def portion_ends(num_pairs: int, fractions: Sequence[float] = FRACTIONS) -> list[int]:
    """Return the ends of the blocks, in pairs. Empty blocks are dropped, so block 1 has at least one pair.

    Args:
        num_pairs: Number of training pairs, each with at least one target.
        fractions: Ends as shares of the training pairs, in rising order; the last share is 1.

    Raises:
        ConfigError: The fractions are not above 0, do not rise, or do not end in 1.

    >>> portion_ends(40_000)
    [40, 80, 160, 320, 640, 1280, 2500, 5000, 10000, 20000, 40000]
    >>> portion_ends(200)
    [1, 3, 6, 12, 25, 50, 100, 200]
    """
    rises = all(0 < low < high for low, high in pairwise(fractions))
    if not fractions or fractions[-1] != 1 or fractions[0] <= 0 or not rises:
        raise ConfigError(
            f"portions: expected rising shares above 0 that end in 1.0, got {list(fractions)}; "
            "set portions=[0.1,0.5,1.0]"
        )
    # 1e-9 corrects rounding: 0.001 * 3000 is 3 - 4e-16 in floating point
    ends = [int(fraction * num_pairs + 1e-9) for fraction in fractions]
    return sorted({end for end in ends if end > 0})


@dataclass(frozen=True)
class CodeLength:
    """Length of the code of all labels.

    Args:
        classes: Number of classes k.
        first: Number of targets in block 1.
        targets: Number of all targets n.
        later_bits: Bits of all blocks except block 1.
    """

    classes: int
    first: int
    targets: int
    later_bits: float

    @property
    def first_bits(self) -> float:
        """Bits of block 1, which is sent with a uniform code."""
        return self.first * math.log2(self.classes)

    @property
    def uniform_bits(self) -> float:
        """Bits of a uniform code of all targets, n log2 k."""
        return self.targets * math.log2(self.classes)

    @property
    def bits(self) -> float:
        """The description length in bits."""
        return self.first_bits + self.later_bits

    @property
    def legacy_mixed(self) -> float:
        """The published number: block 1 in bits plus all later blocks in nats."""
        return self.first_bits + self.later_bits * math.log(2)

    def compression(self, units: str = "bits") -> float:
        """Return the length of the uniform code divided by the length of this code; above 1 if this code is shorter.

        Args:
            units: Unit of this code's length: `bits` or `legacy_mixed`.

        >>> round(CodeLength(classes=2, first=1, targets=8, later_bits=5.0).compression(), 4)
        1.3333
        """
        length = self.bits if units == "bits" else self.legacy_mixed
        return self.uniform_bits / length if length > 0 else math.inf


def online_code(label_probabilities: np.ndarray, block_ends: Sequence[int], classes: int) -> CodeLength:
    """Return the length of the code, from the probability that a probe gave to each target's label.

    Args:
        label_probabilities: Probabilities [targets]; those of the first block are ignored, because this block has the
            uniform code.
        block_ends: End of each block, in targets; the last end is the number of targets.
        classes: Number of classes.

    >>> online_code(np.array([0.5, 0.5, 0.5, 1, 0.5, 1, 0.5, 0.5]), [1, 2, 4, 8], classes=2).bits
    6.0
    """
    first, last = block_ends[0], block_ends[-1]
    bits = -np.log2(label_probabilities[first:last].astype(np.float64))
    return CodeLength(classes, first, last, float(bits.sum()))


def counting_code(labels: np.ndarray, block_ends: Sequence[int], classes: int) -> np.ndarray:
    """Return the bits of each target in the code of the label prior, a probe that reads no input.

    The probability of a class is its count among the labels sent before the block, with add-one smoothing.

    Args:
        labels: Class of each target in sending order, int64 [targets].
        block_ends: End of each block, in targets.
        classes: Number of classes k.

    Returns:
        float64 [targets]; log2 k in block 1.

    >>> counting_code(np.array([1, 1, 1, 1, 1, 1, 1, 0]), [1, 2, 4, 8], 2).sum().round(6)
    np.float64(5.789103)
    """
    bits = np.full(len(labels), math.log2(classes))
    for start, end in pairwise(block_ends):
        counts = np.bincount(labels[:start], minlength=classes) + 1
        bits[start:end] = -np.log2(counts[labels[start:end]] / counts.sum())
    return bits


def accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of targets whose predicted class is the label; NaN without targets."""
    return float(np.mean(predicted == labels)) if len(labels) else math.nan


def macro_f1(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean F1 over the classes among the predictions or the labels; NaN without targets.

    >>> round(macro_f1(np.array([0, 0, 1]), np.array([0, 1, 1])), 4)
    0.6667
    """
    classes = np.union1d(predicted, labels)
    hits = np.array([np.sum((predicted == c) & (labels == c)) for c in classes])
    sizes = np.array([np.sum(predicted == c) + np.sum(labels == c) for c in classes])
    return float(np.mean(2 * hits / sizes)) if len(classes) else math.nan
