"""Pooling: one vector per row of a ragged batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ranker.types import TokenBatch

POOLINGS = ("cls", "mean", "max")


def pool(states: Tensor, batch: TokenBatch, how: str) -> Tensor:
    """Pool the token states of each row.

    Args:
        states: Token states, [tokens, dim].
        batch: The rows that the states belong to; each has at least one token.
        how: `cls` takes a row's first token, `mean` and `max` all its tokens, special ones included.

    Returns:
        [rows, dim]
    """
    if how == "cls":
        return states.index_select(0, batch.cu_seqlens[:-1])
    lengths = batch.cu_seqlens.diff().long()
    rows = torch.repeat_interleave(
        torch.arange(batch.num_rows, device=states.device), lengths, output_size=states.shape[0]
    )
    if how == "mean":
        if states.is_cuda:  # index_add adds up with atomics there, in an order that may change
            sums: Any = RowSums.apply(states, lengths, rows)
        else:
            sums = states.new_zeros(batch.num_rows, states.shape[1]).index_add(0, rows, states)
        return sums / lengths.unsqueeze(1).to(states.dtype)
    if how == "max":
        lowest = states.new_full((batch.num_rows, states.shape[1]), -torch.inf)
        return lowest.scatter_reduce(0, rows.unsqueeze(1).expand_as(states), states, "amax")
    raise ValueError(f"pooling: expected one of {', '.join(POOLINGS)}, got {how!r}")


def sums_in_order(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum consecutive values, so many at a time, one after another and in float32 at least.

    Args:
        values: [values, dim].
        lengths: Values of each sum, int64 [sums].

    Returns:
        [sums, dim]
    """
    exact = (
        values if values.dtype == torch.float64 else values.float()
    )  # half precision would be summed in half precision
    return torch.segment_reduce(exact, "sum", lengths=lengths, axis=0, unsafe=True)  # safe would wait for the device


class RowSums(torch.autograd.Function):
    """`sums_in_order` of states [tokens, dim] over rows of `lengths`, in their precision; `rows` is each token's row."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return sums_in_order(states, lengths).to(states.dtype)

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Any, ...]:
        (rows,) = ctx.saved_tensors
        return above.index_select(0, rows), None, None
