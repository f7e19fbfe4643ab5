"""The rows of each list, for attention across rows. This module can be imported without Triton."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

KEYS = 32  # number of first tokens whose gradients a Triton program sums


class ListTensors(NamedTuple):
    """The rows of each list.

    Args:
        first_rows: For each row, the index of the first row of its list, int32 [rows].
        end_rows: For each row, the index after the last row of its list, int32 [rows].
        token_rows: Row of each token, int32 [tokens].
        key_blocks: Blocks of up to `KEYS` rows of one list, int32 [blocks, 2]: the index of the list's first row (-1:
            the block is unused), and how many rows of the list come before the block.
        biases: For each row, what is added to the logits of other rows' first tokens, in base 2, float32 [rows].
        cells: Row in each cell of a grid of lists, int64 [lists, longest list]; -1 in cells without a row.
        places: For each row, its cell in the flattened grid, int64 [rows]; -1 for rows after the last list.
    """

    first_rows: Tensor
    end_rows: Tensor
    token_rows: Tensor
    key_blocks: Tensor
    biases: Tensor
    cells: Tensor
    places: Tensor


def list_tensors(
    lists: Tensor, max_list: int, cu_seqlens: Tensor, token_rows: Tensor, list_bias: Tensor | None = None
) -> ListTensors:
    """Return the rows of each list, computed on the device. Rows after the last list form lists of one row each.

    Args:
        lists: Number of rows of each list, int64 [lists].
        max_list: Largest number in `lists`.
        cu_seqlens: Cumulative row lengths, int32 [rows + 1].
        token_rows: Row of each token, int64 [tokens].
        list_bias: What is added to the logits of other rows' first tokens, by list, [lists]; None: nothing.
    """
    rows = torch.arange(len(cu_seqlens) - 1, device=lists.device)
    ends = lists.cumsum(0)
    owners = torch.searchsorted(ends, rows, right=True)
    inside, owners = owners < len(lists), owners.clamp(max=len(lists) - 1)
    first = torch.where(inside, (ends - lists)[owners], rows)
    end = torch.where(inside, ends[owners], rows + 1)
    block_ends = ((lists + KEYS - 1) // KEYS).cumsum(0)
    numbers = torch.arange(len(rows) // KEYS + len(lists), device=lists.device)
    of_block = torch.searchsorted(block_ends, numbers, right=True)
    used, of_block = of_block < len(lists), of_block.clamp(max=len(lists) - 1)
    before = (block_ends - (lists + KEYS - 1) // KEYS)[of_block]
    starts = torch.where(used, (ends - lists)[of_block], -1)
    key_blocks = torch.stack([starts, (numbers - before) * KEYS], 1)
    of_rows = torch.zeros(len(rows), device=lists.device)
    if list_bias is not None:
        of_rows = torch.where(inside, list_bias[owners] / math.log(2), 0.0).float()
    columns = torch.arange(max_list, device=lists.device)
    cells = torch.where(columns < lists[:, None], (ends - lists)[:, None] + columns, -1)
    places = torch.where(inside, owners * max_list + rows - first, -1)
    return ListTensors(first.int(), end.int(), token_rows.int(), key_blocks.int(), of_rows, cells, places)
