"""Causal attention within short ragged rows in Triton, with several query heads per key head.

As in `short_attention`, a row is cut into blocks of 64 with a running softmax (Dao et al., 2022, arXiv:2205.14135). A
block of queries skips the blocks of keys after it. Query heads of a group (Ainslie et al., 2023, arXiv:2305.13245) read
the same keys and values, which are not copied.

Rows may share a prefix, which the batch holds once, before the rests of these rows (`SharedPrefixes`). A block of
queries then reads the keys of its prefix and those of its own row. The constant FIELDS of the kernels is the number of
columns of `blocks`: 5 with shared prefixes, otherwise 2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ranker.encoders.kernels.blocks import BLOCK
from ranker.encoders.kernels.short_attention import LOG2E

MAX_LENGTH = 512  # longer rows work, but torch's kernel is then faster
WIDE_HEADS_NEED = 128 * 1024  # bytes of shared memory for heads of size 128; heads of size 64 need less


@triton.jit
def reads(i, j, length, WINDOW: tl.constexpr):
    """Return whether queries at positions `i` attend to keys at positions `j`. A negative WINDOW means no limit."""
    if WINDOW >= 0:
        return (j <= i) & (j < length) & (i - j <= WINDOW)
    else:  # noqa: RET505 - without this branch, Triton compiles both returns
        return (j <= i) & (j < length)


@triton.jit
def prefix_of(block, FIELDS: tl.constexpr):
    """Return the index of the first token of a block's prefix, and the number of its tokens; 0 without a prefix."""
    if FIELDS == 5:
        return tl.load(block + 2).to(tl.int64), tl.load(block + 3)
    else:  # noqa: RET505 - without this branch, Triton compiles both returns
        return tl.full([], 0, tl.int64), 0


@triton.jit
def tokens_at(j, start, prefix, shared, FIELDS: tl.constexpr):
    """Return the indices of the keys at positions `j`: those of the prefix, then those of the row."""
    if FIELDS == 5:
        return tl.where(j < shared, prefix + j, start + j - shared)
    else:  # noqa: RET505
        return start + j


@triton.jit(do_not_specialize=["num_tokens"])
def _attend(
    query, key, value, out, sums, cu_seqlens, blocks, query_stride, key_stride, value_stride, num_tokens,
    SCALE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr,
    FIELDS: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute attention of a block of queries, for one head."""
    block, head = blocks + tl.program_id(0) // HEADS * FIELDS, tl.program_id(0) % HEADS
    row, begin = tl.load(block), tl.load(block + 1)
    if row >= 0:
        start = tl.load(cu_seqlens + row).to(tl.int64)
        length = (tl.load(cu_seqlens + row + 1) - start).to(tl.int32)
        prefix, shared = prefix_of(block, FIELDS)
        dims = tl.arange(0, DIM)
        i = begin + tl.arange(0, SIZE)
        in_row = (i < length)[:, None]
        q = tl.load(query + (start + i)[:, None] * query_stride + head * DIM + dims[None, :], mask=in_row, other=0.0)
        key_base = key + head // GROUP * DIM + dims[None, :]
        value_base = value + head // GROUP * DIM + dims[None, :]
        running_max = tl.full([SIZE], float("-inf"), tl.float32)
        running_sum = tl.zeros([SIZE], tl.float32)
        mixed = tl.zeros([SIZE, DIM], tl.float32)
        lowest = 0
        if WINDOW >= 0:
            lowest = tl.maximum(shared + begin - WINDOW, 0) // KEYS * KEYS
        for first in range(lowest, shared + tl.minimum(begin + SIZE, length), KEYS):
            j = first + tl.arange(0, KEYS)
            tokens, is_key = tokens_at(j, start, prefix, shared, FIELDS)[:, None], (j < shared + length)[:, None]
            k = tl.load(key_base + tokens * key_stride, mask=is_key, other=0.0)
            v = tl.load(value_base + tokens * value_stride, mask=is_key, other=0.0)
            logits = tl.dot(q, tl.trans(k)) * (SCALE * LOG2E)
            read = reads(shared + i[:, None], j[None, :], shared + length, WINDOW)
            logits = tl.where(read, logits, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(logits, 1))
            # a query may read none of these keys
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(logits - safe_max[:, None])
            rescale = tl.exp2(running_max - safe_max)
            running_sum = running_sum * rescale + tl.sum(weights, 1)
            mixed = mixed * rescale[:, None] + tl.dot(weights.to(v.dtype), v)
            running_max = new_max
        # positions after the row have no sum
        running_sum = tl.where(i < length, running_sum, 1.0)
        pointers = out + (start + i)[:, None] * (HEADS * DIM) + head * DIM + dims[None, :]
        tl.store(pointers, (mixed / running_sum[:, None]).to(out.dtype.element_ty), mask=in_row)
        tl.store(sums + head.to(tl.int64) * num_tokens + start + i, running_max + tl.log2(running_sum), mask=i < length)


# launch settings, measured on an H200 with rows of 87 tokens, see docs/performance.md
FORWARD = {"SIZE": BLOCK, "KEYS": 64, "num_warps": 4, "num_stages": 2}


def attend(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, blocks: Tensor, scale: float, window: int = -1
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within each row: a token attends to itself and to earlier tokens.

    Args:
        query: bf16 or fp16 [tokens, heads, dim]; every token belongs to a row.
        key: [tokens, key heads, dim]; the number of heads is a multiple of that of key heads.
        value: As `key`.
        cu_seqlens: Cumulative row lengths, int32 [rows + 1].
        blocks: Row, and position of the first token, of each block of `BLOCK` tokens, int32 [blocks, 2]; the row is -1
            if a block is unused (`RaggedLayout.blocks`). With shared prefixes int32 [blocks, 5], see
            `SharedPrefixes.blocks`; `cu_seqlens` then has the prefixes and the rests of rows as rows.
        scale: Factor of the logits.
        window: Largest distance between a token and a token that it attends to; negative: no limit. With shared
            prefixes there must be no limit.

    Returns:
        Attention output [tokens, heads, dim]; base-2 logarithms of the softmax sums, float32 [heads, tokens].
    """
    tokens, heads, dim = query.shape
    parts = [in_rows(part) for part in (query, key, value)]
    out = torch.empty(tokens, heads, dim, dtype=query.dtype, device=query.device)
    sums = torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
    if tokens:
        with torch.cuda.device_of(query):  # Triton launches on the current device
            _attend[(blocks.shape[0] * heads,)](
                *parts, out, sums, cu_seqlens, blocks, *(part.stride(0) for part in parts), tokens,
                **constants_of(query, key, blocks, scale, window), **FORWARD,
            )  # fmt: skip
    return out, sums


def constants_of(query: Tensor, key: Tensor, blocks: Tensor, scale: float, window: int) -> dict[str, Any]:
    """Return the constants of the kernels that depend on their arguments.

    Raises:
        ValueError: A window with shared prefixes.
    """
    (heads, dim), fields = query.shape[1:], blocks.shape[1]
    if fields == 5 and window >= 0:
        raise ValueError(f"window: expected no limit with shared prefixes, got {window}")
    group = heads // key.shape[1]
    return {"SCALE": scale, "HEADS": heads, "GROUP": group, "DIM": dim, "WINDOW": window, "FIELDS": fields}


def in_rows(part: Tensor) -> Tensor:
    """Return a tensor [tokens, heads, dim] in which the values of each token are contiguous."""
    together = part.stride(2) == 1 and part.stride(1) == part.shape[2]
    return part if together else part.contiguous()
