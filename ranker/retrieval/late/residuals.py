"""Quantized residuals: each element of a vector minus its centroid becomes 2 or 4 bits (Santhanam et al., 2022a).

The range of the elements is divided into 2 ** bits buckets. The weight of a bucket is the value that replaces all
elements in it. A byte holds 8 / bits elements of a vector in order, the first in the highest bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ranker.types import Movable

STEPS = 30  # iterations of Lloyd's algorithm in `fit`


@dataclass
class Buckets(Movable):
    """The buckets of a residual's elements.

    Args:
        cuts: Bounds between neighbouring buckets, ascending, float32 [2**bits - 1].
        weights: Value of each bucket, ascending, float32 [2**bits].
    """

    cuts: Tensor
    weights: Tensor

    @property
    def bits(self) -> int:
        """Bits per element."""
        return len(self.weights).bit_length() - 1

    def pack(self, residuals: Tensor) -> Tensor:
        """Return the quantized residuals, uint8 [vectors, bytes].

        Args:
            residuals: float32 [vectors, dim].

        >>> quarters = Buckets(torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([-2.0, -0.5, 0.5, 2.0]))
        >>> quarters.pack(torch.tensor([[-3.0, -0.1, 0.1, 3.0, 3.0]])).tolist()  # 00 01 10 11, then 11 and zeros
        [[27, 192]]
        """
        per_byte = 8 // self.bits
        levels = torch.bucketize(residuals, self.cuts, right=True).to(torch.uint8)
        filled = functional.pad(levels, (0, -levels.shape[1] % per_byte)).unflatten(
            1, (-(-levels.shape[1] // per_byte), per_byte)
        )
        packed = torch.zeros(filled.shape[:2], dtype=torch.uint8, device=residuals.device)
        for place in range(per_byte):
            packed |= filled[:, :, place] << (8 - self.bits * (place + 1))
        return packed

    def byte_values(self) -> Tensor:
        """Return the elements that each byte encodes, float32 [256, elements per byte]."""
        shifts = torch.arange(8 - self.bits, -1, -self.bits, device=self.weights.device)
        return self.weights[(torch.arange(256, device=shifts.device).unsqueeze(1) >> shifts) & (2**self.bits - 1)]

    def half_byte_values(self) -> Tensor:
        """Return the elements that each value of half a byte encodes, float32 [16, elements per half byte]."""
        return self.byte_values()[:16, 4 // self.bits :]

    def unpack(self, packed: Tensor, dim: int) -> Tensor:
        """Return the residuals, float32 [vectors, dim], of packed ones, uint8 [vectors, bytes]."""
        return self.byte_values()[packed.long()].flatten(1)[:, :dim]


def fit(numbers: np.ndarray, bits: int) -> Buckets:
    """Fit buckets with a small squared error to a sample of elements by Lloyd's algorithm (Lloyd, 1982; Max, 1960).

    Args:
        numbers: The elements, float32 [elements]; without any, all weights are 0.
        bits: 2 or 4.
    """
    ordered = np.sort(numbers.astype(np.float64))
    if not len(ordered):
        ordered = np.zeros(1)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    quantiles = (np.arange(2**bits) + 0.5) / 2**bits
    weights = ordered[(quantiles * len(ordered)).astype(np.int64)]
    for _ in range(STEPS):
        cuts = (weights[1:] + weights[:-1]) / 2
        ends = np.concatenate([[0], np.searchsorted(ordered, cuts), [len(ordered)]])
        sizes = np.diff(ends)
        weights = np.sort(np.where(sizes > 0, np.diff(sums[ends]) / np.maximum(sizes, 1), weights))
    cuts = (weights[1:] + weights[:-1]) / 2
    return Buckets(torch.from_numpy(cuts.astype(np.float32)), torch.from_numpy(weights.astype(np.float32)))
