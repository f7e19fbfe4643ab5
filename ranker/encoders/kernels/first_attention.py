"""Attention of each row's first token alone, over the states that its keys and values would be made of, in Triton.

A logit q . (W_k x) is (W_k^T q) . x, and a mean of values W_v x is W_v times a mean of x, so one token of a row attends
without keys or values of the others: its queries and the means go through the weights, which costs as much for a row as
keys and values cost for a token. The keys' bias adds the same to all logits of a row and changes nothing.

Every program of a kernel works on one row: on a block of its tokens, or of the numbers of its states.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from ranker.encoders.kernels.blocks import BLOCK
from ranker.encoders.kernels.short_attention import LOG2E

# the launches: measured on an H200, see docs/performance.md
TOKENS = {"TOKENS": BLOCK, "DIMS": 64, "num_warps": 4}  # a program for a block of tokens
MIX = {"TOKENS": 64, "DIMS": 128, "num_warps": 4}  # a program for a block of a state's numbers


@triton.jit(do_not_specialize=["rows"])
def _logits(
    x, reach, logits, cu_seqlens, cu_keys, blocks, rows, SCALE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
    TOKENS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """The heads' base-2 logits of a block of tokens of the first `rows` rows, [TOKENS, HEADS]; -inf past the keys."""
    row = tl.load(blocks + tl.program_id(0) * 2)
    if (row >= 0) & (row < rows):
        start = tl.load(cu_seqlens + row).to(tl.int64)
        length = (tl.load(cu_seqlens + row + 1) - start).to(tl.int32)
        num_keys = tl.load(cu_keys + row + 1) - tl.load(cu_keys + row)
        j = tl.load(blocks + tl.program_id(0) * 2 + 1) + tl.arange(0, TOKENS)
        heads = tl.arange(0, WIDTH)
        found = tl.zeros([TOKENS, WIDTH], tl.float32)
        for first in range(0, DIM, DIMS):
            dims = first + tl.arange(0, DIMS)
            states = tl.load(
                x + (start + j)[:, None] * DIM + dims[None, :],
                mask=(j < num_keys)[:, None] & (dims < DIM)[None, :],
                other=0.0,
            )
            own = (row * HEADS + heads).to(tl.int64)[:, None] * DIM + dims[None, :]
            reached = tl.load(reach + own, mask=(heads < HEADS)[:, None] & (dims < DIM)[None, :], other=0.0)
            found += tl.dot(states, tl.trans(reached))
        found = tl.where((j < num_keys)[:, None], found * (SCALE * LOG2E), float("-inf"))
        tl.store(
            logits + (start + j)[:, None] * HEADS + heads[None, :],
            found,
            mask=(j < length)[:, None] & (heads < HEADS)[None, :],
        )


