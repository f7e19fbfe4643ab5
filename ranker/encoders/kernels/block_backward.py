"""Gradients of attention within rows that do not fit into one tile, in Triton.

Rows are cut into blocks of 64 tokens. One kernel computes the gradients of a block's queries, and another those of its
keys and values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ranker.encoders.kernels.blocks import BLOCK
from ranker.encoders.kernels.short_attention import LOG2E, end_near, first_near, is_near, other_keys


@triton.jit
def store_gradient(
    pointers, grad, in_row, positions, cos, sin, SIZE: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr
):
    """Store gradients of queries or keys, [SIZE, DIM]; each pointer [SIZE, 1] is to the first value of a gradient.

    With ROTARY, they are gradients of rotated values (`rotation.rotate_`), and are rotated back by their positions.
    """
    if ROTARY:
        half = tl.arange(0, DIM // 2)
        one, other = tl.split(tl.permute(tl.reshape(grad, [SIZE, 2, DIM // 2]), [0, 2, 1]))
        angles = positions[:, None] * (DIM // 2) + half[None, :]
        cosine = tl.load(cos + angles, mask=in_row, other=0.0)
        sine = tl.load(sin + angles, mask=in_row, other=0.0)
        first = one * cosine + other * sine
        second = other * cosine - one * sine
        tl.store(pointers + half[None, :], first.to(pointers.dtype.element_ty), mask=in_row)
        tl.store(pointers + DIM // 2 + half[None, :], second.to(pointers.dtype.element_ty), mask=in_row)
    else:
        tl.store(pointers + tl.arange(0, DIM)[None, :], grad.to(pointers.dtype.element_ty), mask=in_row)


@triton.jit
def _queries_backward(
    grad_out, out, qkv, sums, means, grad, parts, cu_seqlens, cu_keys, firsts, first_rows, end_rows, biases, cos, sin,
    blocks, num_rows, num_tokens, SCALE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    WINDOW: tl.constexpr, SUMS: tl.constexpr, LISTS: tl.constexpr, SHORTEST: tl.constexpr, SIZE: tl.constexpr,
    OTHERS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of queries, for one head, in a row of more than SHORTEST tokens.

    The kernel also writes `means`, [HEADS, tokens]: the inner product of each output with its gradient, which
    `_pairs_backward` reads.
    """
    number, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    row, begin = tl.load(blocks + number * 2), tl.load(blocks + number * 2 + 1)
    dims = tl.arange(0, DIM)
    summed = tl.zeros([DIM], tl.float32)
    if row >= 0:
        start = tl.load(cu_seqlens + row).to(tl.int64)
        length = (tl.load(cu_seqlens + row + 1) - start).to(tl.int32)
        if length > SHORTEST:
            num_keys = (tl.load(cu_keys + row + 1) - tl.load(cu_keys + row)).to(tl.int32)
            i = begin + tl.arange(0, SIZE)
            in_row = (i < length)[:, None]
            base = qkv + start * (3 * HEADS * DIM) + head * DIM + dims[None, :]
            out_offsets = (start + i)[:, None] * (HEADS * DIM) + head * DIM + dims[None, :]
            totals = head.to(tl.int64) * num_tokens + start + i
            query = tl.load(base + i[:, None] * (3 * HEADS * DIM), mask=in_row, other=0.0)
            upstream = tl.load(grad_out + out_offsets, mask=in_row, other=0.0)
            output = tl.load(out + out_offsets, mask=in_row, other=0.0)
            mean = tl.sum(upstream.to(tl.float32) * output.to(tl.float32), 1)
            tl.store(means + totals, mean, mask=i < length)
            log_sum = tl.load(sums + totals, mask=i < length, other=float("inf"))
            grad_query = tl.zeros([SIZE, DIM], tl.float32)
            lowest, highest = first_near(begin, WINDOW, OTHERS), end_near(begin + SIZE, num_keys, WINDOW)
            for first in tl.range(lowest, highest, OTHERS, num_stages=STAGES):
                j = first + tl.arange(0, OTHERS)
                key_pointers = base + j[:, None] * (3 * HEADS * DIM)
                is_key = (j < num_keys)[:, None]
                key = tl.load(key_pointers + HEADS * DIM, mask=is_key, other=0.0)
                value = tl.load(key_pointers + 2 * HEADS * DIM, mask=is_key, other=0.0)
                exponents = tl.dot(query, tl.trans(key)) * (SCALE * LOG2E) - log_sum[:, None]
                if WINDOW >= 0:
                    near = is_near(i[:, None], j[None, :], num_keys, WINDOW)
                    exponents = tl.where(near, exponents, float("-inf"))
                else:  # keys after the last one are loaded as zeros, so they add nothing if their weights are finite
                    exponents = tl.minimum(exponents, 0.0)
                weights = tl.exp2(exponents)
                slope = (weights * (tl.dot(upstream, tl.trans(value)) - mean[:, None])).to(key.dtype)
                grad_query += tl.dot(slope, key)
            if LISTS:
                first_row, end_row, bias = tl.load(first_rows + row), tl.load(end_rows + row), tl.load(biases + row)
                for first in tl.range(first_row, end_row, OTHERS, num_stages=STAGES):
                    j = first + tl.arange(0, OTHERS)
                    key, value, is_other = other_keys(firsts, j, row, end_row, head, HEADS, DIM)
                    logits = tl.dot(query, tl.trans(key)) * (SCALE * LOG2E) + bias
                    weights = tl.exp2(tl.where(is_other[None, :], logits, float("-inf")) - log_sum[:, None])
                    slope = (weights * (tl.dot(upstream, tl.trans(value)) - mean[:, None])).to(key.dtype)
                    grad_query += tl.dot(slope, key)
            grad_query *= SCALE
            pointers = grad + (start + i)[:, None] * (3 * HEADS * DIM) + head * DIM
            store_gradient(pointers, grad_query, in_row, i, cos, sin, SIZE, DIM, ROTARY)
            summed += tl.sum(grad_query, 0)
            if SUMS:  # noqa: SIM102 - decided at compile time
                if begin == 0:  # the sums of a long row are in the parts of its blocks
                    row_parts = parts + row.to(tl.int64) * (3 * HEADS * DIM) + head * DIM + dims
                    for kind in tl.static_range(3):
                        tl.store(row_parts + kind * (HEADS * DIM), tl.zeros([DIM], tl.float32))
    if SUMS:
        tl.store(parts + (num_rows + number).to(tl.int64) * (3 * HEADS * DIM) + head * DIM + dims, summed)


