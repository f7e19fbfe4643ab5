"""Attention within short ragged rows, forward and backward, in Triton.

Libraries' kernels are built for long sequences: pairs of 86 tokens fill a part of their tiles, and their backward takes
three passes. With heads of up to 64 a row of up to 128 tokens is one tile, whose backward is one pass without atomics:
five products, nothing but the states and the logarithms of the softmax's sums read back. In rows of up to 256 all keys
stay while blocks of queries pass, where the card has room for them; all others go through blocks of 64 with a running
softmax (Dao et al., 2022, arXiv:2205.14135). Queries, keys and values come as one packed tensor, so that one matrix
product makes them and one gradient leaves; the gradient of their bias is summed on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from ranker.encoders.kernels.blocks import BLOCK
from ranker.encoders.kernels.sums import column_sums

MAX_LENGTH = 512  # longer rows work, but the library's kernel suits them better
HEAD_SIZES = (16, 32, 64, 128)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    qkv, out, sums, cu_seqlens, cu_keys, blocks, num_tokens, SCALE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One head of a block of queries."""
    row, head = tl.load(blocks + tl.program_id(0) // HEADS * 2), tl.program_id(0) % HEADS
    if row >= 0:
        start = tl.load(cu_seqlens + row).to(tl.int64)
        length = tl.load(cu_seqlens + row + 1) - start
        num_keys = tl.load(cu_keys + row + 1) - tl.load(cu_keys + row)
        dims = tl.arange(0, DIM)
        i = tl.load(blocks + tl.program_id(0) // HEADS * 2 + 1) + tl.arange(0, QUERIES)
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
            logits = tl.dot(query, tl.trans(key)) * (SCALE * LOG2E)
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
    grad_out, out, qkv, sums, grad, parts, cu_seqlens, cu_keys, num_tokens, SCALE: tl.constexpr, HEADS: tl.constexpr,  # noqa: ARG001
    DIM: tl.constexpr, SHORTEST: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """All gradients of one row and head whose tokens, more than SHORTEST, fit into one tile; `out` is not read."""
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
        above = tl.load(
            grad_out + (start + i)[:, None] * (HEADS * DIM) + head * DIM + dims[None, :], mask=real, other=0.0
        )
        total = tl.load(sums + head.to(tl.int64) * num_tokens + start + i, mask=i < length, other=float("inf"))
        logits = tl.where((i < num_keys)[None, :], tl.dot(query, tl.trans(key)) * (SCALE * LOG2E), float("-inf"))
        weights = tl.exp2(logits - total[:, None])
        summed = parts + row.to(tl.int64) * (3 * HEADS * DIM) + head * DIM + dims
        found = tl.dot(tl.trans(weights.to(value.dtype)), above)
        tl.store(grad + offsets + 2 * HEADS * DIM, found.to(grad.dtype.element_ty), mask=real)
        tl.store(summed + 2 * HEADS * DIM, tl.sum(found, 0))
        toward = tl.dot(above, tl.trans(value))
        slope = (weights * (toward - tl.sum(weights * toward, 1)[:, None]) * SCALE).to(query.dtype)
        found = tl.dot(slope, key)
        tl.store(grad + offsets, found.to(grad.dtype.element_ty), mask=real)
        tl.store(summed, tl.sum(found, 0))
        found = tl.dot(tl.trans(slope), query)
        tl.store(grad + offsets + HEADS * DIM, found.to(grad.dtype.element_ty), mask=real)
        tl.store(summed + HEADS * DIM, tl.sum(found, 0))


@triton.jit
def _keys_backward(
    grad_out, out, qkv, sums, grad, parts, cu_seqlens, cu_keys, num_tokens, SCALE: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, SHORTEST: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All gradients of one row and head of more than SHORTEST tokens whose keys fit into one tile, past which blocks of queries go."""
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = tl.load(cu_seqlens + row).to(tl.int64)
    length = (tl.load(cu_seqlens + row + 1) - start).to(tl.int32)
    if (length > SHORTEST) & (length <= SIZE):
        num_keys = tl.load(cu_keys + row + 1) - tl.load(cu_keys + row)
        dims = tl.arange(0, DIM)
        j = tl.arange(0, SIZE)
        seen, real = (j < num_keys)[:, None], (j < length)[:, None]
        base = qkv + start * (3 * HEADS * DIM) + head * DIM + dims[None, :]
        down = grad + start * (3 * HEADS * DIM) + head * DIM + dims[None, :]
        totals = sums + head.to(tl.int64) * num_tokens + start
        key = tl.load(base + j[:, None] * (3 * HEADS * DIM) + HEADS * DIM, mask=seen, other=0.0)
        value = tl.load(base + j[:, None] * (3 * HEADS * DIM) + 2 * HEADS * DIM, mask=seen, other=0.0)
        grad_key = tl.zeros([SIZE, DIM], tl.float32)
        grad_value = tl.zeros([SIZE, DIM], tl.float32)
        query_sum = tl.zeros([DIM], tl.float32)
        for first in tl.range(0, length, QUERIES, num_stages=STAGES):
            i = first + tl.arange(0, QUERIES)
            there = (i < length)[:, None]
            places = (start + i)[:, None] * (HEADS * DIM) + head * DIM + dims[None, :]
            query = tl.load(base + i[:, None] * (3 * HEADS * DIM), mask=there, other=0.0)
            above = tl.load(grad_out + places, mask=there, other=0.0)
            made = tl.load(out + places, mask=there, other=0.0)
            mean = tl.sum(above.to(tl.float32) * made.to(tl.float32), 1)
            total = tl.load(totals + i, mask=i < length, other=float("inf"))
            # keys down, queries across, so that two of the products take the weights as they are
            weights = tl.exp2(
                tl.where(seen, tl.dot(key, tl.trans(query)) * (SCALE * LOG2E), float("-inf")) - total[None, :]
            )
            grad_value += tl.dot(weights.to(value.dtype), above)
            slope = (weights * (tl.dot(value, tl.trans(above)) - mean[None, :])).to(query.dtype)
            grad_key += tl.dot(slope, query)
            found = tl.dot(tl.trans(slope), key) * SCALE
            tl.store(down + i[:, None] * (3 * HEADS * DIM), found.to(grad.dtype.element_ty), mask=there)
            query_sum += tl.sum(found, 0)
        grad_key *= SCALE
        tl.store(down + j[:, None] * (3 * HEADS * DIM) + HEADS * DIM, grad_key.to(grad.dtype.element_ty), mask=real)
        tl.store(
            down + j[:, None] * (3 * HEADS * DIM) + 2 * HEADS * DIM, grad_value.to(grad.dtype.element_ty), mask=real
        )
        summed = parts + row.to(tl.int64) * (3 * HEADS * DIM) + head * DIM + dims
        tl.store(summed, query_sum)
        tl.store(summed + HEADS * DIM, tl.sum(grad_key, 0))
        tl.store(summed + 2 * HEADS * DIM, tl.sum(grad_value, 0))


@triton.jit
def _block_backward(
    grad_out, out, qkv, sums, grad, parts, cu_seqlens, cu_keys, num_tokens, SCALE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    SHORTEST: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """All gradients of one row and head of more than SHORTEST tokens, block by block: as keys and values, then as queries."""
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = tl.load(cu_seqlens + row).to(tl.int64)
    length = (tl.load(cu_seqlens + row + 1) - start).to(tl.int32)
    if length > SHORTEST:
        num_keys = tl.load(cu_keys + row + 1) - tl.load(cu_keys + row)
        dims = tl.arange(0, DIM)
        base = start * (3 * HEADS * DIM) + head * DIM + dims[None, :]
        above_base = start * (HEADS * DIM) + head * DIM + dims[None, :]
        totals = sums + head.to(tl.int64) * num_tokens + start
        query_sum = tl.zeros([DIM], tl.float32)
        key_sum = tl.zeros([DIM], tl.float32)
        value_sum = tl.zeros([DIM], tl.float32)
        for begin in range(0, length, SIZE):
            own = begin + tl.arange(0, SIZE)
            real = (own < length)[:, None]
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
                total = tl.load(totals + i, mask=i < length, other=float("inf"))
                logits = tl.where(
                    (own < num_keys)[None, :], tl.dot(query, tl.trans(key)) * (SCALE * LOG2E), float("-inf")
                )
                weights = tl.exp2(logits - total[:, None])
                grad_value += tl.dot(tl.trans(weights.to(value.dtype)), above)
                mean = tl.sum(above.to(tl.float32) * made.to(tl.float32), 1)
                slope = (weights * (tl.dot(above, tl.trans(value)) - mean[:, None]) * SCALE).to(query.dtype)
                grad_key += tl.dot(tl.trans(slope), query)
            tl.store(grad + mine + HEADS * DIM, grad_key.to(grad.dtype.element_ty), mask=real)
            tl.store(grad + mine + 2 * HEADS * DIM, grad_value.to(grad.dtype.element_ty), mask=real)
            key_sum += tl.sum(grad_key, 0)
            value_sum += tl.sum(grad_value, 0)

            query = tl.load(qkv + mine, mask=real, other=0.0)
            above = tl.load(grad_out + above_base + own[:, None] * (HEADS * DIM), mask=real, other=0.0)
            made = tl.load(out + above_base + own[:, None] * (HEADS * DIM), mask=real, other=0.0)
            total = tl.load(totals + own, mask=own < length, other=float("inf"))
            mean = tl.sum(above.to(tl.float32) * made.to(tl.float32), 1)
            grad_query = tl.zeros([SIZE, DIM], tl.float32)
            for first in range(0, num_keys, SIZE):
                j = first + tl.arange(0, SIZE)
                there = (j < num_keys)[:, None]
                key = tl.load(qkv + base + j[:, None] * (3 * HEADS * DIM) + HEADS * DIM, mask=there, other=0.0)
                value = tl.load(qkv + base + j[:, None] * (3 * HEADS * DIM) + 2 * HEADS * DIM, mask=there, other=0.0)
                logits = tl.where(
                    (j < num_keys)[None, :], tl.dot(query, tl.trans(key)) * (SCALE * LOG2E), float("-inf")
                )
                weights = tl.exp2(logits - total[:, None])
                slope = (weights * (tl.dot(above, tl.trans(value)) - mean[:, None]) * SCALE).to(key.dtype)
                grad_query += tl.dot(slope, key)
            tl.store(grad + mine, grad_query.to(grad.dtype.element_ty), mask=real)
            query_sum += tl.sum(grad_query, 0)
        summed = parts + row.to(tl.int64) * (3 * HEADS * DIM) + head * DIM + dims
        tl.store(summed, query_sum)
        tl.store(summed + HEADS * DIM, key_sum)
        tl.store(summed + 2 * HEADS * DIM, value_sum)


# the launches: measured on an H200, see docs/performance.md
FORWARD = {"QUERIES": BLOCK, "KEYS": 32, "num_warps": 4, "num_stages": 3}
SMALL_TILE = {"SIZE": 64, "num_warps": 4, "num_stages": 1}
LARGE_TILE = {"SIZE": 128, "num_warps": 4, "num_stages": 1}
KEYS = {"SIZE": 256, "QUERIES": 64, "STAGES": 2, "num_warps": 8}
BLOCKS = {"SIZE": 64, "num_warps": 4, "num_stages": 2}
KEYS_MEMORY = (
    135_000  # shared memory that `KEYS` needs at heads of 64; data centres' cards have it, others have 101,376 bytes
)


def backward_launches(dim: int, shared_memory: int) -> list[tuple[Any, dict[str, int]]]:
    """The kernels of the backward pass with their settings; each takes the rows that are longer than those of the one before.

    Args:
        dim: Size of a head.
        shared_memory: Bytes that a program may have on this card.
    """
    launches: list[tuple[Any, dict[str, int]]] = [(_tile_backward, {"SHORTEST": -1, **SMALL_TILE})]
    if dim <= 64:  # larger tiles would not fit beside heads of 128
        launches.append((_tile_backward, {"SHORTEST": launches[-1][1]["SIZE"], **LARGE_TILE}))
        if shared_memory >= KEYS_MEMORY:
            launches.append((_keys_backward, {"SHORTEST": launches[-1][1]["SIZE"], **KEYS}))
    return [*launches, (_block_backward, {"SHORTEST": launches[-1][1]["SIZE"], **BLOCKS})]


def attend(
    qkv: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, blocks: Tensor, wrap: Callable[..., Any] = lambda kernel: kernel
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend within each row.

    Args:
        qkv: Queries, keys and values, bf16 or fp16 [tokens, 3, heads, dim], contiguous; every token belongs to a row.
        cu_seqlens: Cumulative row lengths, int32 [rows + 1].
        cu_keys: Cumulative counts of the tokens that each row attends to, its first ones, int32 [rows + 1].
        blocks: Row and first token of each block of `BLOCK` tokens, int32 [blocks, 2]; row -1 for none
            (`RaggedLayout.blocks`).
        wrap: Of the kernel; `wrap_triton` where it is traced.

    Returns:
        Mixed values [tokens, heads, dim]; base-2 logarithms of the softmax's sums, float32 [heads, tokens].
    """
    tokens, _, heads, dim = qkv.shape
    qkv = qkv.contiguous()
    out = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    sums = torch.empty(heads, tokens, dtype=torch.float32, device=qkv.device)
    with torch.cuda.device_of(qkv):  # Triton launches on the current device
        wrap(_attend)[(blocks.shape[0] * heads,)](
            qkv, out, sums, cu_seqlens, cu_keys, blocks, tokens, SCALE=dim**-0.5, HEADS=heads, DIM=dim, **FORWARD
        )  # fmt: skip
    return out, sums


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def attend_backward(
    grad_out: Tensor, qkv: Tensor, out: Tensor, sums: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, blocks: Tensor,  # noqa: ARG001
    wrap: Callable[..., Any] = lambda kernel: kernel,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of `attend` by `qkv`, and by a bias that it holds, float32 [3 * heads * dim]."""
    tokens, _, heads, dim = qkv.shape
    qkv, grad_out = qkv.contiguous(), grad_out.contiguous()
    grad = torch.empty_like(qkv)
    rows = cu_seqlens.shape[0] - 1
    parts = torch.empty(rows, 3 * heads * dim, dtype=torch.float32, device=qkv.device)
    tensors = (grad_out, out, qkv, sums, grad, parts, cu_seqlens, cu_keys)
    # the programs of rows that are not in a launch's range end at once
    with torch.cuda.device_of(qkv):
        for kernel, settings in backward_launches(dim, _shared_memory(qkv.device)):
            wrap(kernel)[(rows * heads,)](*tensors, tokens, SCALE=dim**-0.5, HEADS=heads, DIM=dim, **settings)
    return grad, column_sums(parts, wrap)


@triton_op("ranker::short_attention", mutates_args=())
def short_attention(qkv: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """`attend` with gradients, for compiled code, too."""
    return attend(qkv, cu_seqlens, cu_keys, blocks, wrap_triton)


@triton_op("ranker::short_attention_backward", mutates_args=())
def short_attention_backward(
    grad_out: Tensor, qkv: Tensor, out: Tensor, sums: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, blocks: Tensor
) -> Tensor:  # fmt: skip
    """The gradient of `short_attention` by its `qkv`."""
    return attend_backward(grad_out, qkv, out, sums, cu_seqlens, cu_keys, blocks, wrap_triton)[0]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, *places = inputs
    ctx.save_for_backward(qkv, *output, *places)


def _backward(ctx: Any, grad_out: Tensor, grad_sums: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG001 - sums are no result
    return short_attention_backward(grad_out, *ctx.saved_tensors), None, None, None


short_attention.register_autograd(_backward, setup_context=_keep)
