"""Gradients of attention within short ragged rows in Triton.

The backward pass of a library's kernel reads everything three times. The kernels here are:

- A row of up to 128 tokens (64 for head sizes above 64) is one tile. Its backward pass is one pass without atomics:
  five products, which read only the states and the logarithms of the softmax sums.
- Longer rows are cut into blocks of 64 tokens. One kernel computes the gradients of a block's queries, and another
  those of its keys and values.

The gradient of the bias of queries, keys and values is summed in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ranker.encoders.kernels.blocks import BLOCK
from ranker.encoders.kernels.short_attention import LOG2E, end_near, first_near, is_near
from ranker.encoders.kernels.sums import column_sums


@triton.jit
def _store_gradient(
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
def _tile_backward(
    grad_out, out, qkv, sums, grad, parts, cu_seqlens, cu_keys, cos, sin, num_tokens,
    SCALE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, WINDOW: tl.constexpr,
    SUMS: tl.constexpr, WHOLE: tl.constexpr, SHORTEST: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Compute all gradients of one row and head as one tile, if the row has more than SHORTEST and at most SIZE tokens.

    `out` is read only if the softmax has further keys outside of the tile (WHOLE is false).
    """
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = tl.load(cu_seqlens + row).to(tl.int64)
    length = tl.load(cu_seqlens + row + 1) - start
    if (length > SHORTEST) & (length <= SIZE):
        num_keys = tl.load(cu_keys + row + 1) - tl.load(cu_keys + row)
        dims = tl.arange(0, DIM)
        i = tl.arange(0, SIZE)
        in_row = (i < length)[:, None]
        offsets = (start + i)[:, None] * (3 * HEADS * DIM) + head * DIM + dims[None, :]
        query = tl.load(qkv + offsets, mask=in_row, other=0.0)
        key = tl.load(qkv + offsets + HEADS * DIM, mask=in_row, other=0.0)
        value = tl.load(qkv + offsets + 2 * HEADS * DIM, mask=in_row, other=0.0)
        upstream = tl.load(
            grad_out + (start + i)[:, None] * (HEADS * DIM) + head * DIM + dims[None, :], mask=in_row, other=0.0
        )
        log_sum = tl.load(sums + head.to(tl.int64) * num_tokens + start + i, mask=i < length, other=float("inf"))
        near = is_near(i[:, None], i[None, :], num_keys, WINDOW)
        logits = tl.where(near, tl.dot(query, tl.trans(key)) * (SCALE * LOG2E), float("-inf"))
        weights = tl.exp2(logits - log_sum[:, None])
        summed = parts + row.to(tl.int64) * (3 * HEADS * DIM) + head * DIM + dims
        partial = tl.dot(tl.trans(weights.to(value.dtype)), upstream)
        tl.store(grad + offsets + 2 * HEADS * DIM, partial.to(grad.dtype.element_ty), mask=in_row)
        if SUMS:
            tl.store(summed + 2 * HEADS * DIM, tl.sum(partial, 0))
        grad_weights = tl.dot(upstream, tl.trans(value))
        if WHOLE:
            mean = tl.sum(weights * grad_weights, 1)
        else:
            out_pointers = out + (start + i)[:, None] * (HEADS * DIM) + head * DIM + dims[None, :]
            mean = tl.sum(upstream.to(tl.float32) * tl.load(out_pointers, mask=in_row, other=0.0).to(tl.float32), 1)
        slope = (weights * (grad_weights - mean[:, None]) * SCALE).to(query.dtype)
        partial = tl.dot(slope, key)
        pointers = grad + (start + i)[:, None] * (3 * HEADS * DIM) + head * DIM
        _store_gradient(pointers, partial, in_row, i, cos, sin, SIZE, DIM, ROTARY)
        if SUMS:
            tl.store(summed, tl.sum(partial, 0))
        partial = tl.dot(tl.trans(slope), query)
        _store_gradient(pointers + HEADS * DIM, partial, in_row, i, cos, sin, SIZE, DIM, ROTARY)
        if SUMS:
            tl.store(summed + HEADS * DIM, tl.sum(partial, 0))


