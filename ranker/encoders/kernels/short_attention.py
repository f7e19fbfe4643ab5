"""Attention within short ragged rows in Triton, with its backward pass.

The kernels of libraries are built for long sequences. Pairs of 86 tokens fill only a part of their tiles, and their
backward pass reads everything three times. The kernels here are for head sizes of up to 64:

- A row of up to 128 tokens is one tile. Its backward pass is one pass without atomics: five products, which read only
  the states and the logarithms of the softmax sums.
- Longer rows are cut into blocks of 64 tokens, with a running softmax (Dao et al., 2022, arXiv:2205.14135). In the
  backward pass, one kernel computes the gradients of a block's queries, and another those of its keys and values.

Queries, keys and values are one packed tensor, so one matrix product computes them, and they have one gradient. The
gradient of their bias is summed in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from ranker.encoders.kernels.blocks import BLOCK
from ranker.encoders.kernels.sums import column_sums

MAX_LENGTH = 512  # longer rows work, but torch's kernel is then faster
HEAD_SIZES = (16, 32, 64, 128)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _is_near(i, j, num_keys, WINDOW: tl.constexpr):
    """Return whether queries at positions `i` attend to keys at positions `j`. A negative WINDOW means no limit."""
    if WINDOW >= 0:
        return (j < num_keys) & (i - j <= WINDOW) & (j - i <= WINDOW)
    else:  # noqa: RET505 - without this branch, Triton compiles both returns
        return j < num_keys


@triton.jit
def _first(begin, WINDOW: tl.constexpr, SIZE: tl.constexpr):
    """Return the start (a multiple of SIZE) of the first block within the window of a block that starts at `begin`."""
    if WINDOW >= 0:
        return tl.maximum(begin - WINDOW, 0) // SIZE * SIZE
    else:  # noqa: RET505
        return 0


@triton.jit
def _end(end, length, WINDOW: tl.constexpr):
    """Return the end of the positions that are within the window of a block that ends at `end`."""
    if WINDOW >= 0:
        return tl.minimum(end + WINDOW, length)
    else:  # noqa: RET505
        return length


@triton.jit
def _attend(
    qkv, out, sums, cu_seqlens, cu_keys, blocks, num_tokens, SCALE: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute attention of a block of queries, for one head."""
    row, head = tl.load(blocks + tl.program_id(0) // HEADS * 2), tl.program_id(0) % HEADS
    if row >= 0:
        start = tl.load(cu_seqlens + row).to(tl.int64)
        length = tl.load(cu_seqlens + row + 1) - start
        num_keys = tl.load(cu_keys + row + 1) - tl.load(cu_keys + row)
        dims = tl.arange(0, DIM)
        begin = tl.load(blocks + tl.program_id(0) // HEADS * 2 + 1)
        i = begin + tl.arange(0, QUERIES)
        base = qkv + start * (3 * HEADS * DIM) + head * DIM
        query = tl.load(base + i[:, None] * (3 * HEADS * DIM) + dims[None, :], mask=(i < length)[:, None], other=0.0)
        running_max = tl.full([QUERIES], float("-inf"), tl.float32)
        running_sum = tl.zeros([QUERIES], tl.float32)
        mixed = tl.zeros([QUERIES, DIM], tl.float32)
        for first in range(_first(begin, WINDOW, KEYS), _end(begin + QUERIES, num_keys, WINDOW), KEYS):
            j = first + tl.arange(0, KEYS)
            key_pointers = base + j[:, None] * (3 * HEADS * DIM) + dims[None, :]
            key = tl.load(key_pointers + HEADS * DIM, mask=(j < num_keys)[:, None], other=0.0)
            value = tl.load(key_pointers + 2 * HEADS * DIM, mask=(j < num_keys)[:, None], other=0.0)
            logits = tl.dot(query, tl.trans(key)) * (SCALE * LOG2E)
            logits = tl.where(_is_near(i[:, None], j[None, :], num_keys, WINDOW), logits, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(logits, 1))
            if WINDOW >= 0:  # noqa: SIM108 - decided at compile time; a query may have no key in this block
                safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            else:
                safe_max = new_max
            weights = tl.exp2(logits - safe_max[:, None])
            rescale = tl.exp2(running_max - safe_max)
            running_sum = running_sum * rescale + tl.sum(weights, 1)
            mixed = mixed * rescale[:, None] + tl.dot(weights.to(value.dtype), value)
            running_max = new_max
        if WINDOW >= 0:  # the weights of a query without keys are 0
            running_max = tl.where(running_sum > 0, running_max, float("inf"))
            running_sum = tl.where(running_sum > 0, running_sum, 1.0)
        out_pointers = out + (start + i)[:, None] * (HEADS * DIM) + head * DIM + dims[None, :]
        tl.store(out_pointers, (mixed / running_sum[:, None]).to(out.dtype.element_ty), mask=(i < length)[:, None])
        tl.store(sums + head.to(tl.int64) * num_tokens + start + i, running_max + tl.log2(running_sum), mask=i < length)


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
        near = _is_near(i[:, None], i[None, :], num_keys, WINDOW)
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
            lowest, highest = _first(begin, WINDOW, OTHERS), _end(begin + SIZE, num_keys, WINDOW)
            for first in tl.range(lowest, highest, OTHERS, num_stages=STAGES):
                j = first + tl.arange(0, OTHERS)
                is_key = (j < num_keys)[:, None]
                key = tl.load(base + j[:, None] * (3 * HEADS * DIM) + HEADS * DIM, mask=is_key, other=0.0)
                value = tl.load(base + j[:, None] * (3 * HEADS * DIM) + 2 * HEADS * DIM, mask=is_key, other=0.0)
                near = _is_near(i[:, None], j[None, :], num_keys, WINDOW)
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
            lowest, highest = _first(begin, WINDOW, OTHERS), _end(begin + SIZE, length, WINDOW)
            for first in tl.range(lowest, highest, OTHERS, num_stages=STAGES):
                i = first + tl.arange(0, OTHERS)
                in_row_i = (i < length)[:, None]
                query = tl.load(base + i[:, None] * (3 * HEADS * DIM), mask=in_row_i, other=0.0)
                out_offsets = (start + i)[:, None] * (HEADS * DIM) + head * DIM + dims[None, :]
                upstream = tl.load(grad_out + out_offsets, mask=in_row_i, other=0.0)
                log_sum = tl.load(sums + totals + i, mask=i < length, other=float("inf"))
                mean = tl.load(means + totals + i, mask=i < length, other=0.0)
                # rows are keys and columns are queries, so two of the products need no transposed weights
                near = _is_near(i[None, :], j[:, None], num_keys, WINDOW)
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
FORWARD = {"QUERIES": BLOCK, "KEYS": 32, "num_warps": 4, "num_stages": 3}
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


def attend(
    qkv: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, blocks: Tensor, wrap: Callable[..., Any] = lambda kernel: kernel,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention within each row.

    Args:
        qkv: Queries, keys and values, bf16 or fp16 [tokens, 3, heads, dim], contiguous; every token belongs to a row.
        cu_seqlens: Cumulative row lengths, int32 [rows + 1].
        cu_keys: Cumulative numbers of attended tokens, which are the first of each row, int32 [rows + 1].
        blocks: Row, and position of the first token, of each block of `BLOCK` tokens, int32 [blocks, 2]; the row is -1
            if a block is unused (`RaggedLayout.blocks`).
        wrap: Wrapper of the kernel; `wrap_triton` if it is traced.
        window: Largest distance between a token and a token that it attends to; None: no limit. A token that attends
            to no token gets zeros.

    Returns:
        Attention output [tokens, heads, dim]; base-2 logarithms of the softmax sums, float32 [heads, tokens].
    """
    tokens, _, heads, dim = qkv.shape
    qkv = qkv.contiguous()
    out = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    sums = torch.empty(heads, tokens, dtype=torch.float32, device=qkv.device)
    with torch.cuda.device_of(qkv):  # Triton launches on the current device
        wrap(_attend)[(blocks.shape[0] * heads,)](
            qkv, out, sums, cu_seqlens, cu_keys, blocks, tokens, SCALE=dim**-0.5, HEADS=heads, DIM=dim,
            WINDOW=-1 if window is None else window, **FORWARD,
        )  # fmt: skip
    return out, sums


def attend_backward(
    grad_out: Tensor, qkv: Tensor, out: Tensor, sums: Tensor, cu_seqlens: Tensor, cu_keys: Tensor,
    blocks: Tensor, wrap: Callable[..., Any] = lambda kernel: kernel, window: int | None = None, bias: bool = True,
    angles: tuple[Tensor, Tensor] | None = None, whole: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of `attend`. The arguments are its own, its results `out` and `sums`, and `grad_out`.

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


@triton_op("ranker::short_attention", mutates_args=())
def short_attention(qkv: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Run `attend` with gradients, also in compiled code; arguments and results are the same."""
    return attend(qkv, cu_seqlens, cu_keys, blocks, wrap_triton)


@triton_op("ranker::short_attention_backward", mutates_args=())
def short_attention_backward(
    grad_out: Tensor, qkv: Tensor, out: Tensor, sums: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, blocks: Tensor
) -> Tensor:  # fmt: skip
    """Return the gradient of `short_attention`, d/d(qkv) [tokens, 3, heads, dim]."""
    return attend_backward(grad_out, qkv, out, sums, cu_seqlens, cu_keys, blocks, wrap_triton)[0]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, *boundaries = inputs
    ctx.save_for_backward(qkv, *output, *boundaries)


def _backward(ctx: Any, grad_out: Tensor, grad_sums: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG001 - the sums have no gradient
    return short_attention_backward(grad_out, *ctx.saved_tensors), None, None, None


short_attention.register_autograd(_backward, setup_context=_keep)