@triton.jit
def _pairs_backward(
    grad_out, out, qkv, sums, means, grad, parts, cu_seqlens, cu_keys, firsts, first_rows, end_rows, biases, cos, sin,  # noqa: ARG001
    blocks, num_rows, num_tokens, SCALE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    WINDOW: tl.constexpr, SUMS: tl.constexpr, LISTS: tl.constexpr, SHORTEST: tl.constexpr, SIZE: tl.constexpr,  # noqa: ARG001
    OTHERS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and their values, for one head, in a row of more than SHORTEST tokens.

    Only the row's own queries are read, so `out` and the tensors of lists are not.
    """
    number, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    row, begin = tl.load(blocks + number * 2), tl.load(blocks + number * 2 + 1)
    dims = tl.arange(0, DIM)
    key_sum = tl.zeros([DIM], tl.float32)
    value_sum = tl.zeros([DIM], tl.float32)
    if row >= 0:
        start = tl.load(cu_seqlens + row).to(tl.int64)
        length = (tl.load(cu_seqlens + row + 1) - start).to(tl.int32)
        if length > SHORTEST:
            num_keys = (tl.load(cu_keys + row + 1) - tl.load(cu_keys + row)).to(tl.int32)
            j = begin + tl.arange(0, SIZE)
            is_key, in_row = (j < num_keys)[:, None], (j < length)[:, None]
            base = qkv + start * (3 * HEADS * DIM) + head * DIM + dims[None, :]
            totals = head.to(tl.int64) * num_tokens + start
            key = tl.load(base + j[:, None] * (3 * HEADS * DIM) + HEADS * DIM, mask=is_key, other=0.0)
            value = tl.load(base + j[:, None] * (3 * HEADS * DIM) + 2 * HEADS * DIM, mask=is_key, other=0.0)
            grad_key = tl.zeros([SIZE, DIM], tl.float32)
            grad_value = tl.zeros([SIZE, DIM], tl.float32)
            lowest, highest = first_near(begin, WINDOW, OTHERS), end_near(begin + SIZE, length, WINDOW)
            for first in tl.range(lowest, highest, OTHERS, num_stages=STAGES):
                i = first + tl.arange(0, OTHERS)
                in_row_i = (i < length)[:, None]
                query = tl.load(base + i[:, None] * (3 * HEADS * DIM), mask=in_row_i, other=0.0)
                out_offsets = (start + i)[:, None] * (HEADS * DIM) + head * DIM + dims[None, :]
                upstream = tl.load(grad_out + out_offsets, mask=in_row_i, other=0.0)
                log_sum = tl.load(sums + totals + i, mask=i < length, other=float("inf"))
                mean = tl.load(means + totals + i, mask=i < length, other=0.0)
                # rows are keys and columns are queries, so two of the products need no transposed weights
                exponents = tl.dot(key, tl.trans(query)) * (SCALE * LOG2E) - log_sum[None, :]
                if WINDOW >= 0:
                    near = is_near(i[None, :], j[:, None], num_keys, WINDOW)
                    exponents = tl.where(near, exponents, float("-inf"))
                weights = tl.exp2(exponents)
                grad_value += tl.dot(weights.to(value.dtype), upstream)
                slope = (weights * (tl.dot(value, tl.trans(upstream)) - mean[None, :])).to(query.dtype)
                grad_key += tl.dot(slope, query)
            grad_key = tl.where(is_key, grad_key * SCALE, 0.0)  # tokens without attention have no gradient here
            grad_value = tl.where(is_key, grad_value, 0.0)
            pointers = grad + (start + j)[:, None] * (3 * HEADS * DIM) + (HEADS + head) * DIM
            store_gradient(pointers, grad_key, in_row, j, cos, sin, SIZE, DIM, ROTARY)
            tl.store(pointers + HEADS * DIM + dims[None, :], grad_value.to(grad.dtype.element_ty), mask=in_row)
            key_sum += tl.sum(grad_key, 0)
            value_sum += tl.sum(grad_value, 0)
    if SUMS:
        summed = parts + (num_rows + number).to(tl.int64) * (3 * HEADS * DIM) + head * DIM + dims
        tl.store(summed + HEADS * DIM, key_sum)
        tl.store(summed + 2 * HEADS * DIM, value_sum)


# kernels with their launch settings, measured on an H200, see docs/performance.md
BLOCK_LAUNCHES = (
    (_queries_backward, {"SIZE": BLOCK, "OTHERS": 32, "STAGES": 3, "num_warps": 4}),
    (_pairs_backward, {"SIZE": BLOCK, "OTHERS": 64, "STAGES": 1, "num_warps": 4}),
)
