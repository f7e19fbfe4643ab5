"""Gradients of `grouped_attention` in Triton, from the states and the logarithms of the softmax sums.

One kernel computes the gradients of queries, another one those of keys and values. Both compute the attention weights
again. A single kernel would save two of seven matrix products for each pair of blocks. But with heads of size 128 it
needs three times the registers, and it took twice the time.

The gradients of keys and values are summed over a group's query heads in the order of the heads. All tokens from a key
of a shared prefix to the end of the last row's rest read this key, so its gradient is a sum over one range of tokens,
in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ranker.encoders.kernels.blocks import BLOCK
from ranker.encoders.kernels.grouped_attention import constants_of, in_rows, prefix_of, reads, tokens_at
from ranker.encoders.kernels.short_attention import LOG2E


@triton.jit(do_not_specialize=["num_tokens"])
def _queries_backward(
    grad_out, query, key, value, out, sums, means, grad_query, cu_seqlens, blocks,
    grad_stride, query_stride, key_stride, value_stride, num_tokens,
    SCALE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr,
    FIELDS: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of queries of one head, and the inner product of each output and its gradient."""
    block, head = blocks + tl.program_id(0) // HEADS * FIELDS, tl.program_id(0) % HEADS
    row, begin = tl.load(block), tl.load(block + 1)
    if row >= 0:
        start = tl.load(cu_seqlens + row).to(tl.int64)
        length = (tl.load(cu_seqlens + row + 1) - start).to(tl.int32)
        prefix, shared = prefix_of(block, FIELDS)
        dims = tl.arange(0, DIM)[None, :]
        i = begin + tl.arange(0, SIZE)
        inside = i < length
        queries, in_row = (start + i)[:, None], inside[:, None]
        own = head * DIM + dims
        q = tl.load(query + queries * query_stride + own, mask=in_row, other=0.0)
        upstream = tl.load(grad_out + queries * grad_stride + own, mask=in_row, other=0.0)
        mixed = tl.load(out + queries * (HEADS * DIM) + own, mask=in_row, other=0.0)
        mean = tl.sum(upstream.to(tl.float32) * mixed.to(tl.float32), 1)
        of_head = head.to(tl.int64) * num_tokens + start
        tl.store(means + of_head + i, mean, mask=inside)
        log_sum = tl.load(sums + of_head + i, mask=inside, other=float("inf"))
        key_base = key + head // GROUP * DIM + dims
        value_base = value + head // GROUP * DIM + dims
        lowest = 0
        if WINDOW >= 0:
            lowest = tl.maximum(shared + begin - WINDOW, 0) // KEYS * KEYS
        grad_q = tl.zeros([SIZE, DIM], tl.float32)
        for first in tl.range(lowest, shared + tl.minimum(begin + SIZE, length), KEYS, num_stages=STAGES):
            j = first + tl.arange(0, KEYS)
            tokens, is_key = tokens_at(j, start, prefix, shared, FIELDS)[:, None], (j < shared + length)[:, None]
            k = tl.load(key_base + tokens * key_stride, mask=is_key, other=0.0)
            v = tl.load(value_base + tokens * value_stride, mask=is_key, other=0.0)
            logits = tl.dot(q, tl.trans(k)) * (SCALE * LOG2E)
            read = reads(shared + i[:, None], j[None, :], shared + length, WINDOW)
            logits = tl.where(read, logits, float("-inf"))
            weights = tl.exp2(logits - log_sum[:, None])
            slope = weights * (tl.dot(upstream, tl.trans(v)) - mean[:, None])
            grad_q += tl.dot(slope.to(k.dtype), k)
        tl.store(
            grad_query + queries * (HEADS * DIM) + own, (grad_q * SCALE).to(grad_query.dtype.element_ty), mask=in_row
        )


