"""Attention within short ragged rows in Triton.

The kernels of libraries are built for long sequences. Pairs of 86 tokens fill only a part of their tiles. The kernel
here is for head sizes of up to 128. A row is cut into blocks of 64 queries, with a running softmax over blocks of keys
(Dao et al., 2022, arXiv:2205.14135). `short_attention_backward` computes the gradients.

Queries, keys and values are one packed tensor, so one matrix product computes them, and they have one gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ranker.encoders.kernels.blocks import BLOCK
from ranker.encoders.kernels.lists import ListTensors

MAX_LENGTH = 512  # longer rows work, but torch's kernel is then faster
HEAD_SIZES = (16, 32, 64, 128)
LOG2E = tl.constexpr(1.4426950408889634)
# launch settings, measured on an H200, see docs/performance.md
FORWARD = {"QUERIES": BLOCK, "KEYS": 32, "OTHERS": 32, "num_warps": 4, "num_stages": 3}


@triton.jit
def is_near(i, j, num_keys, WINDOW: tl.constexpr):
    """Return whether queries at positions `i` attend to keys at positions `j`. A negative WINDOW means no limit."""
    if WINDOW >= 0:
        return (j < num_keys) & (i - j <= WINDOW) & (j - i <= WINDOW)
    else:  # noqa: RET505 - without this branch, Triton compiles both returns
        return j < num_keys


@triton.jit
def first_near(begin, WINDOW: tl.constexpr, SIZE: tl.constexpr):
    """Return the start (a multiple of SIZE) of the first block within the window of a block that starts at `begin`."""
    if WINDOW >= 0:
        return tl.maximum(begin - WINDOW, 0) // SIZE * SIZE
    else:  # noqa: RET505
        return 0


@triton.jit
def end_near(end, length, WINDOW: tl.constexpr):
    """Return the end of the positions that are within the window of a block that ends at `end`."""
    if WINDOW >= 0:
        return tl.minimum(end + WINDOW, length)
    else:  # noqa: RET505
        return length


@triton.jit
def other_keys(firsts, rows, row, end_row, head, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Load the keys and values of the first tokens of `rows`, each [rows, DIM], and return which rows are others.

    Others are the rows before `end_row`, but not `row`.
    """
    in_list = rows < end_row
    pointers = firsts + rows.to(tl.int64)[:, None] * (2 * HEADS * DIM) + head * DIM + tl.arange(0, DIM)[None, :]
    key = tl.load(pointers, mask=in_list[:, None], other=0.0)
    value = tl.load(pointers + HEADS * DIM, mask=in_list[:, None], other=0.0)
    return key, value, in_list & (rows != row)


@triton.jit
def _add_keys(logits, value, running_max, running_sum, mixed, WINDOW: tl.constexpr):
    """Add a block of keys to a running softmax; return its new maximum, sum and average of values."""
    new_max = tl.maximum(running_max, tl.max(logits, 1))
    if WINDOW >= 0:  # noqa: SIM108 - decided at compile time; a query may have no key in this block
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        safe_max = new_max
    weights = tl.exp2(logits - safe_max[:, None])
    rescale = tl.exp2(running_max - safe_max)
    running_sum = running_sum * rescale + tl.sum(weights, 1)
    return new_max, running_sum, mixed * rescale[:, None] + tl.dot(weights.to(value.dtype), value)


