"""Dropout by hash: whether a value is dropped depends only on its place in the optimizer step, not on the hardware.

Each mask is a hash of (seed, row id, position, site, column); a site is a place in the model that has dropout. So masks
do not depend on devices, micro-batches or the order of rows. No random state has to be stored, and a repeated pass uses
the same masks.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn


def _int32(number: int) -> int:
    """Return the lowest 32 bits of a number as a signed integer."""
    return (number + 2**31) % 2**32 - 2**31


# multipliers of the 32-bit hash finaliser "lowbias32" (Chris Wellons, "Prospecting for Hash Functions", 2018)
FIRST, SECOND = _int32(0x7FEB352D), _int32(0x846CA68B)
# odd multipliers that hide the pattern of counters: 2^32 divided by the golden ratio, and two of xxHash's primes
COLUMN, POSITION, SITE = _int32(0x9E3779B1), _int32(0x85EBCA77), _int32(0xC2B2AE3D)


def dropout_hashes(seed: int | Tensor, row_ids: Tensor, position_ids: Tensor, sites: int) -> Tensor:
    """Hash everything that a token's masks depend on, except the column.

    Args:
        seed: Seed of the optimizer step; the lowest 64 bits count. For CUDA graphs, in which it must not become a
            constant, it is an int64 scalar tensor on the device.
        row_ids: Id of each token's row within the step, int64 [tokens].
        position_ids: Position of each token in its row, int64 [tokens].
        sites: Number of sites of the model.

    Returns:
        int32 [sites, tokens]
    """
    low, high = (seed.int(), (seed >> 32).int()) if isinstance(seed, Tensor) else (_int32(seed), _int32(seed >> 32))
    rows = _finalise(row_ids.int() * FIRST + low)
    tokens = _finalise(rows ^ (position_ids.int() * POSITION + high))
    site_numbers = torch.arange(1, sites + 1, dtype=torch.int32, device=row_ids.device) * SITE
    return _finalise(tokens ^ site_numbers.unsqueeze(1))


def column_hashes(columns: int, device: torch.device) -> Tensor:
    """Return the number that is added to a token's hash for each column, int32 [columns]; products wrap around."""
    return torch.arange(columns, dtype=torch.int32, device=device) * COLUMN


def hashed_dropout(values: Tensor, hashes: Tensor, rate: float, columns: Tensor | None = None) -> Tensor:
    """Set a share of `rate` of the values to 0, and scale the others so that the mean does not change.

    Args:
        values: [tokens, dim].
        hashes: One row of `dropout_hashes`, int32 [tokens].
        rate: Probability of dropping a value, at least 0 and below 1.
        columns: Result of `column_hashes`. It is needed if torch.compile makes the width a variable: compiled code of
            torch 2.11 for CUDA then counts columns in int64, in which products do not wrap around.

    Returns:
        [tokens, dim]
    """
    if columns is None:
        columns = column_hashes(values.shape[1], values.device)
    # the highest bits decide; the finaliser's last shift improves only the lowest bits, so it is left out
    kept = _finalise(hashes.unsqueeze(1) + columns, last_shift=False) >= threshold(rate)
    return values * kept * (1 / (1 - rate))


def threshold(rate: float) -> int:
    """Return the lowest hash (int32) at which a value is kept."""
    return round(rate * 2**32) - 2**31


def _finalise(bits: Tensor, last_shift: bool = True) -> Tensor:
    """Apply lowbias32 in place; each bit of the result depends on all bits of the argument.

    Args:
        bits: int32; products wrap around.
        last_shift: Whether to apply the last of the three shifts.
    """
    for shift, multiplier in ((16, FIRST), (15, SECOND)):
        shifted = bits >> shift
        shifted &= (1 << (32 - shift)) - 1  # the shift of an int32 fills with the sign bit
        bits ^= shifted
        bits *= multiplier
    return bits ^ ((bits >> 16) & 0xFFFF) if last_shift else bits


class HashedDropout(nn.Dropout):
    """Dropout by hash, which replaces an `nn.Dropout` module of a transformers model.

    Args:
        rate: Probability of dropping a value.
        sites: Indices of this module's sites, one for each call in a forward pass.
        source: Object that returns the hashes of the running forward pass.
    """

    def __init__(self, rate: float, sites: list[int], source: HashSource) -> None:
        super().__init__(rate)
        self.sites, self.source = sites, source

    def forward(self, values: Tensor) -> Tensor:
        """Drop values [..., dim]. Outside of the encoder's forward pass, act like `nn.Dropout`."""
        if not self.training or self.p == 0:
            return values
        found = self._hashes(values)
        if found is None:
            return super().forward(values)
        hashes, columns = found
        return hashed_dropout(values.reshape(-1, values.shape[-1]), hashes, self.p, columns).view(values.shape)

    @torch._dynamo.disable  # type: ignore[attr-defined]
    def _hashes(self, values: Tensor) -> tuple[Tensor, Tensor] | None:
        hashes = self.source.next_hashes(self, values.shape[:-1])
        return None if hashes is None else (hashes, self.source.columns(values.shape[-1], values.device))


class HashSource(Protocol):
    """An object that returns the hashes of the running forward pass to dropout modules."""

    def next_hashes(self, module: HashedDropout, shape: torch.Size) -> Tensor | None:
        """Return the hashes of a module's next call, int32 [product of `shape`]; None outside of a forward pass."""
        ...

    def columns(self, width: int, device: torch.device) -> Tensor:
        """Return `column_hashes`, computed once for each width."""
        ...
