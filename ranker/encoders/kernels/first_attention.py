"""Attention from the first token of each row alone, over states instead of keys and values, in Triton.

`ranker.encoders.layer.first_token_attention` explains why the other tokens need no keys and values. The weights
multiply the queries and the averages instead. For a row this costs as much as the keys and values of a single token.
The key bias has no effect.

Each Triton program works on one row: on a block of its tokens, or on a block of columns of its states.
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

# launch settings, measured on an H200, see docs/performance.md
TOKENS = {"TOKENS": BLOCK, "DIMS": 64, "num_warps": 4}  # for one program per block of tokens
MIX = {"TOKENS": 64, "DIMS": 128, "num_warps": 4}  # for one program per row and block of columns


@triton.jit(do_not_specialize=["rows"])
def _logits(
    x, queries, logits, cu_seqlens, cu_keys, blocks, rows, SCALE: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Compute base-2 logits [TOKENS, HEADS] of a block of tokens, in the first `rows` rows; -inf for other tokens."""
    row = tl.load(blocks + tl.program_id(0) * 2)
    if (row >= 0) & (row < rows):
        start = tl.load(cu_seqlens + row).to(tl.int64)
        length = (tl.load(cu_seqlens + row + 1) - start).to(tl.int32)
        num_keys = tl.load(cu_keys + row + 1) - tl.load(cu_keys + row)
        j = tl.load(blocks + tl.program_id(0) * 2 + 1) + tl.arange(0, TOKENS)
        heads = tl.arange(0, WIDTH)
        scores = tl.zeros([TOKENS, WIDTH], tl.float32)
        for first in range(0, DIM, DIMS):
            dims = first + tl.arange(0, DIMS)
            states = tl.load(
                x + (start + j)[:, None] * DIM + dims[None, :],
                mask=(j < num_keys)[:, None] & (dims < DIM)[None, :],
                other=0.0,
            )
            query_offsets = (row * HEADS + heads).to(tl.int64)[:, None] * DIM + dims[None, :]
            query = tl.load(queries + query_offsets, mask=(heads < HEADS)[:, None] & (dims < DIM)[None, :], other=0.0)
            scores += tl.dot(states, tl.trans(query))
        scores = tl.where((j < num_keys)[:, None], scores * (SCALE * LOG2E), float("-inf"))
        tl.store(
            logits + (start + j)[:, None] * HEADS + heads[None, :],
            scores,
            mask=(j < length)[:, None] & (heads < HEADS)[None, :],
        )


