"""Word, position and segment embeddings: one kernel for all of them, and deterministic gradients on CUDA.

If many tokens read few rows of a table, torch sums gradients on CUDA with atomics (`embedding_dense_backward` of torch
2.11). The order of the sum, and with it the last bits, may differ between runs. The functions here sum in a fixed
order. They are not needed for word tables, which have many rows: torch sorts their gradients and sums them in order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ranker.encoders.ragged import RaggedLayout
from ranker.interactions.pooling import sums_in_order

try:
    from ranker.encoders.kernels import embedding_norm as kernel
except ImportError:  # no Triton
    kernel = None  # type: ignore[assignment]

GROUP_ROWS = 256  # rows of a batch that are summed one after another; groups of rows are summed in parallel
SMALL_TABLE = 4  # for a table of at most this many rows, the gradient of each row is one sum over all tokens


def position_embedding(table: nn.Embedding, layout: RaggedLayout, first_position: int) -> Tensor:
    """Return the embedding of each token's position, [tokens, dim].

    Args:
        table: Position table.
        layout: Layout of the tokens.
        first_position: Position id of a row's first token.
    """
    if not table.weight.is_cuda:
        return table(layout.position_ids + first_position)
    embedded: Any = _PositionEmbedding.apply(table.weight, layout, first_position)
    return embedded


def segment_embedding(table: nn.Embedding, segments: Tensor) -> Tensor:
    """Return the embedding of each token's segment, [tokens, dim].

    Args:
        table: Segment (token type) table.
        segments: Segment ids, int64 [tokens].
    """
    if not table.weight.is_cuda or table.num_embeddings > SMALL_TABLE:
        return table(segments)
    embedded: Any = _SegmentEmbedding.apply(table.weight, segments)
    return embedded


class EmbeddingInputs(NamedTuple):
    """Arguments of `fused_embedding` that are not weights.

    Args:
        layout: Layout of the tokens.
        segments: Segment ids, int64 [tokens].
        first_position: Position id of a row's first token.
        hashes: Dropout hashes, int32 [tokens]; None: no dropout.
        rate: Probability of dropout.
        dtype: Precision of the result.
    """

    layout: RaggedLayout
    segments: Tensor
    first_position: int
    hashes: Tensor | None
    rate: float
    dtype: torch.dtype


def fused_embedding(embeddings: Any, inputs: EmbeddingInputs) -> Tensor:
    """Look up words, positions and segments, add them, and apply norm and dropout; all in one kernel.

    Args:
        embeddings: The embedding module of a BERT, whose segment table has at most `SMALL_TABLE` rows.
        inputs: The ids to look up, and the dropout.

    Returns:
        [tokens, dim] in `inputs.dtype`.
    """
    norm, words = embeddings.LayerNorm, embeddings.word_embeddings
    embedded: Any = _FusedEmbedding.apply(
        inputs,
        norm.eps,
        words.padding_idx,
        words.weight,
        embeddings.position_embeddings.weight,
        embeddings.token_type_embeddings.weight,
        norm.weight,
        norm.bias,
    )
    return embedded


def fused_word_embedding(
    words: nn.Embedding, norm: nn.LayerNorm, tokens: Tensor, dropout: tuple[Tensor | None, float], dtype: torch.dtype
) -> Tensor:
    """Look up words, and apply norm and dropout; all in one kernel.

    Args:
        words: Word table.
        norm: The norm, which has no shift.
        tokens: Token ids, int64 [tokens].
        dropout: Dropout hashes, int32 [tokens] (None: no dropout), and the rate.
        dtype: Precision of the result.

    Returns:
        [tokens, dim] in `dtype`.
    """
    embedded: Any = _FusedWords.apply(tokens, dropout, norm.eps, words.padding_idx, dtype, words.weight, norm.weight)
    return embedded


def position_sums(values: Tensor, layout: RaggedLayout, num_positions: int) -> Tensor:
    """Sum the values of tokens at the same position of their rows, in float32 or float64.

    Args:
        values: [tokens, dim].
        layout: Layout of the tokens.
        num_positions: Upper bound of the row lengths of all batches. The bound must not depend on this batch, because
            a CUDA graph is also replayed with batches of longer rows than the captured one.

    Returns:
        [num_positions, dim]
    """
    batch = layout.batch
    groups = -(-batch.num_rows // GROUP_ROWS)
    order = (layout.row_indices // GROUP_ROWS * num_positions + layout.position_ids).argsort(stable=True)
    lengths = pad(batch.cu_seqlens.diff(), (0, groups * GROUP_ROWS - batch.num_rows)).view(groups, GROUP_ROWS, 1)
    counts = (lengths > torch.arange(num_positions, device=lengths.device)).sum(1).flatten()
    return sums_in_order(values.index_select(0, order), counts).view(groups, num_positions, -1).sum(0)


class _FusedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: EmbeddingInputs,
        epsilon: float,
        padding_id: int | None,
        words: Tensor,
        positions: Tensor,
        segments: Tensor,
        gain: Tensor,
        shift: Tensor,
    ) -> Tensor:
        ctx.inputs, ctx.epsilon, ctx.padding_id = inputs, epsilon, padding_id
        ctx.save_for_backward(words, positions, segments, gain)
        ctx.shift_dtype = shift.dtype
        return kernel.embedding_norm(
            (words, positions, segments),
            inputs.layout.batch.tokens,
            inputs.layout.position_ids,
            inputs.segments,
            inputs.first_position,
            inputs.hashes,
            inputs.rate,
            gain,
            shift,
            epsilon,
            inputs.dtype,
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        inputs, (words, positions, segments, gain) = ctx.inputs, ctx.saved_tensors
        token_ids = inputs.layout.batch.tokens
        grad, sums = kernel.embedding_norm_backward(
            grad_out,
            (words, positions, segments),
            token_ids,
            inputs.layout.position_ids,
            inputs.segments,
            inputs.first_position,
            inputs.hashes,
            inputs.rate,
            gain,
            ctx.epsilon,
        )
        grad_words = grad_positions = None
        if ctx.needs_input_grad[3]:
            grad_words = _word_gradient(grad, token_ids, words, ctx.padding_id)
        if ctx.needs_input_grad[4]:
            grad_positions = _position_gradient(grad, inputs.layout, inputs.first_position, len(positions))
            grad_positions = grad_positions.to(positions.dtype)
        grad_norm = (sums[0].to(gain.dtype), sums[1].to(ctx.shift_dtype))
        return None, None, None, grad_words, grad_positions, sums[2:].to(segments.dtype), *grad_norm


class _FusedWords(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, dropout: tuple[Tensor | None, float], epsilon: float, padding_id: int | None,
        dtype: torch.dtype, words: Tensor, gain: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.dropout, ctx.epsilon, ctx.padding_id = dropout, epsilon, padding_id
        ctx.save_for_backward(tokens, words, gain)
        return kernel.word_norm(words, tokens, *dropout, gain, epsilon, dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        tokens, words, gain = ctx.saved_tensors
        hashes, rate = ctx.dropout
        grad, grad_gain = kernel.word_norm_backward(grad_out, words, tokens, hashes, rate, gain, ctx.epsilon)
        grad_words = _word_gradient(grad, tokens, words, ctx.padding_id) if ctx.needs_input_grad[5] else None
        return *[None] * 5, grad_words, grad_gain.to(gain.dtype)


def _word_gradient(grad: Tensor, token_ids: Tensor, words: Tensor, padding_id: int | None) -> Tensor:
    """Return the gradient of the word table, [words, dim], from the gradients of lookups, float32 [tokens, dim]."""
    padding = -1 if padding_id is None else padding_id
    return torch.ops.aten.embedding_dense_backward(grad, token_ids, len(words), padding, False).to(words.dtype)


def _position_gradient(grad_out: Tensor, layout: RaggedLayout, first_position: int, rows: int) -> Tensor:
    """Return the gradient of a position table of `rows` rows, [rows, dim]."""
    return pad(position_sums(grad_out, layout, rows - first_position), (0, 0, first_position, 0))


class _PositionEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, layout: RaggedLayout, first_position: int) -> Tensor:
        ctx.layout, ctx.first_position, ctx.rows = layout, first_position, len(table)
        return table.index_select(0, layout.position_ids + first_position)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        grad = _position_gradient(grad_out, ctx.layout, ctx.first_position, ctx.rows)
        return grad.to(grad_out.dtype), None, None


class _SegmentEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, segments: Tensor) -> Tensor:
        ctx.save_for_backward(segments)
        ctx.rows = len(table)
        return table.index_select(0, segments)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        (segments,) = ctx.saved_tensors
        sums = [grad_out.masked_fill((segments != row).unsqueeze(1), 0.0).sum(0) for row in range(ctx.rows)]
        return torch.stack(sums), None