@triton.jit
def _mix(
    weights, x, out, sums, cu_seqlens, cu_keys, HEADS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, SOFTMAX: tl.constexpr,
    TOKENS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Sums of a row's states by weights [tokens, HEADS], for a block of a state's numbers; SOFTMAX: the weights are logits."""
    row = tl.program_id(0)
    start = tl.load(cu_seqlens + row).to(tl.int64)
    num_keys = tl.load(cu_keys + row + 1) - tl.load(cu_keys + row)
    heads = tl.arange(0, WIDTH)
    dims = tl.program_id(1) * DIMS + tl.arange(0, DIMS)
    top = tl.full([WIDTH], float("-inf"), tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    if SOFTMAX:
        for first in range(0, num_keys, TOKENS):
            j = first + tl.arange(0, TOKENS)
            there = (heads < HEADS)[:, None] & (j < num_keys)[None, :]
            found = tl.load(weights + (start + j)[None, :] * HEADS + heads[:, None], mask=there, other=float("-inf"))
            higher = tl.maximum(top, tl.max(found, 1))
            known = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp2(top - known) + tl.sum(tl.exp2(found - known[:, None]), 1)
            top = higher
        top = tl.where(total > 0, top + tl.log2(total), float("inf"))  # a row without keys has weights 0
        if tl.program_id(1) == 0:
            tl.store(sums + row * HEADS + heads, top, mask=heads < HEADS)
    mixed = tl.zeros([WIDTH, DIMS], tl.float32)
    for first in range(0, num_keys, TOKENS):
        j = first + tl.arange(0, TOKENS)
        there = (heads < HEADS)[:, None] & (j < num_keys)[None, :]
        places = weights + (start + j)[None, :] * HEADS + heads[:, None]
        if SOFTMAX:
            own = tl.exp2(tl.load(places, mask=there, other=float("-inf")) - top[:, None])
        else:
            own = tl.load(places, mask=there, other=0.0)
        states = tl.load(
            x + (start + j)[:, None] * DIM + dims[None, :],
            mask=(j < num_keys)[:, None] & (dims < DIM)[None, :],
            other=0.0,
        )
        mixed += tl.dot(own.to(states.dtype), states)
    place = out + (row * HEADS + heads).to(tl.int64)[:, None] * DIM + dims[None, :]
    tl.store(place, mixed.to(out.dtype.element_ty), mask=(heads < HEADS)[:, None] & (dims < DIM)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _tokens_backward(
    above, means, logits, sums, x, reach, slopes, grad, cu_seqlens, cu_keys, blocks, rows, SCALE: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of tokens' states, and of their logits [TOKENS, HEADS]; rows past the first `rows` get zeros."""
    row = tl.load(blocks + tl.program_id(0) * 2)
    if row >= 0:
        start = tl.load(cu_seqlens + row).to(tl.int64)
        length = (tl.load(cu_seqlens + row + 1) - start).to(tl.int32)
        num_keys = tl.load(cu_keys + row + 1) - tl.load(cu_keys + row)
        num_keys = tl.where(row < rows, num_keys, 0)
        j = tl.load(blocks + tl.program_id(0) * 2 + 1) + tl.arange(0, TOKENS)
        heads = tl.arange(0, WIDTH)
        real = (heads < HEADS) & (row < rows)
        there = (j < num_keys)[:, None] & real[None, :]
        places = (start + j)[:, None] * HEADS + heads[None, :]
        total = tl.load(sums + row * HEADS + heads, mask=real, other=float("inf"))
        weights = tl.exp2(tl.load(logits + places, mask=there, other=float("-inf")) - total[None, :])
        toward = tl.zeros([TOKENS, WIDTH], tl.float32)
        for first in range(0, DIM, DIMS):
            dims = first + tl.arange(0, DIMS)
            states = tl.load(
                x + (start + j)[:, None] * DIM + dims[None, :],
                mask=(j < num_keys)[:, None] & (dims < DIM)[None, :],
                other=0.0,
            )
            own = (row * HEADS + heads).to(tl.int64)[:, None] * DIM + dims[None, :]
            toward += tl.dot(
                states, tl.trans(tl.load(above + own, mask=real[:, None] & (dims < DIM)[None, :], other=0.0))
            )
        mean = tl.load(means + row * HEADS + heads, mask=real, other=0.0)
        slope = weights * (toward - mean[None, :]) * SCALE
        tl.store(slopes + places, slope, mask=(j < length)[:, None] & (heads < HEADS)[None, :])
        for first in range(0, DIM, DIMS):
            dims = first + tl.arange(0, DIMS)
            own = (row * HEADS + heads).to(tl.int64)[:, None] * DIM + dims[None, :]
            mask = real[:, None] & (dims < DIM)[None, :]
            downward = tl.load(above + own, mask=mask, other=0.0)
            reached = tl.load(reach + own, mask=mask, other=0.0)
            found = tl.dot(weights.to(downward.dtype), downward) + tl.dot(slope.to(reached.dtype), reached)
            place = grad + (start + j)[:, None] * DIM + dims[None, :]
            tl.store(place, found.to(grad.dtype.element_ty), mask=(j < length)[:, None] & (dims < DIM)[None, :])


def _shape(reach: Tensor) -> dict[str, int]:
    _, heads, dim = reach.shape
    return {"HEADS": heads, "WIDTH": max(16, triton.next_power_of_2(heads)), "DIM": dim}


@triton_op("ranker::first_attention", mutates_args=())
def first_attention(
    x: Tensor, reach: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, blocks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean states of rows by the weights that one query a row and head gives them.

    Args:
        x: bf16 or fp16 [tokens, dim]; every token belongs to a row.
        reach: Each row's queries, taken through the keys' weights, [rows, heads, dim].
        cu_seqlens: Cumulative row lengths, int32 [at least rows + 1]; only the first `rows` rows attend.
        cu_keys: Cumulative counts of the tokens that each row attends to, its first ones, as `cu_seqlens`.
        blocks: As `ranker.encoders.kernels.short_attention` takes them.

    Returns:
        Means, float32 [rows, heads, dim], 0 for a row that attends to nothing; base-2 logits, float32 [tokens, heads];
        base-2 logarithms of the softmax's sums, float32 [rows, heads].
    """
    x, reach = x.contiguous(), reach.contiguous()
    rows, heads, dim = reach.shape
    # in full, since the backward pass takes differences of what they make
    out = torch.empty(rows, heads, dim, dtype=torch.float32, device=x.device)
    logits = torch.empty(x.shape[0], heads, dtype=torch.float32, device=x.device)
    sums = torch.empty(rows, heads, dtype=torch.float32, device=x.device)
    shape = _shape(reach)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        wrap_triton(_logits)[(blocks.shape[0],)](
            x, reach, logits, cu_seqlens, cu_keys, blocks, rows, SCALE=(dim // heads) ** -0.5, **shape, **TOKENS
        )
        wrap_triton(_mix)[(rows, triton.cdiv(dim, MIX["DIMS"]))](
            logits, x, out, sums, cu_seqlens, cu_keys, SOFTMAX=True, **shape, **MIX
        )
    return out, logits, sums


@triton_op("ranker::first_attention_backward", mutates_args=())
def first_attention_backward(
    above: Tensor,
    out: Tensor,
    logits: Tensor,
    sums: Tensor,
    x: Tensor,
    reach: Tensor,
    cu_seqlens: Tensor,
    cu_keys: Tensor,
    blocks: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of `first_attention` by `x` and `reach`."""
    means = (above * out).sum(-1)
    above, x, reach = above.to(x.dtype).contiguous(), x.contiguous(), reach.contiguous()
    rows, heads, dim = reach.shape
    grad, grad_reach, slopes = torch.empty_like(x), torch.empty_like(reach), torch.empty_like(logits)
    shape = _shape(reach)
    with torch.cuda.device_of(x):
        wrap_triton(_tokens_backward)[(blocks.shape[0],)](
            above,
            means,
            logits,
            sums,
            x,
            reach,
            slopes,
            grad,
            cu_seqlens,
            cu_keys,
            blocks,
            rows,
            SCALE=(dim // heads) ** -0.5,
            **shape,
            **TOKENS,
        )
        wrap_triton(_mix)[(rows, triton.cdiv(dim, MIX["DIMS"]))](
            slopes, x, grad_reach, sums, cu_seqlens, cu_keys, SOFTMAX=False, **shape, **MIX
        )
    return grad, grad_reach


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs)


def _gradients(ctx: Any, above: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # noqa: ARG001 - the others are no results
    return *first_attention_backward(above, *ctx.saved_tensors), None, None, None


first_attention.register_autograd(_gradients, setup_context=_keep)
