"""Dropout that is the same on any hardware: a number's mask depends on where it stands in the optimizer step, not on who computes it.

Each mask is a hash of (seed, row, position, place in the model, column), so devices, micro-batches and the order of
rows change nothing, no random state has to be kept, and a pass that is repeated meets the same masks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _int32(number: int) -> int:
    """The number's lowest 32 bits, read with a sign."""
    return (number + 2**31) % 2**32 - 2**31


# multipliers of the 32-bit finaliser "lowbias32" (Chris Wellons, "Prospecting for Hash Functions", 2018) and, odd and
# without pattern, for counting: 2^32 over the golden ratio, and two of xxHash's primes
FIRST, SECOND = _int32(0x7FEB352D), _int32(0x846CA68B)
COLUMN, POSITION, SITE = _int32(0x9E3779B1), _int32(0x85EBCA77), _int32(0xC2B2AE3D)


def dropout_hashes(seed: int | Tensor, names: Tensor, positions: Tensor, sites: int) -> Tensor:
    """Hash what a token's masks depend on, but for the column.

    Args:
        seed: Of the optimizer step; its lowest 64 bits count. On the device, where it may not be a constant: int64 [].
        names: Number within the step of each token's row, int64 [tokens].
        positions: Place of each token in its row, int64 [tokens].
        sites: Places in the model at which numbers are dropped.

    Returns:
        int32 [sites, tokens]
    """
    low, high = (seed.int(), (seed >> 32).int()) if isinstance(seed, Tensor) else (_int32(seed), _int32(seed >> 32))
    rows = _mixed(names.int() * FIRST + low)
    tokens = _mixed(rows ^ (positions.int() * POSITION + high))
    counted = torch.arange(1, sites + 1, dtype=torch.int32, device=names.device) * SITE
    return _mixed(tokens ^ counted.unsqueeze(1))


def hashed_dropout(values: Tensor, hashes: Tensor, rate: float) -> Tensor:
    """Zero a share of `rate` of the numbers, and scale the others so that the mean stays.

    Args:
        values: [tokens, dim].
        hashes: One site's row of `dropout_hashes`, int32 [tokens].
        rate: Share, at least 0 and below 1.
    """
    columns = torch.arange(values.shape[1], dtype=torch.int32, device=values.device) * COLUMN
    # the highest bits decide, so the finaliser's last shift, which only mends the lowest, is left out
    kept = _mixed(hashes.unsqueeze(1) + columns, last=False) >= threshold(rate)
    return values * kept * (1 / (1 - rate))


def threshold(rate: float) -> int:
    """The least int32 at which a number is kept."""
    return round(rate * 2**32) - 2**31


def _mixed(bits: Tensor, last: bool = True) -> Tensor:
    """lowbias32: each bit of the result hangs on all bits of the argument, which is overwritten; int32, whose products wrap around."""
    for shift, multiplier in ((16, FIRST), (15, SECOND)):
        shifted = bits >> shift
        shifted &= (1 << (32 - shift)) - 1  # int32's shift repeats the sign
        bits ^= shifted
        bits *= multiplier
    return bits ^ ((bits >> 16) & 0xFFFF) if last else bits
