"""List attention for short rows in Triton: a token attends to its own row and to the first token of each other row.

`short_attention` computes the attention within rows. The kernels here add the first tokens of the list's other rows to
its softmax sums and outputs. The backward pass uses the sums and outputs over all keys, so each part of the softmax can
be differentiated separately (Dao et al., 2022, arXiv:2205.14135). All rows of a list contribute to the gradient of a
first token; the contributions are summed in a fixed order.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ranker.encoders.kernels.blocks import BLOCK
from ranker.encoders.kernels.short_attention import LOG2E, attend
from ranker.encoders.kernels.short_attention_backward import attend_backward
from ranker.encoders.kernels.sums import column_sums

KEYS = 32  # number of first tokens that a Triton program reads at a time
SPLITS = 8  # number of Triton programs that share the queries of a list to compute the gradient of its first tokens
LAUNCH = {"SIZE": BLOCK, "KEYS": KEYS, "num_warps": 4, "num_stages": 2}


class ListTensors(NamedTuple):
    """The rows of each list.

    Args:
        first_rows: For each row, the index of the first row of its list, int32 [rows].
        end_rows: For each row, the index after the last row of its list, int32 [rows].
        token_rows: Row of each token, int32 [tokens].
        key_blocks: Blocks of up to `KEYS` rows of one list, int32 [blocks, 2]: the index of the list's first row (-1:
            the block is unused), and how many rows of the list come before the block.
        biases: For each row, what is added to the logits of other rows' first tokens, in base 2, float32 [rows].
    """

    first_rows: Tensor
    end_rows: Tensor
    token_rows: Tensor
    key_blocks: Tensor
    biases: Tensor


def list_tensors(lists: Tensor, cu_seqlens: Tensor, token_rows: Tensor, list_bias: Tensor | None = None) -> ListTensors:
    """Return the rows of each list, computed on the device. Rows after the last list form lists of one row each.

    Args:
        lists: Number of rows of each list, int64 [lists].
        cu_seqlens: Cumulative row lengths, int32 [rows + 1].
        token_rows: Row of each token, int64 [tokens].
        list_bias: What is added to the logits of other rows' first tokens, by list, [lists]; None: nothing.
    """
    rows = torch.arange(len(cu_seqlens) - 1, device=lists.device)
    ends = lists.cumsum(0)
    owners = torch.searchsorted(ends, rows, right=True)
    inside, owners = owners < len(lists), owners.clamp(max=len(lists) - 1)
    first = torch.where(inside, (ends - lists)[owners], rows)
    end = torch.where(inside, ends[owners], rows + 1)
    block_ends = ((lists + KEYS - 1) // KEYS).cumsum(0)
    numbers = torch.arange(len(rows) // KEYS + len(lists), device=lists.device)
    of_block = torch.searchsorted(block_ends, numbers, right=True)
    used, of_block = of_block < len(lists), of_block.clamp(max=len(lists) - 1)
    before = (block_ends - (lists + KEYS - 1) // KEYS)[of_block]
    starts = torch.where(used, (ends - lists)[of_block], -1)
    key_blocks = torch.stack([starts, (numbers - before) * KEYS], 1)
    of_rows = torch.zeros(len(rows), device=lists.device)
    if list_bias is not None:
        of_rows = torch.where(inside, list_bias[owners] / math.log(2), 0.0).float()
    return ListTensors(first.int(), end.int(), token_rows.int(), key_blocks.int(), of_rows)


@triton.jit
def _first_keys(qkv, cu_seqlens, rows, is_row, head, kind, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Load the keys (kind 1) or values (kind 2) of rows' first tokens, [rows, DIM]; 0 where `is_row` is False."""
    tokens = tl.load(cu_seqlens + rows, mask=is_row, other=0).to(tl.int64)
    pointers = qkv + tokens[:, None] * (3 * HEADS * DIM) + (kind * HEADS + head) * DIM + tl.arange(0, DIM)[None, :]
    return tl.load(pointers, mask=is_row[:, None], other=0.0)


