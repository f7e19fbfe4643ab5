"""Embedding lookups, their sum, layer norm and dropout in one Triton kernel, with its backward pass.

The forward pass stores nothing; the backward pass looks up again. It also sums the gradients of gain, shift and segment
table. `ranker.encoders.embeddings` sums the gradients of the word and position tables.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ranker.encoders.kernels.hashed import PROGRAMS, dropout_constants, kept
from ranker.encoders.kernels.sums import column_sums

# launch settings for states of up to 1,024 values, measured on an H200, see docs/performance.md
FORWARD = {"ROWS": 1, "num_warps": 1}
BACKWARD = {"num_warps": 1}


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    word_table, position_table, segment_table, token_ids, position_ids, segments, hashes, gain, shift, out, tokens,
    OFFSET: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, EPSILON: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr, COLUMN: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, WORDS_ONLY: tl.constexpr,
):  # fmt: skip
    """Compute the results of ROWS tokens. WORDS_ONLY: there are no position and segment tables, and no shift."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    in_dim, in_batch = columns < DIM, rows < tokens
    mask = in_batch[:, None] & in_dim[None, :]
    word_offset = tl.load(token_ids + rows, mask=in_batch, other=0).to(tl.int64) * DIM
    value = tl.load(word_table + word_offset[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if not WORDS_ONLY:
        position_offset = (tl.load(position_ids + rows, mask=in_batch, other=0).to(tl.int64) + OFFSET) * DIM
        segment_offset = tl.load(segments + rows, mask=in_batch, other=0).to(tl.int64) * DIM
        positions = tl.load(position_table + position_offset[:, None] + columns[None, :], mask=mask, other=0.0)
        value += positions.to(tl.float32)
        kinds = tl.load(segment_table + segment_offset[:, None] + columns[None, :], mask=mask, other=0.0)
        value += kinds.to(tl.float32)
    centred = tl.where(in_dim[None, :], value - (tl.sum(value, 1) / DIM)[:, None], 0.0)
    spread = tl.rsqrt(tl.sum(centred * centred, 1) / DIM + EPSILON)
    gains = tl.load(gain + columns, mask=in_dim, other=0.0).to(tl.float32)
    normed = centred * spread[:, None] * gains[None, :]
    if not WORDS_ONLY:
        normed += tl.load(shift + columns, mask=in_dim, other=0.0).to(tl.float32)[None, :]
    if DROP:
        row_hashes = tl.load(hashes + rows, mask=in_batch, other=0)
        normed = tl.where(kept(row_hashes, columns, THRESHOLD, COLUMN, FIRST, SECOND), normed * SCALE, 0.0)
    tl.store(out + rows[:, None].to(tl.int64) * DIM + columns[None, :], normed.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "count"])
def _backward(
    grad_out, word_table, position_table, segment_table, token_ids, position_ids, segments, hashes, gain, grad, sums,
    tokens, count, OFFSET: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, EPSILON: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr, DROP: tl.constexpr, COLUMN: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, WORDS_ONLY: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `count` tokens, one after another, and this program's part of the sums over tokens.

    The sums, [2 + SEGMENTS, DIM], are the gradients of gain, shift and segment table.
    """
    columns = tl.arange(0, WIDTH)
    in_dim = columns < DIM
    numbers = tl.arange(0, SEGMENTS)
    gains = tl.load(gain + columns, mask=in_dim, other=0.0).to(tl.float32)
    gain_sum = tl.zeros([WIDTH], tl.float32)
    shift_sum = tl.zeros([WIDTH], tl.float32)
    segment_sum = tl.zeros([SEGMENTS, WIDTH], tl.float32)
    for step in range(count):
        row = tl.program_id(0).to(tl.int64) * count + step
        if row < tokens:
            value = tl.load(
                word_table + tl.load(token_ids + row).to(tl.int64) * DIM + columns, mask=in_dim, other=0.0
            ).to(tl.float32)
            if not WORDS_ONLY:
                segment = tl.load(segments + row)
                value += tl.load(
                    position_table + (tl.load(position_ids + row).to(tl.int64) + OFFSET) * DIM + columns,
                    mask=in_dim,
                    other=0.0,
                ).to(tl.float32)
                value += tl.load(segment_table + segment.to(tl.int64) * DIM + columns, mask=in_dim, other=0.0).to(
                    tl.float32
                )
            grad_row = tl.load(grad_out + row * DIM + columns, mask=in_dim, other=0.0).to(tl.float32)
            if DROP:
                row_hashes = tl.load(hashes + row + tl.arange(0, 1))
                keep = tl.reshape(kept(row_hashes, columns, THRESHOLD, COLUMN, FIRST, SECOND), [WIDTH])
                grad_row = tl.where(keep, grad_row * SCALE, 0.0)
            centred = tl.where(in_dim, value - tl.sum(value, 0) / DIM, 0.0)
            spread = tl.rsqrt(tl.sum(centred * centred, 0) / DIM + EPSILON)
            normed = centred * spread
            shift_sum += grad_row
            gain_sum += grad_row * normed
            grad_row *= gains
            grad_row = (grad_row - tl.sum(grad_row, 0) / DIM - normed * (tl.sum(grad_row * normed, 0) / DIM)) * spread
            tl.store(grad + row * DIM + columns, grad_row, mask=in_dim)
            if not WORDS_ONLY:
                segment_sum += tl.where((numbers == segment)[:, None], grad_row[None, :], 0.0)
    sums += tl.program_id(0).to(tl.int64) * ((2 + SEGMENTS) * DIM)
    tl.store(sums + columns, gain_sum, mask=in_dim)
    tl.store(sums + DIM + columns, shift_sum, mask=in_dim)
    tl.store(sums + (2 + numbers)[:, None] * DIM + columns[None, :], segment_sum, mask=in_dim[None, :])


def _settings(
    gain: Tensor, offset: int, hashes: Tensor | None, rate: float, epsilon: float, launch: dict[str, int],
    words_only: bool = False,
) -> dict[str, Any]:  # fmt: skip
    width = triton.next_power_of_2(len(gain))
    return {
        "OFFSET": offset,
        "EPSILON": epsilon,
        "DIM": len(gain),
        "WIDTH": width,
        **dropout_constants(hashes, rate),
        "WORDS_ONLY": words_only,
        **launch,
        "num_warps": launch["num_warps"] * max(width // 1024, 1),
    }


def embedding_norm(
    tables: tuple[Tensor, Tensor, Tensor], token_ids: Tensor, position_ids: Tensor, segments: Tensor, offset: int,
    hashes: Tensor | None, rate: float, gain: Tensor, shift: Tensor, epsilon: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return `dropout(layer_norm(word + position + segment))`, computed in float32.

    Args:
        tables: Word, position and segment tables, each [rows, dim].
        token_ids: Rows of the word table, int64 [tokens].
        position_ids: Positions of the tokens in their rows, from 0, int64 [tokens].
        segments: Rows of the segment table, int64 [tokens].
        offset: Row of the position table that belongs to position 0.
        hashes: Dropout hashes, int32 [tokens] (`dropout_hashes`); None: no dropout.
        rate: Probability of dropout.
        gain: Gain of the norm, [dim].
        shift: Shift of the norm, [dim].
        epsilon: Epsilon of the norm.
        dtype: Precision of the result.

    Returns:
        [tokens, dim]
    """
    tokens = len(token_ids)
    out = torch.empty(tokens, len(gain), dtype=dtype, device=token_ids.device)
    settings = _settings(gain, offset, hashes, rate, epsilon, FORWARD)
    if tokens:
        with torch.cuda.device_of(token_ids):  # Triton launches on the current device
            _forward[(triton.cdiv(tokens, FORWARD["ROWS"]),)](
                *tables,
                token_ids,
                position_ids,
                segments,
                token_ids if hashes is None else hashes.contiguous(),
                gain,
                shift,
                out,
                tokens,
                **settings,
            )
    return out


def embedding_norm_backward(
    grad_out: Tensor, tables: tuple[Tensor, Tensor, Tensor], token_ids: Tensor, position_ids: Tensor, segments: Tensor,
    offset: int, hashes: Tensor | None, rate: float, gain: Tensor, epsilon: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of `embedding_norm`; the arguments are its own, and `grad_out` [tokens, dim].

    Returns:
        The gradient of the sum of the lookups, float32 [tokens, dim]; the gradients of gain, shift and segment table,
        float32 [2 + segments, dim].
    """
    grad_out = grad_out.contiguous()
    tokens, dim = grad_out.shape
    num_segments = triton.next_power_of_2(len(tables[2]))
    grad = torch.empty(tokens, dim, dtype=torch.float32, device=grad_out.device)
    sums = torch.empty(PROGRAMS, 2 + num_segments, dim, dtype=torch.float32, device=grad_out.device)
    with torch.cuda.device_of(grad_out):  # a program without tokens gives sums of 0
        _backward[(PROGRAMS,)](
            grad_out,
            *tables,
            token_ids,
            position_ids,
            segments,
            token_ids if hashes is None else hashes.contiguous(),
            gain,
            grad,
            sums,
            tokens,
            triton.cdiv(tokens, PROGRAMS),
            SEGMENTS=num_segments,
            **_settings(gain, offset, hashes, rate, epsilon, BACKWARD),
        )
    return grad, column_sums(sums)[: 2 + len(tables[2])]


def word_norm(
    words: Tensor, token_ids: Tensor, hashes: Tensor | None, rate: float, gain: Tensor, epsilon: float,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return `dropout(layer_norm(word))`, without a shift; arguments and result are as in `embedding_norm`."""
    tokens = len(token_ids)
    out = torch.empty(tokens, len(gain), dtype=dtype, device=token_ids.device)
    row_hashes = token_ids if hashes is None else hashes.contiguous()
    if tokens:
        with torch.cuda.device_of(token_ids):
            _forward[(triton.cdiv(tokens, FORWARD["ROWS"]),)](
                words, words, words, token_ids, token_ids, token_ids, row_hashes, gain, gain, out, tokens,
                **_settings(gain, 0, hashes, rate, epsilon, FORWARD, words_only=True),
            )  # fmt: skip
    return out


def word_norm_backward(
    grad_out: Tensor, words: Tensor, token_ids: Tensor, hashes: Tensor | None, rate: float, gain: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of `word_norm`: of the lookups, float32 [tokens, dim], and of the gain, float32 [dim]."""
    grad_out = grad_out.contiguous()
    tokens, dim = grad_out.shape
    grad = torch.empty(tokens, dim, dtype=torch.float32, device=grad_out.device)
    sums = torch.empty(PROGRAMS, 3, dim, dtype=torch.float32, device=grad_out.device)
    row_hashes = token_ids if hashes is None else hashes.contiguous()
    with torch.cuda.device_of(grad_out):
        _backward[(PROGRAMS,)](
            grad_out, words, words, words, token_ids, token_ids, token_ids, row_hashes, gain, grad, sums, tokens,
            triton.cdiv(tokens, PROGRAMS), SEGMENTS=1,
            **_settings(gain, 0, hashes, rate, epsilon, BACKWARD, words_only=True),
        )  # fmt: skip
    return grad, column_sums(sums)[0]
