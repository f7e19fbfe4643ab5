"""Attention of first tokens alone, over states, in lists: to their own row and to the other rows' first tokens.

`ranker.encoders.layer.first_token_attention` explains why the other tokens need no keys and values. A kernel averages
the states of each row (`kernels.first_attention`). Batched products over a grid [lists, longest list] average the other
rows' first tokens, and the softmax sums of both parts give their weights. The backward pass uses the sums and averages
over all keys, so both parts can be differentiated separately (Dao et al., 2022, arXiv:2205.14135).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ranker.encoders.attention import PackedRows
from ranker.encoders.kernels.lists import ListTensors

try:
    from ranker.encoders.kernels import first_attention
except ImportError:  # no Triton
    first_attention = None  # type: ignore[assignment]


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
        lists = ListTensors(*rows.lists)
        cells, places = lists.cells.clamp(min=0).flatten(), lists.places.clamp(min=0)
        count, longest = lists.cells.shape
        in_list = (lists.places >= 0)[:, None]
        scale = (dim // heads) ** -0.5
        own, own_logits, own_sums = kernels.first_attention(states, queries, rows.cu_seqlens, rows.cu_keys, rows.blocks)
        firsts = states.index_select(0, rows.cu_seqlens.index_select(0, cells)).view(count, longest, dim)
        asked = queries.index_select(0, cells).view(count, longest * heads, dim)
        logits = _product(asked, firsts.transpose(1, 2)).view(count, longest, heads, longest)
        logits = torch.add(_added(lists, logits.dtype), logits, alpha=scale)
        grid_sums = own_sums.index_select(0, cells).view(count, longest, heads, 1) * math.log(2)
        logs = torch.cat([logits, grid_sums], 3).log_softmax(3)  # a row's own states are one more key
        own_logs = torch.where(in_list, logs[..., -1].flatten(0, 1).index_select(0, places), 0.0)
        weights = logs[..., :-1].exp().view(count, longest * heads, longest)
        others = _product(weights.to(states.dtype), firsts).view(-1, heads, dim).index_select(0, places)
        average = own * own_logs.exp()[..., None]
        average = torch.where(in_list[..., None], average + others, average)
        sums = own_sums - own_logs / math.log(2)
        ctx.rows, ctx.kernels, ctx.scale = rows, kernels, scale
        ctx.save_for_backward(states, queries, average, own_logits, sums, firsts, asked, weights)
        return average.to(states.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        states, queries, average, own_logits, sums, firsts, asked, weights = ctx.saved_tensors
        rows, lists = ctx.rows, ListTensors(*ctx.rows.lists)
        cells, places = lists.cells.clamp(min=0).flatten(), lists.places.clamp(min=0)
        grad, grad_queries = ctx.kernels.first_attention_backward(
            grad_out, average, own_logits, sums, states, queries, rows.cu_seqlens, rows.cu_keys, rows.blocks
        )
        upstream = grad_out.index_select(0, cells).view_as(asked)
        means = (grad_out * average).sum(-1).index_select(0, cells).view(*weights.shape[:2], 1)
        slopes = weights * (_product(upstream, firsts.transpose(1, 2)) - means) * ctx.scale
        slopes, weights = slopes.to(states.dtype), weights.to(states.dtype)
        added = _product(slopes, firsts).view(-1, *queries.shape[1:]).index_select(0, places)
        added = torch.where((lists.places >= 0)[:, None, None], added, 0.0)
        grad_firsts = _product(slopes.transpose(1, 2), asked) + _product(weights.transpose(1, 2), upstream)
        # in a fixed order: only one cell has a row's first token, and cells without a row add 0
        grad.index_add_(0, rows.cu_seqlens.index_select(0, cells), grad_firsts.flatten(0, 1).to(grad.dtype))
        return grad, (grad_queries + added).to(queries.dtype), None, None


def _added(lists: ListTensors, dtype: torch.dtype) -> Tensor:
    """Return what is added to the logits of other rows' first tokens, [lists, longest list, 1, longest list].

    It is -inf for a row's own first token and for cells without a row.
    """
    has_row, (_, longest) = lists.cells >= 0, lists.cells.shape
    bias = lists.biases.index_select(0, lists.cells[:, 0].clamp(min=0)).to(dtype) * math.log(2)
    others = has_row[:, :, None] & has_row[:, None] & ~torch.eye(longest, dtype=torch.bool, device=bias.device)
    return torch.where(others, bias[:, None, None], -math.inf)[:, :, None]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the products of two batches of matrices, in float32; float64 stays as it is."""
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    precise = torch.promote_types(left.dtype, torch.float32)
    return torch.bmm(left.to(precise), right.to(precise))
