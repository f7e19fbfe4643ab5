"""Gradients of attention within short ragged rows in Triton.

The backward pass of a library's kernel reads everything three times. The kernels here are:

- A row of up to 128 tokens (64 for head sizes above 64) is one tile. Its backward pass is one pass without atomics:
  five products, which read only the states and the logarithms of the softmax sums.
- Longer rows are cut into blocks (`block_backward`).

The gradient of the bias of queries, keys and values is summed in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ranker.encoders.kernels.block_backward import BLOCK_LAUNCHES, store_gradient
from ranker.encoders.kernels.lists import ListTensors
from ranker.encoders.kernels.short_attention import LOG2E, is_near, list_arguments, other_keys
from ranker.encoders.kernels.sums import column_sums


@triton.jit
def _own_sum(partial, in_row, LISTS: tl.constexpr):
    """Sum over a tile's rows; with LISTS, only over those `in_row`, because the others are other rows' first tokens."""
    if LISTS:
        return tl.sum(tl.where(in_row, partial, 0.0), 0)
    else:  # noqa: RET505
        return tl.sum(partial, 0)


@triton.jit
def _tile_backward(
    grad_out, out, qkv, sums, means, grad, parts, cu_seqlens, cu_keys, firsts, first_rows, end_rows, biases, cos, sin,
    num_tokens, SCALE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    WINDOW: tl.constexpr, SUMS: tl.constexpr, LISTS: tl.constexpr, SHORTEST: tl.constexpr, SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Compute all gradients of one row and head as one tile, if the row has more than SHORTEST and at most SIZE tokens.

    With LISTS, the tile's columns after the row's tokens are the first tokens of other rows. A loop over KEYS columns
    reads those that do not fit. `out` is then read, and `means` are written (as in `block_backward`).
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
        keys, is_loaded = qkv + offsets + HEADS * DIM, in_row
        values = keys + HEADS * DIM
        if LISTS:
            first_row, end_row, bias = tl.load(first_rows + row), tl.load(end_rows + row), tl.load(biases + row)
            j = first_row + i - length  # the row of a column after the own tokens, int64
            is_other = (i >= length) & (j < end_row) & (j != row)
            others = firsts + j[:, None] * (2 * HEADS * DIM) + head * DIM + dims[None, :]
            keys, values = tl.where(in_row, keys, others), tl.where(in_row, values, others + HEADS * DIM)
            is_loaded = in_row | is_other[:, None]
        key = tl.load(keys, mask=is_loaded, other=0.0)
        value = tl.load(values, mask=is_loaded, other=0.0)
        out_offsets = (start + i)[:, None] * (HEADS * DIM) + head * DIM + dims[None, :]
        upstream = tl.load(grad_out + out_offsets, mask=in_row, other=0.0)
        totals = head.to(tl.int64) * num_tokens + start + i
        if LISTS:
            output = tl.load(out + out_offsets, mask=in_row, other=0.0)
            mean = tl.sum(upstream.to(tl.float32) * output.to(tl.float32), 1)
            tl.store(means + totals, mean, mask=i < length)
        log_sum = tl.load(sums + totals, mask=i < length, other=float("inf"))
        logits = tl.dot(query, tl.trans(key)) * (SCALE * LOG2E)
        if LISTS:
            logits += tl.where(is_other, bias, 0.0)[None, :]
            logits = tl.where(((i < num_keys) | is_other)[None, :], logits, float("-inf"))
        else:
            logits = tl.where(is_near(i[:, None], i[None, :], num_keys, WINDOW), logits, float("-inf"))
        weights = tl.exp2(logits - log_sum[:, None])
        summed = parts + row.to(tl.int64) * (3 * HEADS * DIM) + head * DIM + dims
        partial = tl.dot(tl.trans(weights.to(value.dtype)), upstream)
        tl.store(grad + offsets + 2 * HEADS * DIM, partial.to(grad.dtype.element_ty), mask=in_row)
        if SUMS:
            tl.store(summed + 2 * HEADS * DIM, _own_sum(partial, in_row, LISTS))
        grad_weights = tl.dot(upstream, tl.trans(value))
        if not LISTS:
            mean = tl.sum(weights * grad_weights, 1)
        slope = (weights * (grad_weights - mean[:, None]) * SCALE).to(query.dtype)
        partial = tl.dot(slope, key)
        if LISTS:
            for far in range((first_row + SIZE - length).to(tl.int32), end_row, KEYS):
                far_rows = far + tl.arange(0, KEYS)
                far_key, far_value, is_far = other_keys(firsts, far_rows, row, end_row, head, HEADS, DIM)
                far_logits = tl.dot(query, tl.trans(far_key)) * (SCALE * LOG2E) + bias
                far_weights = tl.exp2(tl.where(is_far[None, :], far_logits, float("-inf")) - log_sum[:, None])
                far_slope = far_weights * (tl.dot(upstream, tl.trans(far_value)) - mean[:, None]) * SCALE
                partial += tl.dot(far_slope.to(far_key.dtype), far_key)
        pointers = grad + (start + i)[:, None] * (3 * HEADS * DIM) + head * DIM
        store_gradient(pointers, partial, in_row, i, cos, sin, SIZE, DIM, ROTARY)
        if SUMS:
            tl.store(summed, tl.sum(partial, 0))
        partial = tl.dot(tl.trans(slope), query)
        store_gradient(pointers + HEADS * DIM, partial, in_row, i, cos, sin, SIZE, DIM, ROTARY)
        if SUMS:
            tl.store(summed + HEADS * DIM, _own_sum(partial, in_row, LISTS))


# launch settings, measured on an H200, see docs/performance.md
SMALL_TILE = {"SIZE": 64, "KEYS": 32, "num_warps": 4, "num_stages": 1}
LARGE_TILE = {"SIZE": 128, "KEYS": 32, "num_warps": 4, "num_stages": 1}


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
    angles: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of `short_attention.attend`.

    The arguments are its own, its results `out` and `sums`, and `grad_out`.

    If `angles` is given, queries and keys were rotated by `rotation.rotate_`, and the gradients are those of the values
    before the rotation. `angles` are the cosines and sines, float32 [at least the longest row's length, dim / 2].

    Returns:
        d/d(qkv) [tokens, 3, heads, dim]; d/d(bias) of the linear layer that computed `qkv`, float32 [3 * heads * dim],
        which is empty if `bias` is false.
    """
    states = AttendedStates(grad_out.contiguous(), out, qkv.contiguous(), sums)
    grad, parts, _ = row_gradients(states, cu_seqlens, cu_keys, blocks, wrap, window, bias, angles)
    return grad, column_sums(parts, wrap) if bias else parts