@triton.jit
def _others(
    qkv, out, sums, cu_seqlens, blocks, first_rows, end_rows, biases, num_tokens, SCALE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add the first tokens of the other rows to `out` and `sums`, for a block of queries and one head."""
    row, head = tl.load(blocks + tl.program_id(0) // HEADS * 2), tl.program_id(0) % HEADS
    if row >= 0:
        first, end = tl.load(first_rows + row), tl.load(end_rows + row)
        if end > first + 1:
            bias = tl.load(biases + row)
            start = tl.load(cu_seqlens + row).to(tl.int64)
            length = tl.load(cu_seqlens + row + 1) - start
            i = tl.load(blocks + tl.program_id(0) // HEADS * 2 + 1) + tl.arange(0, SIZE)
            dims, in_row = tl.arange(0, DIM), (i < length)[:, None]
            query_pointers = qkv + (start + i)[:, None] * (3 * HEADS * DIM) + head * DIM + dims[None, :]
            query = tl.load(query_pointers, mask=in_row, other=0.0)
            out_pointers = out + (start + i)[:, None] * (HEADS * DIM) + head * DIM + dims[None, :]
            sum_pointers = sums + head.to(tl.int64) * num_tokens + start + i
            running_max = tl.load(sum_pointers, mask=i < length, other=0.0)
            running_sum = tl.full([SIZE], 1.0, tl.float32)
            mixed = tl.load(out_pointers, mask=in_row, other=0.0).to(tl.float32)
            for begin in range(first, end, KEYS):
                j = begin + tl.arange(0, KEYS)
                is_other = (j < end) & (j != row)
                key = _first_keys(qkv, cu_seqlens, j, is_other, head, 1, HEADS, DIM)
                value = _first_keys(qkv, cu_seqlens, j, is_other, head, 2, HEADS, DIM)
                logits = tl.dot(query, tl.trans(key)) * (SCALE * LOG2E) + bias
                logits = tl.where(is_other[None, :], logits, float("-inf"))
                new_max = tl.maximum(running_max, tl.max(logits, 1))
                weights = tl.exp2(logits - new_max[:, None])
                rescale = tl.exp2(running_max - new_max)
                running_sum = running_sum * rescale + tl.sum(weights, 1)
                mixed = mixed * rescale[:, None] + tl.dot(weights.to(value.dtype), value)
                running_max = new_max
            tl.store(out_pointers, (mixed / running_sum[:, None]).to(out.dtype.element_ty), mask=in_row)
            tl.store(sum_pointers, running_max + tl.log2(running_sum), mask=i < length)


@triton.jit
def _queries_backward(
    grad_out, out, qkv, sums, means, grad, parts, cu_seqlens, blocks, first_rows, end_rows, biases,
    num_tokens, SCALE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SUMS: tl.constexpr, SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Add the part of the other rows' first tokens to the gradients of a block of queries and one head.

    The kernel also writes two arrays. `means`, [HEADS, tokens], has the inner product of each output with its gradient,
    which `_keys_backward` reads. `parts`, [blocks, HEADS * DIM], has the sums of the added gradients.
    """
    number, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    row = tl.load(blocks + number * 2)
    dims = tl.arange(0, DIM)
    summed = tl.zeros([DIM], tl.float32)
    if row >= 0:
        first, end = tl.load(first_rows + row), tl.load(end_rows + row)
        if end > first + 1:
            bias = tl.load(biases + row)
            start = tl.load(cu_seqlens + row).to(tl.int64)
            length = tl.load(cu_seqlens + row + 1) - start
            i = tl.load(blocks + number * 2 + 1) + tl.arange(0, SIZE)
            in_row = (i < length)[:, None]
            offsets = (start + i)[:, None] * (3 * HEADS * DIM) + head * DIM + dims[None, :]
            out_offsets = (start + i)[:, None] * (HEADS * DIM) + head * DIM + dims[None, :]
            query = tl.load(qkv + offsets, mask=in_row, other=0.0)
            upstream = tl.load(grad_out + out_offsets, mask=in_row, other=0.0)
            output = tl.load(out + out_offsets, mask=in_row, other=0.0)
            mean = tl.sum(upstream.to(tl.float32) * output.to(tl.float32), 1)
            totals = head.to(tl.int64) * num_tokens + start + i
            tl.store(means + totals, mean, mask=i < length)
            log_sum = tl.load(sums + totals, mask=i < length, other=float("inf"))
            grad_query = tl.zeros([SIZE, DIM], tl.float32)
            for begin in range(first, end, KEYS):
                j = begin + tl.arange(0, KEYS)
                is_other = (j < end) & (j != row)
                key = _first_keys(qkv, cu_seqlens, j, is_other, head, 1, HEADS, DIM)
                value = _first_keys(qkv, cu_seqlens, j, is_other, head, 2, HEADS, DIM)
                logits = tl.dot(query, tl.trans(key)) * (SCALE * LOG2E) + bias
                weights = tl.exp2(tl.where(is_other[None, :], logits, float("-inf")) - log_sum[:, None])
                slope = (weights * (tl.dot(upstream, tl.trans(value)) - mean[:, None])).to(key.dtype)
                grad_query += tl.dot(slope, key)
            grad_query *= SCALE
            before = tl.load(grad + offsets, mask=in_row, other=0.0).to(tl.float32)
            tl.store(grad + offsets, (before + grad_query).to(grad.dtype.element_ty), mask=in_row)
            summed += tl.sum(grad_query, 0)
    if SUMS:
        tl.store(parts + number.to(tl.int64) * (3 * HEADS * DIM) + head * DIM + dims, summed)


@triton.jit
def _keys_backward(
    grad_out, qkv, sums, means, partial, cu_seqlens, key_blocks, end_rows, token_rows, biases, num_rows,
    num_tokens,
    SCALE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of keys and values of up to KEYS first tokens, over a part of the list's queries.

    The results are written to `partial`, float32 [SPLITS, rows, 2, HEADS, DIM].
    """
    number, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    split = tl.program_id(1)
    first = tl.load(key_blocks + number * 2)
    if first >= 0:
        end, bias = tl.load(end_rows + first), tl.load(biases + first)
        j = first + tl.load(key_blocks + number * 2 + 1) + tl.arange(0, KEYS)
        is_row, dims = j < end, tl.arange(0, DIM)
        key = _first_keys(qkv, cu_seqlens, j, is_row, head, 1, HEADS, DIM)
        value = _first_keys(qkv, cu_seqlens, j, is_row, head, 2, HEADS, DIM)
        grad_key = tl.zeros([KEYS, DIM], tl.float32)
        grad_value = tl.zeros([KEYS, DIM], tl.float32)
        start, stop = tl.load(cu_seqlens + first), tl.load(cu_seqlens + end)
        for begin in range(start + split * SIZE, stop, SPLITS * SIZE):
            i = (begin + tl.arange(0, SIZE)).to(tl.int64)
            is_token = i < stop
            query_pointers = qkv + i[:, None] * (3 * HEADS * DIM) + head * DIM + dims[None, :]
            query = tl.load(query_pointers, mask=is_token[:, None], other=0.0)
            out_offsets = i[:, None] * (HEADS * DIM) + head * DIM + dims[None, :]
            upstream = tl.load(grad_out + out_offsets, mask=is_token[:, None], other=0.0)
            totals = head.to(tl.int64) * num_tokens + i
            log_sum = tl.load(sums + totals, mask=is_token, other=float("inf"))
            mean = tl.load(means + totals, mask=is_token, other=0.0)
            row = tl.load(token_rows + i, mask=is_token, other=-1)
            reads = is_row[:, None] & is_token[None, :] & (j[:, None] != row[None, :])
            logits = tl.dot(key, tl.trans(query)) * (SCALE * LOG2E) + bias
            weights = tl.exp2(tl.where(reads, logits, float("-inf")) - log_sum[None, :])
            grad_value += tl.dot(weights.to(value.dtype), upstream)
            slope = (weights * (tl.dot(value, tl.trans(upstream)) - mean[None, :])).to(query.dtype)
            grad_key += tl.dot(slope, query)
        offsets = ((split.to(tl.int64) * num_rows + j)[:, None] * (2 * HEADS) + head) * DIM + dims[None, :]
        tl.store(partial + offsets, grad_key * SCALE, mask=is_row[:, None])
        tl.store(partial + offsets + HEADS * DIM, grad_value, mask=is_row[:, None])


@triton.jit
def _add_to_first(
    partial, grad, parts, cu_seqlens, first_rows, end_rows, num_rows, HEADS: tl.constexpr, DIM: tl.constexpr,
    SUMS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Add the sums of `_keys_backward` to the gradients of one row's first token (its key and value of one head)."""
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    dims = tl.arange(0, DIM)
    is_shared = tl.load(end_rows + row) > tl.load(first_rows + row) + 1
    token = tl.load(cu_seqlens + row).to(tl.int64)
    for kind in tl.static_range(2):
        total = tl.zeros([DIM], tl.float32)
        if is_shared:
            for split in tl.static_range(SPLITS):
                place = (split * num_rows + row).to(tl.int64) * 2 + kind
                total += tl.load(partial + (place * HEADS + head) * DIM + dims)
            pointers = grad + token * (3 * HEADS * DIM) + ((kind + 1) * HEADS + head) * DIM + dims
            tl.store(pointers, (tl.load(pointers).to(tl.float32) + total).to(grad.dtype.element_ty))
        if SUMS:
            tl.store(parts + row.to(tl.int64) * (3 * HEADS * DIM) + ((kind + 1) * HEADS + head) * DIM + dims, total)


def attend_lists(
    qkv: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, blocks: Tensor, *lists: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute attention within lists; `lists` are `ListTensors`, all else is as in `short_attention.attend`."""
    out, sums = attend(qkv, cu_seqlens, cu_keys, blocks)
    tokens, _, heads, dim = qkv.shape
    of = ListTensors(*lists)
    with torch.cuda.device_of(qkv):
        _others[(blocks.shape[0] * heads,)](
            qkv, out, sums, cu_seqlens, blocks, of.first_rows, of.end_rows, of.biases, tokens,
            SCALE=dim**-0.5, HEADS=heads, DIM=dim, **LAUNCH,
        )  # fmt: skip
    return out, sums


def attend_lists_backward(
    grad_out: Tensor, qkv: Tensor, out: Tensor, sums: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, blocks: Tensor,
    *lists: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of `attend_lists`, with the arguments and results of `attend_backward` for rows."""
    tokens, _, heads, dim = qkv.shape
    rows, of = cu_seqlens.shape[0] - 1, ListTensors(*lists)
    grad_out = grad_out.contiguous()
    grad, bias = attend_backward(grad_out, qkv, out, sums, cu_seqlens, cu_keys, blocks, whole=False)
    means, width = torch.empty_like(sums), 3 * heads * dim
    # `parts` has a row for each block of queries (keys and values stay 0), then one for each row (queries stay 0)
    parts = torch.zeros(blocks.shape[0] + rows, width, dtype=torch.float32, device=qkv.device)
    partial = torch.empty(SPLITS, rows, 2, heads, dim, dtype=torch.float32, device=qkv.device)
    constants: dict[str, Any] = {"HEADS": heads, "DIM": dim}
    scaled = {**constants, "SCALE": dim**-0.5, **LAUNCH}
    with torch.cuda.device_of(qkv):
        _queries_backward[(blocks.shape[0] * heads,)](
            grad_out, out, qkv, sums, means, grad, parts, cu_seqlens, blocks, of.first_rows, of.end_rows, of.biases,
            tokens, SUMS=True, **scaled,
        )  # fmt: skip
        _keys_backward[(of.key_blocks.shape[0] * heads, SPLITS)](
            grad_out, qkv, sums, means, partial, cu_seqlens, of.key_blocks, of.end_rows, of.token_rows, of.biases, rows,
            tokens, SPLITS=SPLITS, **scaled,
        )  # fmt: skip
        _add_to_first[(rows * heads,)](
            partial, grad, parts[blocks.shape[0] :], cu_seqlens, of.first_rows, of.end_rows, rows, SUMS=True,
            SPLITS=SPLITS, num_warps=1, **constants,
        )  # fmt: skip
    return grad, bias + column_sums(parts)
