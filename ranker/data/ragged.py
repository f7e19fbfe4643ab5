"""Compute indices into ragged arrays, which store rows of unequal length one after another.

A ragged array holds row r in `values[offsets[r]:offsets[r + 1]]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # readers of data use the NumPy functions only and do not import torch
    from torch import Tensor


def row_offsets(lengths: np.ndarray | list[int]) -> np.ndarray:
    """Return the offsets of rows with these lengths, int64 [rows + 1].

    >>> row_offsets([2, 0, 3]).tolist()
    [0, 2, 2, 5]
    """
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def ranges(starts: np.ndarray | int, lengths: np.ndarray) -> np.ndarray:
    """Concatenate `arange(start, start + length)` over all rows.

    For row starts and lengths of a ragged array, the result gathers these rows: `values[ranges(starts, lengths)]`. For
    `starts=0`, the result is the position of each element within its row.

    Args:
        starts: First index of each row, integers [rows], or one index for all rows.
        lengths: Length of each row, integers [rows]; 0 is allowed.

    Returns:
        Indices, int64 [sum of lengths].

    >>> ranges(np.array([7, 0, 4]), np.array([2, 0, 3])).tolist(), ranges(0, np.array([2, 0, 3])).tolist()
    ([7, 8, 4, 5, 6], [0, 1, 0, 1, 2])
    """
    before = np.cumsum(lengths) - lengths  # number of elements of all earlier rows
    return np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)


def tensor_ranges(starts: Tensor | int, lengths: Tensor, total: int) -> Tensor:
    """Compute `ranges` on tensors, without a host synchronisation.

    Args:
        starts: First index of each row, int64 [rows], or one index for all rows.
        lengths: Length of each row, int64 [rows].
        total: Sum of `lengths`, as a number on the host.

    Returns:
        Indices on the device of `lengths`, int64 [total].

    >>> import torch
    >>> tensor_ranges(torch.tensor([7, 0, 4]), torch.tensor([2, 0, 3]), 5)
    tensor([7, 8, 4, 5, 6])
    """
    import torch

    before = lengths.cumsum(0) - lengths
    shift = (starts - before).repeat_interleave(lengths, output_size=total)
    return torch.arange(total, device=lengths.device) + shift
