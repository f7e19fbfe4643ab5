"""Hashed dropout inside of a Triton kernel."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ranker.encoders.dropout import COLUMN, FIRST, SECOND, threshold

PROGRAMS = 1056  # number of Triton programs of a backward pass over tokens: eight per multiprocessor of an H200


@triton.jit
def kept(hashes, columns, THRESHOLD: tl.constexpr, COLUMN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Return True for values that `ranker.encoders.dropout.hashed_dropout` keeps, [tokens, columns]."""
    bits = hashes[:, None].to(tl.uint32, bitcast=True) + columns[None, :].to(tl.uint32) * COLUMN
    bits = (bits ^ (bits >> 16)) * FIRST
    bits = (bits ^ (bits >> 15)) * SECOND
    return bits.to(tl.int32, bitcast=True) >= THRESHOLD


def dropout_constants(hashes: Tensor | None, rate: float) -> dict[str, Any]:
    """Return the constants of a kernel with hashed dropout.

    Args:
        hashes: Dropout hashes, int32 [tokens]; None: no dropout.
        rate: Probability of dropout.
    """
    return {
        "DROP": hashes is not None,
        "THRESHOLD": threshold(rate),
        "SCALE": 1 / (1 - rate),
        "COLUMN": COLUMN % 2**32,
        "FIRST": FIRST % 2**32,
        "SECOND": SECOND % 2**32,
    }
