"""Groups of rows with similar lengths, so that a computation on padded tensors has little padding."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ranker.data.ragged import tensor_ranges
from ranker.types import TokenBatch

NEAR = 0.8  # a row joins a group if it has at least this share of the length of the group's longest row


class RowGroup(NamedTuple):
    """Rows of a batch that are padded to one length.

    Args:
        rows: Indices of the rows, int64 [rows].
        lengths: Length of each of these rows, int64 [rows].
        longest: The largest of these lengths, as an int.
        uniform: Whether all lengths are equal.
    """

    rows: Tensor
    lengths: Tensor
    longest: int
    uniform: bool


def row_groups(cu_seqlens: Tensor, shortest: float = NEAR) -> list[RowGroup]:
    """Sort rows by length, longest first, and cut them into groups of similar lengths; empty rows are left out.

    Args:
        cu_seqlens: Cumulative row lengths, int32 [rows + 1]. On a GPU, the host waits for them.
        shortest: Least length in a group divided by the group's largest, above 0. 1: all rows of a group have one
            length.
    """
    lengths = cu_seqlens.diff().tolist()
    order = sorted((row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row])
    groups: list[list[int]] = []
    for row in order:
        if not groups or lengths[row] < shortest * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(row)
    device = cu_seqlens.device
    return [
        RowGroup(
            torch.tensor(rows, device=device),
            torch.tensor([lengths[row] for row in rows], device=device),
            lengths[rows[0]],
            lengths[rows[0]] == lengths[rows[-1]],
        )
        for rows in groups
    ]


def select_rows(batch: TokenBatch, group: RowGroup) -> tuple[TokenBatch, Tensor]:
    """Return the rows of a group as a batch, and the indices of their tokens in the whole batch, int64 [tokens].

    Row ids are kept, so dropout masks are those of the whole batch.
    """
    num_tokens = int(group.lengths.sum())
    indices = tensor_ranges(batch.cu_seqlens[:-1].long()[group.rows], group.lengths, num_tokens)
    attended = None if batch.attended is None else batch.attended[group.rows]
    selected = replace(
        batch,
        tokens=batch.tokens[indices],
        segments=batch.segments[indices],
        cu_seqlens=torch.nn.functional.pad(group.lengths.cumsum(0), (1, 0)).int(),
        max_length=group.longest,
        attended=attended,
        num_attended=0 if attended is None else int(attended.sum()),
        row_ids=group.rows if batch.row_ids is None else batch.row_ids[group.rows],
    )
    return selected, indices
