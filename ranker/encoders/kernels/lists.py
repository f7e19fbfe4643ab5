"""The rows of each list, for attention across rows. This module can be imported without Triton."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ListTensors(NamedTuple):
    """The rows of each list.

    Args:
        first_tokens: Index of each row's first token, int64 [rows]; that of the last token for empty rows at the end.
        first_rows: For each row, the index of the first row of its list, int32 [rows].
        end_rows: For each row, the index after the last row of its list, int32 [rows].
        token_rows: Row of each token, int64 [tokens].
        key_blocks: Blocks of up to `key_block` rows of one list, int32 [blocks, 2]: the index of the list's first row
            (-1: the block is unused), and how many rows of the list come before the block.
        biases: For each row, what is added to the logits of other rows' first tokens, in base 2, float32 [rows].
        cells: Row in each cell of a grid of lists, int64 [lists, longest list]; -1 in cells without a row.
    """

    first_tokens: Tensor
    first_rows: Tensor
    end_rows: Tensor
    token_rows: Tensor
    key_blocks: Tensor
    biases: Tensor
    cells: Tensor

    @property
    def key_block(self) -> int:
        """Number of first tokens whose gradients a Triton program sums at a time."""
        return key_block(self.longest)

    @property
    def longest(self) -> int:
        """Number of rows of the longest list."""
        return self.cells.shape[1]


def key_block(longest: int) -> int:
    """Return `ListTensors.key_block` for lists of up to `longest` rows; measured on an H200, see docs/listwise.md."""
    return 64 if longest > 64 else 32
