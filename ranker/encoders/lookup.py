"""Embeddings: words, positions and segments in one kernel, and gradients of tables with few rows, summed in a fixed order on CUDA.

There torch adds them up with atomics where many tokens share few rows (`embedding_dense_backward` of torch 2.11), in an
order that may change from run to run, and the last bits with it. Gradients of words, whose table has many rows, it
sorts and sums in order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ranker.encoders.attention import RaggedLayout
from ranker.interactions.pooling import sums_in_order

try:
    from ranker.encoders.kernels import embedding_norm as kernel
except ImportError:  # no Triton
    kernel = None  # type: ignore[assignment]

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


def embedded(
    embeddings: Any,
    segments: Tensor,
    layout: RaggedLayout,
    shift: int,
    hashes: Tensor | None,
    rate: float,
    dtype: torch.dtype,
) -> Tensor:
    """Words, positions and segments looked up, summed, normed and dropped in one kernel.

    Args:
        embeddings: Of a BERT, whose table of segments has at most `FEW` rows.
        segments: int64 [tokens].
        layout: Of the tokens.
        shift: First position.
        hashes: What is dropped by, int32 [tokens]; None: nothing is.
        rate: Of dropout.
        dtype: Of the result, [tokens, dim].
    """
    words, places, kinds, norm = (
        embeddings.word_embeddings,
        embeddings.position_embeddings,
        embeddings.token_type_embeddings,
        embeddings.LayerNorm,
    )
    where = Where(layout, segments, shift, hashes, rate, norm.eps, dtype, words.padding_idx)
    found: Any = _Embedded.apply(where, words.weight, places.weight, kinds.weight, norm.weight, norm.bias)
    return found


class Where(NamedTuple):
    """What `embedded` looks up, and how, beside the weights; see there."""

    layout: RaggedLayout
    segments: Tensor
    offset: int
    hashes: Tensor | None
    rate: float
    epsilon: float
    dtype: torch.dtype
    padding: int | None


def position_sums(values: Tensor, layout: RaggedLayout, places: int) -> Tensor:
    """Sum what stands at the same place of each row, in float32 at least.

    Args:
        values: [tokens, dim].
        layout: Of the tokens.
        places: As many as the longest row of any batch has: a CUDA graph meets other maximum lengths than the one that
            it was captured with.

    Returns:
        [places, dim]
    """
    batch = layout.batch
    groups = -(-batch.num_rows // GROUP)
    order = (layout.rows // GROUP * places + layout.positions).argsort(stable=True)
    lengths = pad(batch.cu_seqlens.diff(), (0, groups * GROUP - batch.num_rows)).view(groups, GROUP, 1)
    counts = (lengths > torch.arange(places, device=lengths.device)).sum(1).flatten()
    return sums_in_order(values.index_select(0, order), counts).view(groups, places, -1).sum(0)


class _Embedded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, where: Where, words: Tensor, places: Tensor, kinds: Tensor, gain: Tensor, shift: Tensor
    ) -> Tensor:
        ctx.where = where
        ctx.save_for_backward(words, places, kinds, gain)
        ctx.shift_type = shift.dtype
        ids, positions = where.layout.batch.tokens, where.layout.positions
        return kernel.embedding_norm(
            (words, places, kinds),
            ids,
            positions,
            where.segments,
            where.offset,
            where.hashes,
            where.rate,
            gain,
            shift,
            where.epsilon,
            where.dtype,
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Any, ...]:
        where, (words, places, kinds, gain) = ctx.where, ctx.saved_tensors
        ids, positions = where.layout.batch.tokens, where.layout.positions
        grad, sums = kernel.embedding_norm_backward(
            above,
            (words, places, kinds),
            ids,
            positions,
            where.segments,
            where.offset,
            where.hashes,
            where.rate,
            gain,
            where.epsilon,
        )
        by_word = by_place = None
        if ctx.needs_input_grad[1]:
            unread = -1 if where.padding is None else where.padding
            by_word = torch.ops.aten.embedding_dense_backward(grad, ids, len(words), unread, False).to(words.dtype)
        if ctx.needs_input_grad[2]:
            by_place = _by_position(grad, where.layout, where.offset, len(places)).to(places.dtype)
        return None, by_word, by_place, sums[2:].to(kinds.dtype), sums[0].to(gain.dtype), sums[1].to(ctx.shift_type)


def _by_position(above: Tensor, layout: RaggedLayout, shift: int, rows: int) -> Tensor:
    """The gradient of a table of positions, [rows, dim]."""
    return pad(position_sums(above, layout, rows - shift), (0, 0, shift, 0))


class _Positions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, layout: RaggedLayout, shift: int) -> Tensor:
        ctx.layout, ctx.shift, ctx.rows = layout, shift, len(table)
        return table.index_select(0, layout.positions + shift)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Any, ...]:
        return _by_position(above, ctx.layout, ctx.shift, ctx.rows).to(above.dtype), None, None


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
        return torch.stack(
            [above.masked_fill((segments != row).unsqueeze(1), 0.0).sum(0) for row in range(ctx.rows)]
        ), None
