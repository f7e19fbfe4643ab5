"""Pool the states of tokens into one vector for each row of a ragged batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ranker.types import TokenBatch


def pool(states: Tensor, batch: TokenBatch, pooling: str, skipped: int = 0) -> Tensor:
    """Pool the token states of each row, as sentence-transformers' Pooling does.

    Tokens that no token attends to (`TokenBatch.attended`) are not pooled.

    Args:
        states: Token states, [tokens, dim].
        batch: The batch to which the states belong; each row has at least one token.
        pooling: `cls` takes the first token of a row, `last` the last one. `mean`, `max` and `weightedmean` combine all
            tokens of a row, special tokens included. The weights of `weightedmean` are 1, 2, 3, ... (SGPT, Muennighoff,
            2022, arXiv:2202.08904).
        skipped: Number of tokens at the start of each row that are not pooled. `last` ignores it. `weightedmean` still
            counts its weights from the start of the row.

    Returns:
        [rows, dim]
    """
    if pooling not in POOLINGS:
        raise ValueError(f"pooling: expected one of {', '.join(POOLINGS)}, got {pooling!r}")
    lengths = (batch.cu_seqlens.diff() if batch.attended is None else batch.attended).long()
    return POOLINGS[pooling](states, _Rows(batch, lengths, skipped))


@dataclass(frozen=True)
class _Rows:
    """Describe which tokens of each row are pooled.

    Args:
        batch: The batch.
        lengths: Number of tokens of each row, without tokens that no token attends to, int64 [rows].
        skipped: Number of tokens at each row's start that are not pooled.
    """

    batch: TokenBatch
    lengths: Tensor
    skipped: int

    @property
    def starts(self) -> Tensor:
        """Index of each row's first token, int64 [rows]."""
        return self.batch.cu_seqlens[:-1].long()

    @property
    def of_tokens(self) -> Tensor:
        """Row of each token, int64 [tokens]."""
        rows = torch.arange(self.batch.num_rows, device=self.lengths.device)
        full_lengths = self.batch.cu_seqlens.diff().long()
        return torch.repeat_interleave(rows, full_lengths, output_size=self.batch.num_tokens)

    @property
    def positions(self) -> Tensor:
        """Position of each token in its row, from 0, int64 [tokens]."""
        indices = torch.arange(self.batch.num_tokens, device=self.lengths.device)
        return indices - self.starts.index_select(0, self.of_tokens)

    @property
    def left_out(self) -> Tensor | None:
        """True for tokens that are not pooled, bool [tokens]; None: all are pooled."""
        if self.batch.attended is None and not self.skipped:
            return None
        positions = self.positions
        return (positions < self.skipped) | (positions >= self.lengths.index_select(0, self.of_tokens))

    def sums(self, values: Tensor) -> Tensor:
        """Sum the values [tokens, dim] of each row, [rows, dim]."""
        if not values.is_cuda:
            return values.new_zeros(self.batch.num_rows, values.shape[1]).index_add(0, self.of_tokens, values)
        # on CUDA, index_add uses atomics, whose order of summation can differ between runs
        sums: Any = RowSums.apply(values, self.batch.cu_seqlens.diff().long(), self.of_tokens)
        return sums


def _first(states: Tensor, rows: _Rows) -> Tensor:
    positions = torch.where(rows.lengths > rows.skipped, rows.skipped, 0) if rows.skipped else 0
    return states.index_select(0, rows.starts + positions)


def _last(states: Tensor, rows: _Rows) -> Tensor:
    return states.index_select(0, rows.starts + rows.lengths - 1)


def _mean(states: Tensor, rows: _Rows) -> Tensor:
    left_out = rows.left_out
    pooled = states if left_out is None else states.masked_fill(left_out.unsqueeze(1), 0)
    counts = (rows.lengths - rows.skipped).clamp(min=1) if rows.skipped else rows.lengths
    return rows.sums(pooled) / counts.unsqueeze(1).to(states.dtype)


def _weighted_mean(states: Tensor, rows: _Rows) -> Tensor:
    # float16 and bfloat16 would round large positions
    weights = (rows.positions + 1).to(states.dtype if states.dtype == torch.float64 else torch.float32)
    left_out = rows.left_out
    weights = (weights if left_out is None else weights.masked_fill(left_out, 0)).unsqueeze(1)
    return (rows.sums(states * weights) / rows.sums(weights).clamp(min=1)).to(states.dtype)


def _max(states: Tensor, rows: _Rows) -> Tensor:
    left_out = rows.left_out
    pooled = states if left_out is None else states.masked_fill(left_out.unsqueeze(1), -torch.inf)
    lowest = states.new_full((rows.batch.num_rows, states.shape[1]), -torch.inf)
    return lowest.scatter_reduce(0, rows.of_tokens.unsqueeze(1).expand_as(states), pooled, "amax")


POOLINGS: Mapping[str, Callable[[Tensor, _Rows], Tensor]] = {
    "cls": _first,
    "mean": _mean,
    "max": _max,
    "last": _last,
    "weightedmean": _weighted_mean,
}


def sums_in_order(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum consecutive values in order, in float32 or float64.

    Args:
        values: [values, dim].
        lengths: Number of values in each sum, int64 [sums].

    Returns:
        [sums, dim]
    """
    # segment_reduce would sum float16 and bfloat16 values without float32 accumulation
    values = values if values.dtype == torch.float64 else values.float()
    # without `unsafe`, segment_reduce would make the host wait for the device
    return torch.segment_reduce(values, "sum", lengths=lengths, axis=0, unsafe=True)


class RowSums(torch.autograd.Function):
    """Sum the states of each row with `sums_in_order`, rounded to their dtype. Derivatives of any order exist."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
        """Return the sums, [rows, dim].

        Args:
            ctx: Saves `rows` for `backward`.
            states: [tokens, dim].
            lengths: Tokens of each row, int64 [rows].
            rows: Row of each token, int64 [tokens].
        """
        ctx.save_for_backward(rows)
        return sums_in_order(states, lengths).to(states.dtype)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        """Return the gradient of the states, [tokens, dim]."""
        (rows,) = ctx.saved_tensors
        return grad_out.index_select(0, rows), None, None
