"""Pooling: one vector per row of a ragged batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ranker.types import TokenBatch

POOLINGS = ("cls", "mean", "max")


def pool(states: Tensor, batch: TokenBatch, pooling: str) -> Tensor:
    """Pool the token states of each row.

    Args:
        states: Token states, [tokens, dim].
        batch: The batch that the states belong to; each row has at least one token.
        pooling: `cls` takes a row's first token, `mean` and `max` all its tokens, special ones included.

    Returns:
        [rows, dim]
    """
    if pooling == "cls":
        return states.index_select(0, batch.cu_seqlens[:-1])
    lengths = batch.cu_seqlens.diff().long()
    rows = torch.repeat_interleave(
        torch.arange(batch.num_rows, device=states.device), lengths, output_size=states.shape[0]
    )
    if pooling == "mean":
        if states.is_cuda:  # index_add uses atomics there, in an order that may change
            sums: Any = RowSums.apply(states, lengths, rows)
        else:
            sums = states.new_zeros(batch.num_rows, states.shape[1]).index_add(0, rows, states)
        return sums / lengths.unsqueeze(1).to(states.dtype)
    if pooling == "max":
        lowest = states.new_full((batch.num_rows, states.shape[1]), -torch.inf)
        return lowest.scatter_reduce(0, rows.unsqueeze(1).expand_as(states), states, "amax")
    raise ValueError(f"pooling: expected one of {', '.join(POOLINGS)}, got {pooling!r}")


def sums_in_order(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum consecutive values in order, in float32 or float64.

    Args:
        values: [values, dim].
        lengths: Number of values in each sum, int64 [sums].

    Returns:
        [sums, dim]
    """
    # segment_reduce would sum half precision in half precision
    values = values if values.dtype == torch.float64 else values.float()
    # without `unsafe` it would wait for the device
    return torch.segment_reduce(values, "sum", lengths=lengths, axis=0, unsafe=True)


class RowSums(torch.autograd.Function):
    """`sums_in_order` of states over rows, in the precision of the states, with gradients of any order."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
        """Return the sums, [rows, dim].

        Args:
            ctx: Of autograd.
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
