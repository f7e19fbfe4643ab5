"""Ragged batches: row and position of each token, conversion to and from padded tensors, padding rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ranker.data.ragged import tensor_ranges
from ranker.encoders.kernels.blocks import BLOCK
from ranker.encoders.row_groups import row_groups
from ranker.types import TokenBatch

TILE = 64  # number of tokens, see `pad_to_tiles`


class PaddedGroup(NamedTuple):
    """Rows of similar lengths, padded to the longest row of the group.

    Args:
        rows: Indices of the rows, int64 [group rows].
        tokens: Index in the batch of each token of these rows, int64 [group tokens].
        cells: Index in the flattened padded tensor of each token of these rows, int64 [group tokens].
        key_mask: True for tokens that are attended to, bool [group rows, length].
    """

    rows: Tensor
    tokens: Tensor
    cells: Tensor
    key_mask: Tensor

    def pad(self, flat: Tensor) -> Tensor:
        """Convert [tokens, ...] of the batch to [group rows, length, ...]; padding is 0."""
        taken, shape = flat.index_select(0, self.tokens), self.key_mask.shape
        if len(taken) < shape.numel():
            taken = flat.new_zeros(shape.numel(), *flat.shape[1:]).index_copy(0, self.cells, taken)
        return taken.view(*shape, *flat.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        """Convert [group rows, length, ...] to [group tokens, ...]."""
        return padded.reshape(-1, *padded.shape[2:]).index_select(0, self.cells)


@dataclass(frozen=True)
class RaggedLayout:
    """Row and position of each token of a ragged batch, computed once per forward pass and used by every layer.

    Args:
        batch: The batch.
        row_indices: Row of each token, int64 [tokens].
        position_ids: Position of each token in its row, from 0, int64 [tokens].
        key_indices: Indices of the attended tokens, int64 [keys]; None if all tokens are attended to.
        cu_keys: Cumulative numbers of attended tokens, int32 [rows + 1].
    """

    batch: TokenBatch
    row_indices: Tensor
    position_ids: Tensor
    key_indices: Tensor | None
    cu_keys: Tensor

    @classmethod
    def of(cls, batch: TokenBatch) -> RaggedLayout:
        """Compute the layout on the batch's device; the host does not wait."""
        starts, lengths = batch.cu_seqlens[:-1].long(), batch.cu_seqlens.diff().long()
        row_indices = torch.repeat_interleave(
            torch.arange(batch.num_rows, device=starts.device), lengths, output_size=batch.num_tokens
        )
        position_ids = torch.arange(batch.num_tokens, device=starts.device) - starts[row_indices]
        key_indices, cu_keys = None, batch.cu_seqlens
        if batch.attended is not None:
            cu_keys = functional.pad(batch.attended.cumsum(0), (1, 0)).int()
            key_indices = tensor_ranges(starts, batch.attended, batch.num_attended)
        return cls(batch, row_indices, position_ids, key_indices, cu_keys)

    @property
    def blocks(self) -> Tensor:
        """Row, and position of the first token, of each block of up to `BLOCK` tokens, int32 [blocks, 2].

        Only the device knows the number of blocks, so the tensor has the largest possible number for so many rows and
        tokens. Unused entries have row -1.
        """
        counts = (self.batch.cu_seqlens.diff().long() + BLOCK - 1) // BLOCK
        ends = counts.cumsum(0)
        numbers = torch.arange(self.batch.num_tokens // BLOCK + self.batch.num_rows, device=ends.device)
        rows = torch.searchsorted(ends, numbers, right=True)
        valid_rows = rows.clamp(max=self.batch.num_rows - 1)
        first_positions = (numbers - (ends - counts)[valid_rows]) * BLOCK
        return torch.stack([torch.where(rows < self.batch.num_rows, rows, -1), first_positions], 1).int()

    @cached_property
    def lengths(self) -> list[int]:
        """Length of each row. On a GPU, the host waits for them."""
        return self.batch.cu_seqlens.diff().tolist()

    @cached_property
    def key_counts(self) -> list[int]:
        """Number of attended tokens of each row. On a GPU, the host waits for them."""
        return self.cu_keys.diff().tolist()

    @cached_property
    def groups(self) -> tuple[PaddedGroup, ...]:
        """Groups of rows for padded attention, without empty rows. On a GPU, the host waits for the row lengths."""
        starts, attended = self.batch.cu_seqlens[:-1].long(), self.batch.attended
        groups = []
        for group in row_groups(self.batch.cu_seqlens):
            columns = torch.arange(group.longest, device=starts.device)
            real = columns < group.lengths.unsqueeze(1)
            cells = real.flatten().nonzero_static(size=int(group.lengths.sum()))[:, 0]
            tokens = (starts[group.rows].unsqueeze(1) + columns).flatten()[cells]
            keys = real if attended is None else columns < attended[group.rows].unsqueeze(1)
            groups.append(PaddedGroup(group.rows, tokens, cells, keys))
        return tuple(groups)

    @cached_property
    def from_groups(self) -> Tensor:
        """Index of each token in the concatenation of the groups, int64 [tokens]."""
        return torch.cat([group.tokens for group in self.groups]).argsort()

    @cached_property
    def _columns(self) -> Tensor:
        return torch.arange(self.batch.max_length, device=self.row_indices.device)

    @cached_property
    def cells(self) -> Tensor:
        """Index of each token in the flattened padded tensor [rows * max_length], int64 [tokens]."""
        return self.row_indices * self.batch.max_length + self.position_ids

    @cached_property
    def mask(self) -> Tensor:
        """True for tokens, False for padding, bool [rows, max_length]."""
        return self._columns < self.batch.cu_seqlens.diff().unsqueeze(1)

    @cached_property
    def key_mask(self) -> Tensor:
        """True for tokens that are attended to, bool [rows, max_length]."""
        return self.mask if self.batch.attended is None else self._columns < self.batch.attended.unsqueeze(1)

    def pad(self, flat: Tensor) -> Tensor:
        """Convert [tokens, ...] to [rows, max_length, ...]; padding is 0."""
        grid = flat.new_zeros(self.mask.numel(), *flat.shape[1:]).index_copy(0, self.cells, flat)
        return grid.view(*self.mask.shape, *flat.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        """Convert [rows, max_length, ...] to [tokens, ...]."""
        return padded.reshape(self.mask.numel(), *padded.shape[2:]).index_select(0, self.cells)


def pad_to_tiles(batch: TokenBatch, multiple: int = TILE, row_multiple: int = 1) -> TokenBatch:
    """Append padding rows until the number of tokens, and the number of rows, are multiples of the given values.

    Matrix products then work on full tiles, and compiled code gets only few shapes. A padding row has at most `TILE`
    tokens. There is one padding row for each `TILE` in `multiple`, and then empty rows until the number of rows is
    right. The maximum length is also rounded up to a multiple of `TILE`.

    Args:
        batch: The batch.
        multiple: Divisor of the number of tokens; itself a multiple of `TILE`.
        row_multiple: Divisor of the number of rows.
    """
    num_padding = -batch.num_tokens % multiple
    num_rows = multiple // TILE
    num_rows += -(batch.num_rows + num_rows) % row_multiple
    row_offsets = torch.arange(num_rows + 1, dtype=torch.int32, device=batch.tokens.device)
    row_offsets = row_offsets.mul_(TILE).clamp_(max=num_padding)
    return TokenBatch(
        functional.pad(batch.tokens, (0, num_padding)),
        functional.pad(batch.segments, (0, num_padding)),
        torch.cat([batch.cu_seqlens, row_offsets[1:] + batch.num_tokens]),
        -(-batch.max_length // TILE) * TILE,
        None if batch.attended is None else torch.cat([batch.attended, row_offsets.diff()]),
        batch.num_attended + num_padding if batch.attended is not None else 0,
        None if batch.row_ids is None else functional.pad(batch.row_ids, (0, num_rows), value=-1),
        lists=batch.lists,  # padding rows belong to no list
        max_list=batch.max_list,
        list_size=batch.list_size,
    )