@triton.jit
def _attend(
    qkv, out, sums, cu_seqlens, cu_keys, blocks, firsts, first_rows, end_rows, biases, num_tokens,
    SCALE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr, LISTS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, OTHERS: tl.constexpr,
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
        lowest, highest = first_near(begin, WINDOW, KEYS), end_near(begin + QUERIES, num_keys, WINDOW)
        for first in range(lowest, highest, KEYS):
            j = first + tl.arange(0, KEYS)
            key_pointers = base + j[:, None] * (3 * HEADS * DIM) + dims[None, :]
            is_key = (j < num_keys)[:, None]
            key = tl.load(key_pointers + HEADS * DIM, mask=is_key, other=0.0)
            value = tl.load(key_pointers + 2 * HEADS * DIM, mask=is_key, other=0.0)
            logits = tl.dot(query, tl.trans(key)) * (SCALE * LOG2E)
            logits = tl.where(is_near(i[:, None], j[None, :], num_keys, WINDOW), logits, float("-inf"))
            running_max, running_sum, mixed = _add_keys(logits, value, running_max, running_sum, mixed, WINDOW)
        if LISTS:
            first_row, end_row, bias = tl.load(first_rows + row), tl.load(end_rows + row), tl.load(biases + row)
            for first in range(first_row, end_row, OTHERS):
                j = first + tl.arange(0, OTHERS)
                key, value, is_other = other_keys(firsts, j, row, end_row, head, HEADS, DIM)
                logits = tl.dot(query, tl.trans(key)) * (SCALE * LOG2E) + bias
                logits = tl.where(is_other[None, :], logits, float("-inf"))
                running_max, running_sum, mixed = _add_keys(logits, value, running_max, running_sum, mixed, WINDOW)
        if WINDOW >= 0:  # the weights of a query without keys are 0
            running_max = tl.where(running_sum > 0, running_max, float("inf"))
            running_sum = tl.where(running_sum > 0, running_sum, 1.0)
        out_pointers = out + (start + i)[:, None] * (HEADS * DIM) + head * DIM + dims[None, :]
        tl.store(out_pointers, (mixed / running_sum[:, None]).to(out.dtype.element_ty), mask=(i < length)[:, None])
        tl.store(sums + head.to(tl.int64) * num_tokens + start + i, running_max + tl.log2(running_sum), mask=i < length)


def list_arguments(qkv: Tensor, lists: ListTensors | None, unread: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors of lists for a kernel; without lists the kernel reads none of them and gets `unread`.

    The first of them has the keys and values of each row's first token, [rows, 2, heads, dim]. A kernel then reads
    those of a list as one block.
    """
    if lists is None:
        return unread, unread, unread, unread
    return qkv[:, 1:].index_select(0, lists.first_tokens), lists.first_rows, lists.end_rows, lists.biases


def attend(
    qkv: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, blocks: Tensor, wrap: Callable[..., Any] = lambda kernel: kernel,
    window: int | None = None, lists: ListTensors | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention within each row, or within lists: then also to the first tokens of the list's other rows.

    Args:
        qkv: Queries, keys and values, bf16 or fp16 [tokens, 3, heads, dim], contiguous; every token belongs to a row.
        cu_seqlens: Cumulative row lengths, int32 [rows + 1].
        cu_keys: Cumulative numbers of attended tokens, which are the first of each row, int32 [rows + 1].
        blocks: Row, and position of the first token, of each block of `BLOCK` tokens, int32 [blocks, 2]; the row is -1
            if a block is unused (`RaggedLayout.blocks`).
        wrap: Wrapper of the kernel; `wrap_triton` if it is traced.
        window: Largest distance between a token and a token that it attends to; None: no limit. A token that attends
            to no token gets zeros.
        lists: The rows of each list; only without a window.

    Returns:
        Attention output [tokens, heads, dim]; base-2 logarithms of the softmax sums, float32 [heads, tokens].
    """
    tokens, _, heads, dim = qkv.shape
    qkv = qkv.contiguous()
    out = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    sums = torch.empty(heads, tokens, dtype=torch.float32, device=qkv.device)
    with torch.cuda.device_of(qkv):  # Triton launches on the current device
        wrap(_attend)[(blocks.shape[0] * heads,)](
            qkv, out, sums, cu_seqlens, cu_keys, blocks, *list_arguments(qkv, lists, cu_seqlens), tokens,
            SCALE=dim**-0.5, HEADS=heads, DIM=dim, WINDOW=-1 if window is None else window, LISTS=lists is not None,
            **FORWARD,
        )  # fmt: skip
    return out, sums