class AttendedStates(NamedTuple):
    """Arguments and results of `short_attention.attend`, contiguous, and the gradient `grad_out` of its output."""

    grad_out: Tensor
    out: Tensor
    qkv: Tensor
    sums: Tensor


def row_gradients(
    states: AttendedStates, cu_seqlens: Tensor, cu_keys: Tensor, blocks: Tensor, wrap: Callable[..., Any],
    window: int | None = None, bias: bool = True, angles: tuple[Tensor, Tensor] | None = None,
    lists: ListTensors | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of each row's queries, and of its keys and values by its own queries.

    The arguments are those of `attend_backward`, and the lists of `attend`.

    Returns:
        d/d(qkv) [tokens, 3, heads, dim]; partial sums of it, float32 [at least rows, 3 * heads * dim], of which row r
        is from row r of the batch, empty if `bias` is false; with lists, the inner product of each output with its
        gradient, float32 [heads, tokens].
    """
    tokens, _, heads, dim = states.qkv.shape
    rows = cu_seqlens.shape[0] - 1
    grad, means = torch.empty_like(states.qkv), torch.empty_like(states.sums)
    parts = states.sums.new_empty(rows + blocks.shape[0] if bias else 0, 3 * heads * dim)
    constants: dict[str, Any] = {"SCALE": dim**-0.5, "HEADS": heads, "DIM": dim, "SUMS": bias}
    constants |= {"WINDOW": -1 if window is None else window, "ROTARY": angles is not None, "LISTS": lists is not None}
    turns = angles or (states.sums, states.sums)
    tensors = (*states, means, grad, parts, cu_seqlens, cu_keys, *list_arguments(states.qkv, lists, cu_seqlens), *turns)
    launches = backward_launches(dim)
    longest = {"SHORTEST": launches[-1][1]["SIZE"]}
    # a program ends at once if its row's length is outside of the launch's range
    with torch.cuda.device_of(grad):
        for kernel, settings in launches:
            wrap(kernel)[(rows * heads,)](*tensors, tokens, **constants, **settings)
        for kernel, settings in BLOCK_LAUNCHES:
            wrap(kernel)[(blocks.shape[0] * heads,)](*tensors, blocks, rows, tokens, **constants, **longest, **settings)
    return grad, parts, means