@triton.jit
def _queries_backward(
    grad_out, out, qkv, sums, means, grad, parts, cu_seqlens, cu_keys, blocks, cos, sin, num_rows, num_tokens,
    SCALE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, WINDOW: tl.constexpr,
    SUMS: tl.constexpr, SHORTEST: tl.constexpr, SIZE: tl.constexpr, OTHERS: tl.constexpr, STAGES: tl.constexpr,
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
                is_key = (j < num_keys)[:, None]
                key = tl.load(base + j[:, None] * (3 * HEADS * DIM) + HEADS * DIM, mask=is_key, other=0.0)
                value = tl.load(base + j[:, None] * (3 * HEADS * DIM) + 2 * HEADS * DIM, mask=is_key, other=0.0)
                near = is_near(i[:, None], j[None, :], num_keys, WINDOW)
                logits = tl.where(near, tl.dot(query, tl.trans(key)) * (SCALE * LOG2E), float("-inf"))
                weights = tl.exp2(logits - log_sum[:, None])
                slope = (weights * (tl.dot(upstream, tl.trans(value)) - mean[:, None])).to(key.dtype)
                grad_query += tl.dot(slope, key)
            grad_query *= SCALE
            pointers = grad + (start + i)[:, None] * (3 * HEADS * DIM) + head * DIM
            _store_gradient(pointers, grad_query, in_row, i, cos, sin, SIZE, DIM, ROTARY)
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
    grad_out, out, qkv, sums, means, grad, parts, cu_seqlens, cu_keys, blocks, cos, sin, num_rows, num_tokens,  # noqa: ARG001
    SCALE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, WINDOW: tl.constexpr,
    SUMS: tl.constexpr, SHORTEST: tl.constexpr, SIZE: tl.constexpr, OTHERS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and their values, for one head, in a row of more than SHORTEST tokens.

    `out` is not read.
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
                near = is_near(i[None, :], j[:, None], num_keys, WINDOW)
                logits = tl.where(near, tl.dot(key, tl.trans(query)) * (SCALE * LOG2E), float("-inf"))
                weights = tl.exp2(logits - log_sum[None, :])
                grad_value += tl.dot(weights.to(value.dtype), upstream)
                slope = (weights * (tl.dot(value, tl.trans(upstream)) - mean[None, :])).to(query.dtype)
                grad_key += tl.dot(slope, query)
            grad_key *= SCALE
            pointers = grad + (start + j)[:, None] * (3 * HEADS * DIM) + (HEADS + head) * DIM
            _store_gradient(pointers, grad_key, in_row, j, cos, sin, SIZE, DIM, ROTARY)
            tl.store(pointers + HEADS * DIM + dims[None, :], grad_value.to(grad.dtype.element_ty), mask=in_row)
            key_sum += tl.sum(grad_key, 0)
            value_sum += tl.sum(grad_value, 0)
    if SUMS:
        summed = parts + (num_rows + number).to(tl.int64) * (3 * HEADS * DIM) + head * DIM + dims
        tl.store(summed + HEADS * DIM, key_sum)
        tl.store(summed + 2 * HEADS * DIM, value_sum)


# launch settings, measured on an H200, see docs/performance.md
SMALL_TILE = {"SIZE": 64, "num_warps": 4, "num_stages": 1}
LARGE_TILE = {"SIZE": 128, "num_warps": 4, "num_stages": 1}
QUERY_BLOCKS = {"SIZE": BLOCK, "OTHERS": 32, "STAGES": 3, "num_warps": 4}
KEY_BLOCKS = {"SIZE": BLOCK, "OTHERS": 64, "STAGES": 2, "num_warps": 4}


def backward_launches(dim: int) -> list[tuple[Any, dict[str, int]]]:
    """Return the kernels of the backward pass with their settings, ordered by the row lengths that they process.

    Each kernel processes the rows that are too long for the kernels before it.

    Args:
        dim: Size of a head.
    """
    launches: list[tuple[Any, dict[str, int]]] = [(_tile_backward, {"SHORTEST": -1, **SMALL_TILE})]
    if dim <= 64:  # with a head size of 128, larger tiles do not fit
        launches.append((_tile_backward, {"SHORTEST": launches[-1][1]["SIZE"], **LARGE_TILE}))
    return launches


def attend_backward(
    grad_out: Tensor, qkv: Tensor, out: Tensor, sums: Tensor, cu_seqlens: Tensor, cu_keys: Tensor,
    blocks: Tensor, wrap: Callable[..., Any] = lambda kernel: kernel, window: int | None = None, bias: bool = True,
    angles: tuple[Tensor, Tensor] | None = None, whole: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of `short_attention.attend`.

    The arguments are its own, its results `out` and `sums`, and `grad_out`.

    If `angles` is given, queries and keys were rotated by `rotation.rotate_`, and the gradients are those of the values
    before the rotation. `angles` are the cosines and sines, float32 [at least the longest row's length, dim / 2]. If
    `whole` is false, `out` and `sums` are those of a softmax with further keys, and the gradients are only the part
    that comes from the row's own keys.

    Returns:
        d/d(qkv) [tokens, 3, heads, dim]; d/d(bias) of the linear layer that computed `qkv`, float32 [3 * heads * dim],
        which is empty if `bias` is false.
    """
    tokens, _, heads, dim = qkv.shape
    qkv, grad_out = qkv.contiguous(), grad_out.contiguous()
    grad = torch.empty_like(qkv)
    rows = cu_seqlens.shape[0] - 1
    parts = torch.empty(rows + blocks.shape[0] if bias else 0, 3 * heads * dim, dtype=torch.float32, device=qkv.device)
    means = torch.empty_like(sums)
    constants: dict[str, Any] = {"SCALE": dim**-0.5, "HEADS": heads, "DIM": dim, "SUMS": bias}
    constants |= {"WINDOW": -1 if window is None else window, "ROTARY": angles is not None}
    turns = angles or (sums, sums)
    tensors = (grad_out, out, qkv, sums, grad, parts, cu_seqlens, cu_keys, *turns)
    block_tensors = (grad_out, out, qkv, sums, means, grad, parts, cu_seqlens, cu_keys, blocks, *turns)
    launches = backward_launches(dim)
    longest = {"SHORTEST": launches[-1][1]["SIZE"]}
    # a program ends at once if its row's length is outside of the launch's range
    with torch.cuda.device_of(qkv):
        for kernel, settings in launches:
            wrap(kernel)[(rows * heads,)](*tensors, tokens, WHOLE=whole, **constants, **settings)
        for kernel, settings in ((_queries_backward, QUERY_BLOCKS), (_pairs_backward, KEY_BLOCKS)):
            wrap(kernel)[(blocks.shape[0] * heads,)](*block_tensors, rows, tokens, **constants, **longest, **settings)
    return grad, column_sums(parts, wrap) if bias else parts
