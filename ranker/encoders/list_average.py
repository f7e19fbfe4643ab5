"""Attention of first tokens alone, over states, in lists: to their own row and to the other rows' first tokens.

`ranker.encoders.layer.first_token_attention` explains why the other tokens need no keys and values. A kernel averages
the states of each row (`kernels.first_attention`). Batched products over a grid [lists, longest list] average the other
rows' first tokens, and the softmax sums of both parts give their weights. The backward pass computes the weights again
from the sums over all keys, so both parts can be differentiated separately (Dao et al., 2022, arXiv:2205.14135).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ranker.encoders.attention import PackedRows
from ranker.encoders.kernels.lists import ListTensors

try:
    from ranker.encoders.kernels import first_attention
except ImportError:  # no Triton
    first_attention = None  # type: ignore[assignment]

LARGEST = 2**26  # values of a part's largest tensor: 256 MiB in float32


def list_average(states: Tensor, queries: Tensor, rows: PackedRows, kernels: Any = first_attention) -> Tensor:
    """Average the states of each row and of the first tokens of its list's other rows.

    The weights are the softmax of one query per row and head.

    Args:
        states: bf16 or fp16 [tokens, dim].
        queries: Each row's queries, multiplied by the key weights (`first_token_attention`), [rows, heads, dim].
        rows: Row boundaries and lists. Rows after the last list average only their own states.
        kernels: The module `ranker.encoders.kernels.first_attention`, or an object with the same functions.

    Returns:
        [rows, heads, dim]
    """
    average: Any = _ListAverage.apply(states, queries, rows, kernels)
    return average


class _ListAverage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, queries: Tensor, rows: PackedRows, kernels: Any) -> Tensor:
        heads, dim = queries.shape[1:]
        own, own_logits, own_sums = kernels.first_attention(states, queries, rows.cu_seqlens, rows.cu_keys, rows.blocks)
        parts = _parts(rows, heads, dim)
        # one row more than there are: cells without a row write into it
        others, own_logs = own.new_zeros(len(own) + 1, heads, dim), own_sums.new_zeros(len(own) + 1, heads)
        for part in parts:
            firsts, asked = part.states(states), part.take(queries)
            logits = part.logits(asked, firsts)
            sums = part.take(own_sums)[..., None] * math.log(2)
            logs = torch.cat([logits, sums], 3).log_softmax(3)  # a row's own states are one more key
            part.put(own_logs, logs[..., -1])
            part.put(others, _product(logs[..., :-1].exp().flatten(1, 2).to(states.dtype), firsts))
        average = own * own_logs[:-1].exp()[..., None] + others[:-1]
        sums = own_sums - own_logs[:-1] / math.log(2)
        ctx.rows, ctx.kernels, ctx.parts = rows, kernels, parts
        ctx.save_for_backward(states, queries, average, own_logits, sums)
        return average.to(states.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        states, queries, average, own_logits, sums = ctx.saved_tensors
        rows = ctx.rows
        grad, grad_queries = ctx.kernels.first_attention_backward(
            grad_out, average, own_logits, sums, states, queries, rows.cu_seqlens, rows.cu_keys, rows.blocks
        )
        means = (grad_out * average).sum(-1)
        added = means.new_zeros(len(queries) + 1, *queries.shape[1:])
        for part in ctx.parts:
            firsts, asked, upstream = part.states(states), part.take(queries), part.take(grad_out)
            log_sums = part.take(sums)[..., None] * math.log(2)
            weights = (part.logits(asked, firsts) - log_sums).exp().flatten(1, 2)
            asked, upstream = asked.flatten(1, 2), upstream.flatten(1, 2)
            change = _product(upstream, firsts.transpose(1, 2)) - part.take(means).flatten(1)[..., None]
            slopes, weights = (weights * change * part.scale).to(states.dtype), weights.to(states.dtype)
            part.put(added, _product(slopes, firsts))
            grad_firsts = _product(slopes.transpose(1, 2), asked) + _product(weights.transpose(1, 2), upstream)
            # in a fixed order: only one cell has a row's first token, and cells without a row add 0
            grad.index_add_(0, part.tokens, grad_firsts.flatten(0, 1).to(grad.dtype))
        return grad, (grad_queries + added[:-1]).to(queries.dtype), None, None


class _Part(NamedTuple):
    """Some lists of a batch.

    Args:
        cells: Row in each cell, [lists, longest list]; -1 in cells without a row.
        tokens: First token of the row in each cell, [cells]; row 0's in cells without a row.
        added: What is added to the logits of the first tokens, [lists, longest list, 1, longest list]; -inf for a row's
            own first token and for cells without a row.
        scale: Factor of the logits.
    """

    cells: Tensor
    tokens: Tensor
    added: Tensor
    scale: float

    def take(self, of_rows: Tensor) -> Tensor:
        """Return values of rows by cell, [lists, longest list, ...]; row 0's in cells without a row."""
        taken = of_rows.index_select(0, self.cells.clamp(min=0).flatten())
        return taken.view(*self.cells.shape, *of_rows.shape[1:])

    def states(self, states: Tensor) -> Tensor:
        """Return the states of first tokens by cell, [lists, longest list, dim]."""
        return states.index_select(0, self.tokens).view(*self.cells.shape, -1)

    def put(self, of_rows: Tensor, values: Tensor) -> None:
        """Write values of cells [lists, longest list, ...] into `of_rows`; its last row is for cells without a row."""
        cells = torch.where(self.cells >= 0, self.cells, len(of_rows) - 1).flatten()
        of_rows.index_copy_(0, cells, values.reshape(-1, *of_rows.shape[1:]).to(of_rows.dtype))

    def logits(self, asked: Tensor, firsts: Tensor) -> Tensor:
        """Return the logits of all cells' queries and first tokens, [lists, longest list, heads, longest list]."""
        count, longest, heads, _ = asked.shape
        products = _product(asked.flatten(1, 2), firsts.transpose(1, 2)).view(count, longest, heads, longest)
        return torch.add(self.added.to(products.dtype), products, alpha=self.scale)


def _parts(rows: PackedRows, heads: int, dim: int) -> list[_Part]:
    """Cut the lists into parts, because a long list beside many short ones has a grid of many empty cells."""
    lists = ListTensors(*rows.lists)
    longest = lists.longest
    size = max(1, LARGEST // max(1, longest * heads * (dim + longest)))
    parts = []
    for cells in lists.cells.split(size):
        has_row = cells >= 0
        bias = lists.biases.index_select(0, cells[:, 0].clamp(min=0)).double() * math.log(2)
        others = has_row[:, :, None] & has_row[:, None] & ~torch.eye(longest, dtype=torch.bool, device=cells.device)
        added = torch.where(others, bias[:, None, None], -math.inf)[:, :, None]
        tokens = lists.first_tokens.index_select(0, cells.clamp(min=0).flatten())
        parts.append(_Part(cells, tokens, added, (dim // heads) ** -0.5))
    return parts


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the products of two batches of matrices, in float32; float64 stays as it is."""
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    precise = torch.promote_types(left.dtype, torch.float32)
    return torch.bmm(left.to(precise), right.to(precise))
