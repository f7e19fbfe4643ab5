"""Attention within short ragged rows, forward and backward, in Triton.

Libraries' kernels are built for long sequences: pairs of 86 tokens fill a part of their tiles, and their backward takes three passes.
Here a row of up to 128 tokens is one tile, whose backward is one pass without atomics: five products, nothing but the states and the
logarithms of the softmax's sums read back. Longer rows go through blocks of 64 with a running softmax (Dao et al., 2022,
arXiv:2205.14135). Queries, keys and values come as one packed tensor, so that one matrix product makes them and one gradient leaves.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_LENGTH = 512  # longer rows work, but the library's kernel suits them better
HEAD_SIZES = (16, 32, 64, 128)
LOG2E = 1.4426950408889634
BLOCK = 64  # tile of the kernels that loop
TILE = 128  # longest row that is one tile


@triton.jit
def _attend(
    qkv, out, sums, cu_seqlens, cu_keys, scale, num_tokens, HEADS: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """One block of queries of one row and head."""
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = tl.load(cu_seqlens + row).to(tl.int64)
    length = tl.load(cu_seqlens + row + 1) - start
    num_keys = tl.load(cu_keys + row + 1) - tl.load(cu_keys + row)
    if tl.program_id(1) * QUERIES < length:
        dims = tl.arange(0, DIM)
        i = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
        base = qkv + start * (3 * HEADS * DIM) + head * DIM
        query = tl.load(base + i[:, None] * (3 * HEADS * DIM) + dims[None, :], mask=(i < length)[:, None], other=0.0)
        top = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        mixed = tl.zeros([QUERIES, DIM], tl.float32)
        for first in range(0, num_keys, KEYS):
            j = first + tl.arange(0, KEYS)
            there = base + j[:, None] * (3 * HEADS * DIM) + dims[None, :]
            key = tl.load(there + HEADS * DIM, mask=(j < num_keys)[:, None], other=0.0)
            value = tl.load(there + 2 * HEADS * DIM, mask=(j < num_keys)[:, None], other=0.0)
            logits = tl.dot(query, tl.trans(key)) * scale
            logits = tl.where((j < num_keys)[None, :], logits, float("-inf"))
            higher = tl.maximum(top, tl.max(logits, 1))
            weights = tl.exp2(logits - higher[:, None])
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.sum(weights, 1)
            mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value)
            top = higher
        place = out + (start + i)[:, None] * (HEADS * DIM) + head * DIM + dims[None, :]
        tl.store(place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=(i < length)[:, None])
        tl.store(sums + head.to(tl.int64) * num_tokens + start + i, top + tl.log2(total), mask=i < length)


@triton.jit
def _tile_backward(
    grad_out, qkv, sums, grad, cu_seqlens, cu_keys, scale, num_tokens, SCALE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    SHORTEST: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """All gradients of one row and head whose tokens, more than SHORTEST, fit into one tile."""
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = tl.load(cu_seqlens + row).to(tl.int64)
    length = tl.load(cu_seqlens + row + 1) - start
    if (length > SHORTEST) & (length <= SIZE):
        num_keys = tl.load(cu_keys + row + 1) - tl.load(cu_keys + row)
        dims = tl.arange(0, DIM)
        i = tl.arange(0, SIZE)
        real = (i < length)[:, None]
        offsets = (start + i)[:, None] * (3 * HEADS * DIM) + head * DIM + dims[None, :]
        query = tl.load(qkv + offsets, mask=real, other=0.0)
        key = tl.load(qkv + offsets + HEADS * DIM, mask=real, other=0.0)
        value = tl.load(qkv + offsets + 2 * HEADS * DIM, mask=real, other=0.0)
        above = tl.load(grad_out + (start + i)[:, None] * (HEADS * DIM) + head * DIM + dims[None, :], mask=real, other=0.0)
        total = tl.load(sums + head.to(tl.int64) * num_tokens + start + i, mask=i < length, other=float("inf"))
        logits = tl.where((i < num_keys)[None, :], tl.dot(query, tl.trans(key)) * scale, float("-inf"))
        weights = tl.exp2(logits - total[:, None])
        tl.store(grad + offsets + 2 * HEADS * DIM, tl.dot(tl.trans(weights.to(value.dtype)), above).to(grad.dtype.element_ty), mask=real)
        toward = tl.dot(above, tl.trans(value))
        slope = (weights * (toward - tl.sum(weights * toward, 1)[:, None]) * SCALE).to(query.dtype)
        tl.store(grad + offsets, tl.dot(slope, key).to(grad.dtype.element_ty), mask=real)
        tl.store(grad + offsets + HEADS * DIM, tl.dot(tl.trans(slope), query).to(grad.dtype.element_ty), mask=real)


@triton.jit
def _block_backward(
    grad_out, out, qkv, sums, grad, cu_seqlens, cu_keys, scale, num_tokens, SCALE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    SHORTEST: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of tokens of a row of more than SHORTEST: as keys and values, then as queries."""
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = tl.load(cu_seqlens + row).to(tl.int64)
    length = tl.load(cu_seqlens + row + 1) - start
    if (length > SHORTEST) & (tl.program_id(1) * SIZE < length):
        num_keys = tl.load(cu_keys + row + 1) - tl.load(cu_keys + row)
        dims = tl.arange(0, DIM)
        own = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
        real = (own < length)[:, None]
        base = start * (3 * HEADS * DIM) + head * DIM + dims[None, :]
        above_base = start * (HEADS * DIM) + head * DIM + dims[None, :]
        sums += head.to(tl.int64) * num_tokens + start
        mine = base + own[:, None] * (3 * HEADS * DIM)
        key = tl.load(qkv + mine + HEADS * DIM, mask=real, other=0.0)
        value = tl.load(qkv + mine + 2 * HEADS * DIM, mask=real, other=0.0)
        grad_key = tl.zeros([SIZE, DIM], tl.float32)
        grad_value = tl.zeros([SIZE, DIM], tl.float32)
        for first in range(0, length, SIZE):
            i = first + tl.arange(0, SIZE)
            there = (i < length)[:, None]
            query = tl.load(qkv + base + i[:, None] * (3 * HEADS * DIM), mask=there, other=0.0)
            above = tl.load(grad_out + above_base + i[:, None] * (HEADS * DIM), mask=there, other=0.0)
            made = tl.load(out + above_base + i[:, None] * (HEADS * DIM), mask=there, other=0.0)
            total = tl.load(sums + i, mask=i < length, other=float("inf"))
            logits = tl.where((own < num_keys)[None, :], tl.dot(query, tl.trans(key)) * scale, float("-inf"))
            weights = tl.exp2(logits - total[:, None])
            grad_value += tl.dot(tl.trans(weights.to(value.dtype)), above)
            mean = tl.sum(above.to(tl.float32) * made.to(tl.float32), 1)
            slope = (weights * (tl.dot(above, tl.trans(value)) - mean[:, None]) * SCALE).to(query.dtype)
            grad_key += tl.dot(tl.trans(slope), query)
        tl.store(grad + mine + HEADS * DIM, grad_key.to(grad.dtype.element_ty), mask=real)
        tl.store(grad + mine + 2 * HEADS * DIM, grad_value.to(grad.dtype.element_ty), mask=real)

        query = tl.load(qkv + mine, mask=real, other=0.0)
        above = tl.load(grad_out + above_base + own[:, None] * (HEADS * DIM), mask=real, other=0.0)
        made = tl.load(out + above_base + own[:, None] * (HEADS * DIM), mask=real, other=0.0)
        total = tl.load(sums + own, mask=own < length, other=float("inf"))
        mean = tl.sum(above.to(tl.float32) * made.to(tl.float32), 1)
        grad_query = tl.zeros([SIZE, DIM], tl.float32)
        for first in range(0, num_keys, SIZE):
            j = first + tl.arange(0, SIZE)
            there = (j < num_keys)[:, None]
            key = tl.load(qkv + base + j[:, None] * (3 * HEADS * DIM) + HEADS * DIM, mask=there, other=0.0)
            value = tl.load(qkv + base + j[:, None] * (3 * HEADS * DIM) + 2 * HEADS * DIM, mask=there, other=0.0)
            logits = tl.where((j < num_keys)[None, :], tl.dot(query, tl.trans(key)) * scale, float("-inf"))
            weights = tl.exp2(logits - total[:, None])
            slope = (weights * (tl.dot(above, tl.trans(value)) - mean[:, None]) * SCALE).to(key.dtype)
            grad_query += tl.dot(slope, key)
        tl.store(grad + mine, grad_query.to(grad.dtype.element_ty), mask=real)