@triton.jit(do_not_specialize=["num_tokens"])
def _keys_backward(
    grad_out, query, key, value, sums, means, grad_key, grad_value, cu_seqlens, blocks,
    grad_stride, query_stride, key_stride, value_stride, num_tokens,
    SCALE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr,
    FIELDS: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and values of one head, over the queries of all heads of its group."""
    key_heads = HEADS // GROUP
    block, head = blocks + tl.program_id(0) // key_heads * FIELDS, tl.program_id(0) % key_heads
    row, begin = tl.load(block), tl.load(block + 1)
    if row >= 0:
        start = tl.load(cu_seqlens + row).to(tl.int64)
        length = (tl.load(cu_seqlens + row + 1) - start).to(tl.int32)
        dims = tl.arange(0, DIM)[None, :]
        j = begin + tl.arange(0, SIZE)
        keys, is_key = (start + j)[:, None], (j < length)[:, None]
        k = tl.load(key + keys * key_stride + head * DIM + dims, mask=is_key, other=0.0)
        v = tl.load(value + keys * value_stride + head * DIM + dims, mask=is_key, other=0.0)
        grad_k, grad_v = tl.zeros([SIZE, DIM], tl.float32), tl.zeros([SIZE, DIM], tl.float32)
        # number of tokens from the row's first to the last token that reads the row's keys
        readers = (tl.load(block + 4) - start).to(tl.int32) if FIELDS == 5 else length
        highest = readers
        if WINDOW >= 0:
            highest = tl.minimum(begin + SIZE + WINDOW, readers)
        # one loop over heads and blocks of queries, so that the next block is loaded while this one is computed
        steps = tl.cdiv(highest - begin, QUERIES)
        for step in tl.range(0, steps * GROUP, num_stages=STAGES):
            member = head * GROUP + step // steps
            i = begin + step % steps * QUERIES + tl.arange(0, QUERIES)
            inside = i < readers
            tokens, own = (start + i)[:, None], member * DIM + dims
            q = tl.load(query + tokens * query_stride + own, mask=inside[:, None], other=0.0)
            upstream = tl.load(grad_out + tokens * grad_stride + own, mask=inside[:, None], other=0.0)
            of_head = member.to(tl.int64) * num_tokens + start
            mean = tl.load(means + of_head + i, mask=inside, other=0.0)
            log_sum = tl.load(sums + of_head + i, mask=inside, other=float("inf"))
            logits = tl.dot(k, tl.trans(q)) * (SCALE * LOG2E)  # [keys, queries]
            logits = tl.where(reads(i[None, :], j[:, None], length, WINDOW), logits, float("-inf"))
            weights = tl.exp2(logits - log_sum[None, :])
            grad_v += tl.dot(weights.to(v.dtype), upstream)
            slope = weights * (tl.dot(v, tl.trans(upstream)) - mean[None, :])
            grad_k += tl.dot(slope.to(k.dtype), q)
        offsets = keys * (key_heads * DIM) + head * DIM + dims
        tl.store(grad_key + offsets, (grad_k * SCALE).to(grad_key.dtype.element_ty), mask=is_key)
        tl.store(grad_value + offsets, grad_v.to(grad_value.dtype.element_ty), mask=is_key)


# launch settings, measured on an H200 with rows of 87 tokens, see docs/performance.md
QUERIES_BACKWARD = {"SIZE": BLOCK, "KEYS": 32, "STAGES": 2, "num_warps": 4}
KEYS_BACKWARD = {"SIZE": BLOCK, "QUERIES": 32, "STAGES": 2, "num_warps": 4}


def attend_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, cu_seqlens: Tensor,
    blocks: Tensor, scale: float, window: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values of `attend`.

    Args:
        grad_out: Gradient of the output, [tokens, heads, dim].
        query: See `attend`.
        key: See `attend`.
        value: See `attend`.
        out: The output of `attend`.
        sums: The softmax sums of `attend`.
        cu_seqlens: See `attend`.
        blocks: See `attend`.
        scale: See `attend`.
        window: See `attend`.
    """
    tokens, heads = query.shape[:2]
    states = [in_rows(part) for part in (grad_out, query, key, value)]
    strides = [part.stride(0) for part in states]
    grads = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in (query, key, value)]
    means = torch.empty_like(sums)
    constants = constants_of(query, key, blocks, scale, window)
    if tokens:
        with torch.cuda.device_of(query):  # Triton launches on the current device
            _queries_backward[(blocks.shape[0] * heads,)](
                *states, out, sums, means, grads[0], cu_seqlens, blocks, *strides, tokens, **constants,
                **QUERIES_BACKWARD,
            )  # fmt: skip
            _keys_backward[(blocks.shape[0] * key.shape[1],)](
                *states, sums, means, *grads[1:], cu_seqlens, blocks, *strides, tokens, **constants, **KEYS_BACKWARD
            )  # fmt: skip
    return grads[0], grads[1], grads[2]
