"""Lookups in tables with few rows, whose gradients are summed in a fixed order on CUDA.

There torch adds them up with atomics where many tokens share few rows (`embedding_dense_backward` of torch 2.11), in an order that may change from
run to run, and the last bits with it. Gradients of words, whose table has many rows, it sorts and sums in order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ranker.layers.attention import RaggedLayout
from ranker.layers.pooling import sums_in_order

GROUP = 256  # rows of a batch that are summed one after another, beside other groups
FEW = 4  # rows of a table, each of which gets a sum over all tokens


def position_embedding(table: nn.Embedding, layout: RaggedLayout, shift: int) -> Tensor:
    """The embedding of each token's place in its row, counted from `shift`, [tokens, dim]."""
    if not table.weight.is_cuda:
        return table(layout.positions + shift)
    found: Any = _Positions.apply(table.weight, layout, shift)
    return found


def segment_embedding(table: nn.Embedding, segments: Tensor) -> Tensor:
    """The embedding of each token's segment, [tokens, dim]."""
    if not table.weight.is_cuda or table.num_embeddings > FEW:
        return table(segments)
    found: Any = _Segments.apply(table.weight, segments)
    return found


def position_sums(values: Tensor, layout: RaggedLayout, places: int) -> Tensor:
    """Sum what stands at the same place of each row, in float32 at least.

    Args:
        values: [tokens, dim].
        layout: Of the tokens.
        places: As many as the longest row of any batch has: a CUDA graph meets other maximum lengths than the one that it was captured with.

    Returns:
        [places, dim]
    """
    batch = layout.batch
    groups = -(-batch.num_rows // GROUP)
    order = (layout.rows // GROUP * places + layout.positions).argsort(stable=True)
    lengths = pad(batch.cu_seqlens.diff(), (0, groups * GROUP - batch.num_rows)).view(groups, GROUP, 1)
    counts = (lengths > torch.arange(places, device=lengths.device)).sum(1).flatten()
    return sums_in_order(values.index_select(0, order), counts).view(groups, places, -1).sum(0)


class _Positions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, layout: RaggedLayout, shift: int) -> Tensor:
        ctx.layout, ctx.shift, ctx.rows = layout, shift, len(table)
        return table.index_select(0, layout.positions + shift)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Any, ...]:
        sums = position_sums(above, ctx.layout, ctx.rows - ctx.shift)
        return pad(sums, (0, 0, ctx.shift, 0)).to(above.dtype), None, None


class _Segments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, segments: Tensor) -> Tensor:
        ctx.save_for_backward(segments)
        ctx.rows = len(table)
        return table.index_select(0, segments)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Any, ...]:
        (segments,) = ctx.saved_tensors
        return torch.stack([above.masked_fill((segments != row).unsqueeze(1), 0.0).sum(0) for row in range(ctx.rows)]), None