# the launches: measured on an H200, see docs/performance.md
FORWARD = {"QUERIES": 64, "KEYS": 64, "num_warps": 4, "num_stages": 3}
SMALL_TILE = {"SIZE": 64, "num_warps": 4, "num_stages": 1}
LARGE_TILE = {"SIZE": 128, "num_warps": 4, "num_stages": 1}
BLOCKS = {"SIZE": 64, "num_warps": 4, "num_stages": 2}


@torch.library.custom_op("ranker::short_attention", mutates_args=())
def short_attention(qkv: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    """Attend within each row.

    Args:
        qkv: Queries, keys and values, bf16 or fp16 [tokens, 3, heads, dim], contiguous; every token belongs to a row.
        cu_seqlens: Cumulative row lengths, int32 [rows + 1].
        cu_keys: Cumulative counts of the tokens that each row attends to, its first ones, int32 [rows + 1].
        max_length: At least the longest row.

    Returns:
        Mixed values [tokens, heads, dim]; base-2 logarithms of the softmax's sums, float32 [heads, tokens].
    """
    tokens, _, heads, dim = qkv.shape
    qkv = qkv.contiguous()
    out = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    sums = torch.empty(heads, tokens, dtype=torch.float32, device=qkv.device)
    grid = ((len(cu_seqlens) - 1) * heads, triton.cdiv(max_length, FORWARD["QUERIES"]))
    _attend[grid](qkv, out, sums, cu_seqlens, cu_keys, dim**-0.5 * LOG2E, tokens, HEADS=heads, DIM=dim, **FORWARD)
    return out, sums


@short_attention.register_fake
def _(qkv: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, max_length: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    tokens, _, heads, dim = qkv.shape
    return qkv.new_empty(tokens, heads, dim), qkv.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("ranker::short_attention_backward", mutates_args=())
def short_attention_backward(
    grad_out: Tensor, qkv: Tensor, out: Tensor, sums: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, max_length: int
) -> Tensor:
    """Gradient of `short_attention` by its `qkv`."""
    tokens, _, heads, dim = qkv.shape
    qkv, grad_out = qkv.contiguous(), grad_out.contiguous()
    grad = torch.empty_like(qkv)
    programs = (len(cu_seqlens) - 1) * heads
    scale = dim**-0.5
    common: dict[str, Any] = {"SCALE": scale, "HEADS": heads, "DIM": dim}
    _tile_backward[(programs,)](grad_out, qkv, sums, grad, cu_seqlens, cu_keys, scale * LOG2E, tokens, SHORTEST=0, **common, **SMALL_TILE)
    longest_tile = SMALL_TILE["SIZE"]
    if max_length > longest_tile and dim <= 64:  # a tile of 128 by 128 would not fit beside heads of 128
        _tile_backward[(programs,)](
            grad_out, qkv, sums, grad, cu_seqlens, cu_keys, scale * LOG2E, tokens, SHORTEST=longest_tile, **common, **LARGE_TILE
        )
        longest_tile = TILE
    if max_length > longest_tile:
        _block_backward[(programs, triton.cdiv(max_length, BLOCKS["SIZE"]))](
            grad_out, out, qkv, sums, grad, cu_seqlens, cu_keys, scale * LOG2E, tokens, SHORTEST=longest_tile, **common, **BLOCKS
        )
    return grad


@short_attention_backward.register_fake
def _(
    grad_out: Tensor, qkv: Tensor, out: Tensor, sums: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, max_length: int  # noqa: ARG001
) -> Tensor:  # fmt: skip
    return torch.empty_like(qkv)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, cu_seqlens, cu_keys, ctx.max_length = inputs
    ctx.save_for_backward(qkv, *output, cu_seqlens, cu_keys)


def _backward(ctx: Any, grad_out: Tensor, grad_sums: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ARG001 - sums are no result
    return short_attention_backward(grad_out, *ctx.saved_tensors, ctx.max_length), None, None, None


short_attention.register_autograd(_backward, setup_context=_keep)