@triton.jit
def _mix(
    weights, x, out, sums, cu_seqlens, cu_keys, HEADS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
    SOFTMAX: tl.constexpr, TOKENS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Sum a row's states, each multiplied by its weights [tokens, HEADS], for a block of columns.

    With SOFTMAX, `weights` are base-2 logits, and their softmax is used.
    """
    row = tl.program_id(0)
    start = tl.load(cu_seqlens + row).to(tl.int64)
    num_keys = tl.load(cu_keys + row + 1) - tl.load(cu_keys + row)
    heads = tl.arange(0, WIDTH)
    dims = tl.program_id(1) * DIMS + tl.arange(0, DIMS)
    running_max = tl.full([WIDTH], float("-inf"), tl.float32)
    running_sum = tl.zeros([WIDTH], tl.float32)
    if SOFTMAX:
        for first in range(0, num_keys, TOKENS):
            j = first + tl.arange(0, TOKENS)
            valid = (heads < HEADS)[:, None] & (j < num_keys)[None, :]
            scores = tl.load(weights + (start + j)[None, :] * HEADS + heads[:, None], mask=valid, other=float("-inf"))
            new_max = tl.maximum(running_max, tl.max(scores, 1))
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            running_sum = running_sum * tl.exp2(running_max - safe_max) + tl.sum(tl.exp2(scores - safe_max[:, None]), 1)
            running_max = new_max
        running_max = tl.where(
            running_sum > 0, running_max + tl.log2(running_sum), float("inf")
        )  # the weights of a row without keys are 0
        if tl.program_id(1) == 0:
            tl.store(sums + row * HEADS + heads, running_max, mask=heads < HEADS)
    mixed = tl.zeros([WIDTH, DIMS], tl.float32)
    for first in range(0, num_keys, TOKENS):
        j = first + tl.arange(0, TOKENS)
        valid = (heads < HEADS)[:, None] & (j < num_keys)[None, :]
        weight_pointers = weights + (start + j)[None, :] * HEADS + heads[:, None]
        if SOFTMAX:
            weight = tl.exp2(tl.load(weight_pointers, mask=valid, other=float("-inf")) - running_max[:, None])
        else:
            weight = tl.load(weight_pointers, mask=valid, other=0.0)
        states = tl.load(
            x + (start + j)[:, None] * DIM + dims[None, :],
            mask=(j < num_keys)[:, None] & (dims < DIM)[None, :],
            other=0.0,
        )
        mixed += tl.dot(weight.to(states.dtype), states)
    out_pointers = out + (row * HEADS + heads).to(tl.int64)[:, None] * DIM + dims[None, :]
    tl.store(out_pointers, mixed.to(out.dtype.element_ty), mask=(heads < HEADS)[:, None] & (dims < DIM)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _tokens_backward(
    grad_out, means, logits, sums, x, queries, slopes, grad, cu_seqlens, cu_keys, blocks, rows, SCALE: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of tokens, with respect to states and to logits [TOKENS, HEADS].

    Rows after the first `rows` get zeros.
    """
    row = tl.load(blocks + tl.program_id(0) * 2)
    if row >= 0:
        start = tl.load(cu_seqlens + row).to(tl.int64)
        length = (tl.load(cu_seqlens + row + 1) - start).to(tl.int32)
        num_keys = tl.load(cu_keys + row + 1) - tl.load(cu_keys + row)
        num_keys = tl.where(row < rows, num_keys, 0)
        j = tl.load(blocks + tl.program_id(0) * 2 + 1) + tl.arange(0, TOKENS)
        heads = tl.arange(0, WIDTH)
        real_heads = (heads < HEADS) & (row < rows)
        valid = (j < num_keys)[:, None] & real_heads[None, :]
        logit_offsets = (start + j)[:, None] * HEADS + heads[None, :]
        log_sum = tl.load(sums + row * HEADS + heads, mask=real_heads, other=float("inf"))
        weights = tl.exp2(tl.load(logits + logit_offsets, mask=valid, other=float("-inf")) - log_sum[None, :])
        grad_weights = tl.zeros([TOKENS, WIDTH], tl.float32)
        for first in range(0, DIM, DIMS):
            dims = first + tl.arange(0, DIMS)
            states = tl.load(
                x + (start + j)[:, None] * DIM + dims[None, :],
                mask=(j < num_keys)[:, None] & (dims < DIM)[None, :],
                other=0.0,
            )
            head_offsets = (row * HEADS + heads).to(tl.int64)[:, None] * DIM + dims[None, :]
            grad_weights += tl.dot(
                states,
                tl.trans(tl.load(grad_out + head_offsets, mask=real_heads[:, None] & (dims < DIM)[None, :], other=0.0)),
            )
        mean = tl.load(means + row * HEADS + heads, mask=real_heads, other=0.0)
        slope = weights * (grad_weights - mean[None, :]) * SCALE
        tl.store(slopes + logit_offsets, slope, mask=(j < length)[:, None] & (heads < HEADS)[None, :])
        for first in range(0, DIM, DIMS):
            dims = first + tl.arange(0, DIMS)
            head_offsets = (row * HEADS + heads).to(tl.int64)[:, None] * DIM + dims[None, :]
            mask = real_heads[:, None] & (dims < DIM)[None, :]
            grad_mean = tl.load(grad_out + head_offsets, mask=mask, other=0.0)
            query = tl.load(queries + head_offsets, mask=mask, other=0.0)
            grad_states = tl.dot(weights.to(grad_mean.dtype), grad_mean) + tl.dot(slope.to(query.dtype), query)
            grad_pointers = grad + (start + j)[:, None] * DIM + dims[None, :]
            tl.store(
                grad_pointers, grad_states.to(grad.dtype.element_ty), mask=(j < length)[:, None] & (dims < DIM)[None, :]
            )


def _shape(queries: Tensor) -> dict[str, int]:
    _, heads, dim = queries.shape
    return {"HEADS": heads, "WIDTH": max(16, triton.next_power_of_2(heads)), "DIM": dim}


@triton_op("ranker::first_attention", mutates_args=())
def first_attention(
    x: Tensor, queries: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, blocks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Average the states of each row with the attention weights of one query per row and head.

    Args:
        x: bf16 or fp16 [tokens, dim]; every token belongs to a row.
        queries: Each row's queries, multiplied by the key weights, [rows, heads, dim].
        cu_seqlens: Cumulative row lengths, int32 [at least rows + 1]; only the first `rows` rows attend.
        cu_keys: Cumulative numbers of attended tokens, which are the first of each row; same shape as `cu_seqlens`.
        blocks: See `ranker.encoders.kernels.short_attention.attend`.

    Returns:
        Averages, float32 [rows, heads, dim], 0 for a row without attended tokens; base-2 logits, float32 [tokens,
        heads]; base-2 logarithms of the softmax's sums, float32 [rows, heads].
    """
    x, queries = x.contiguous(), queries.contiguous()
    rows, heads, dim = queries.shape
    # in float32, because the backward pass subtracts similar numbers that are computed from it
    out = torch.empty(rows, heads, dim, dtype=torch.float32, device=x.device)
    logits = torch.empty(x.shape[0], heads, dtype=torch.float32, device=x.device)
    sums = torch.empty(rows, heads, dtype=torch.float32, device=x.device)
    shape = _shape(queries)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        wrap_triton(_logits)[(blocks.shape[0],)](
            x, queries, logits, cu_seqlens, cu_keys, blocks, rows, SCALE=(dim // heads) ** -0.5, **shape, **TOKENS
        )
        wrap_triton(_mix)[(rows, triton.cdiv(dim, MIX["DIMS"]))](
            logits, x, out, sums, cu_seqlens, cu_keys, SOFTMAX=True, **shape, **MIX
        )
    return out, logits, sums


@triton_op("ranker::first_attention_backward", mutates_args=())
def first_attention_backward(
    grad_out: Tensor,
    out: Tensor,
    logits: Tensor,
    sums: Tensor,
    x: Tensor,
    queries: Tensor,
    cu_seqlens: Tensor,
    cu_keys: Tensor,
    blocks: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `first_attention`: d/d(x) [tokens, dim] and d/d(queries) [rows, heads, dim]."""
    means = (grad_out * out).sum(-1)
    grad_out, x, queries = grad_out.to(x.dtype).contiguous(), x.contiguous(), queries.contiguous()
    rows, heads, dim = queries.shape
    grad, grad_reach, slopes = torch.empty_like(x), torch.empty_like(queries), torch.empty_like(logits)
    shape = _shape(queries)
    with torch.cuda.device_of(x):
        wrap_triton(_tokens_backward)[(blocks.shape[0],)](
            grad_out,
            means,
            logits,
            sums,
            x,
            queries,
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


def _gradients(ctx: Any, grad_out: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # noqa: ARG001 - only means are used
    return *first_attention_backward(grad_out, *ctx.saved_tensors), None, None, None


first_attention.register_autograd(_gradients, setup_context=_keep)
