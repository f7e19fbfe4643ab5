"""Normalise the heads of queries and keys (RMSNorm), then rotate them by their positions (RoPE), in one Triton kernel.

RMSNorm: Zhang & Sennrich, 2019, arXiv:1910.07467; of heads: Qwen 3, arXiv:2505.09388. RoPE: Su et al., 2021,
arXiv:2104.09864. One kernel reads the linear layer's output and writes queries and keys. The backward pass computes the
norm again, so only that output has to be stored, and writes the gradient of the whole output: the gradients of values
pass through.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ranker.encoders.kernels.sums import column_sums

# values of the first halves of heads in a block; a block has ROWS heads
FORWARD = {"VALUES": 1024, "num_warps": 4}
BACKWARD = {"VALUES": 1024, "num_warps": 4}
STEPS = 16  # blocks over which one program sums the gradients of gains


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x, query_gain, key_gain, cos, sin, query, key, rows, x_stride, EPSILON: tl.constexpr, HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS heads. A token has HEADS heads of its query, then KEY_HEADS heads of its key."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // (HEADS + KEY_HEADS)).to(tl.int64), row % (HEADS + KEY_HEADS)
    dims = tl.arange(0, WIDTH)[None, :]
    is_query = (head < HEADS)[:, None]
    mask = (row < rows)[:, None] & (dims < HALF)
    place = (token * x_stride + head * (2 * HALF))[:, None] + dims
    one = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(x + place + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        spread = tl.rsqrt(tl.sum(one * one + other * other, 1) / (2 * HALF) + EPSILON)[:, None]
        one *= spread * _gain(query_gain, key_gain, is_query, dims, HALF)
        other *= spread * _gain(query_gain + HALF, key_gain + HALF, is_query, dims, HALF)
    angle = token[:, None] * (2 * HALF) + dims
    cosine, sine = tl.load(cos + angle, mask=mask, other=0.0), tl.load(sin + angle, mask=mask, other=0.0)
    first = one * cosine.to(tl.float32) - other * sine.to(tl.float32)
    cosine, sine = tl.load(cos + angle + HALF, mask=mask, other=0.0), tl.load(sin + angle + HALF, mask=mask, other=0.0)
    second = other * cosine.to(tl.float32) + one * sine.to(tl.float32)
    own = (token * HEADS + head)[:, None] * (2 * HALF) + dims
    tl.store(query + own, first.to(query.dtype.element_ty), mask=mask & is_query)
    tl.store(query + own + HALF, second.to(query.dtype.element_ty), mask=mask & is_query)
    own = (token * KEY_HEADS + head - HEADS)[:, None] * (2 * HALF) + dims
    tl.store(key + own, first.to(key.dtype.element_ty), mask=mask & ~is_query)
    tl.store(key + own + HALF, second.to(key.dtype.element_ty), mask=mask & ~is_query)


@triton.jit
def _gain(query_gain, key_gain, is_query, dims, HALF: tl.constexpr):
    """Return the gain of each head in float32, [ROWS, WIDTH]."""
    of_query = tl.load(query_gain + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    of_key = tl.load(key_gain + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    return tl.where(is_query, of_query, of_key)


@triton.jit
def _upstream(query, key, value, of_query, of_key, of_value, is_query, is_key, is_value):
    """Return the gradients of ROWS heads in float32, [ROWS, WIDTH]. Each head is in one of three tensors."""
    result = tl.load(query + of_query, mask=is_query, other=0.0).to(tl.float32)
    result += tl.load(key + of_key, mask=is_key, other=0.0).to(tl.float32)
    return result + tl.load(value + of_value, mask=is_value, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad_query, grad_key, grad_value, x, query_gain, key_gain, cos, sin, grad, parts, rows, x_stride,
    EPSILON: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, HALF: tl.constexpr,
    WIDTH: tl.constexpr, NORM: tl.constexpr, GAINS: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of STEPS * ROWS heads, and their share of the gradients of both gains if GAINS."""
    dims = tl.arange(0, WIDTH)[None, :]
    if GAINS:
        query_low, query_high = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
        key_low, key_high = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for step in range(STEPS):
        row = (tl.program_id(0) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        token = (row // (HEADS + KEY_HEADS + VALUE_HEADS)).to(tl.int64)
        head = row % (HEADS + KEY_HEADS + VALUE_HEADS)
        mask = (row < rows)[:, None] & (dims < HALF)
        is_query = mask & (head < HEADS)[:, None]
        is_key = mask & ((head >= HEADS) & (head < HEADS + KEY_HEADS))[:, None]
        is_value = mask & (head >= HEADS + KEY_HEADS)[:, None]
        of_query = (token * HEADS + head)[:, None] * (2 * HALF) + dims
        of_key = (token * KEY_HEADS + head - HEADS)[:, None] * (2 * HALF) + dims
        of_value = (token * VALUE_HEADS + head - HEADS - KEY_HEADS)[:, None] * (2 * HALF) + dims
        low = _upstream(grad_query, grad_key, grad_value, of_query, of_key, of_value, is_query, is_key, is_value)
        of_query, of_key, of_value = of_query + HALF, of_key + HALF, of_value + HALF
        high = _upstream(grad_query, grad_key, grad_value, of_query, of_key, of_value, is_query, is_key, is_value)
        turned = is_query | is_key
        angle = token[:, None] * (2 * HALF) + dims
        # values pass through: their cosine is 1, and their sine is 0
        cosine = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)
        sine = tl.load(sin + angle + HALF, mask=turned, other=0.0).to(tl.float32)
        first = low * cosine + high * sine
        cosine = tl.load(cos + angle + HALF, mask=turned, other=1.0).to(tl.float32)
        sine = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
        second = high * cosine - low * sine
        if NORM:
            place = (token * x_stride + head * (2 * HALF))[:, None] + dims
            one = tl.load(x + place, mask=turned, other=0.0).to(tl.float32)
            other = tl.load(x + place + HALF, mask=turned, other=0.0).to(tl.float32)
            spread = tl.rsqrt(tl.sum(one * one + other * other, 1) / (2 * HALF) + EPSILON)[:, None]
            one *= spread
            other *= spread
            if GAINS:
                query_low += tl.sum(tl.where(is_query, first * one, 0.0), 0)
                query_high += tl.sum(tl.where(is_query, second * other, 0.0), 0)
                key_low += tl.sum(tl.where(is_key, first * one, 0.0), 0)
                key_high += tl.sum(tl.where(is_key, second * other, 0.0), 0)
            below = first * _gain(query_gain, key_gain, is_query, dims, HALF)
            above = second * _gain(query_gain + HALF, key_gain + HALF, is_query, dims, HALF)
            mean = (tl.sum(below * one + above * other, 1) / (2 * HALF))[:, None]
            first = tl.where(is_value, first, (below - one * mean) * spread)
            second = tl.where(is_value, second, (above - other * mean) * spread)
        own = (token * (HEADS + KEY_HEADS + VALUE_HEADS) + head)[:, None] * (2 * HALF) + dims
        tl.store(grad + own, first.to(grad.dtype.element_ty), mask=mask)
        tl.store(grad + own + HALF, second.to(grad.dtype.element_ty), mask=mask)
    if GAINS:
        columns = tl.arange(0, WIDTH)
        part = parts + tl.program_id(0) * (4 * HALF) + columns
        tl.store(part, query_low, mask=columns < HALF)
        tl.store(part + HALF, query_high, mask=columns < HALF)
        tl.store(part + 2 * HALF, key_low, mask=columns < HALF)
        tl.store(part + 3 * HALF, key_high, mask=columns < HALF)


class Heads(NamedTuple):
    """Heads of a token, in this order in the linear layer's output.

    Args:
        query: Number of heads of its query.
        key: Number of heads of its key.
        value: Number of heads of its value.
    """

    query: int
    key: int
    value: int


def rotate_heads(
    x: Tensor, gains: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor, heads: Heads, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return queries [tokens, heads, dim] and keys [tokens, key heads, dim], normalised and rotated, in float32.

    With y = x / sqrt(mean(x ** 2) + epsilon) * gain, or y = x without gains, a head becomes
    y * cos + rotate_half(y) * sin, where rotate_half(y) is the second half of y, negated, then its first half.

    Args:
        x: Queries, keys and values, bf16 or fp16 [tokens, all heads * dim]; the values of a token are contiguous in
            memory.
        gains: Gain of the norm of queries, and that of keys, each [dim]; None: no norm.
        cos: [tokens, dim]
        sin: [tokens, dim]
        heads: Numbers of heads.
        epsilon: Epsilon of the norm.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, dim = x.shape[0], cos.shape[1]
    query = torch.empty(tokens, heads.query, dim, dtype=x.dtype, device=x.device)
    key = torch.empty(tokens, heads.key, dim, dtype=x.dtype, device=x.device)
    rows, block = tokens * (heads.query + heads.key), _block(dim, FORWARD)
    if tokens:
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _forward[(triton.cdiv(rows, block["ROWS"]),)](
                x, *_pair(x, gains), cos.contiguous(), sin.contiguous(), query, key, rows, x.stride(0),
                EPSILON=epsilon, HEADS=heads.query, KEY_HEADS=heads.key, NORM=gains is not None, **block,
            )  # fmt: skip
    return query, key


def rotate_heads_backward(
    grads: tuple[Tensor, Tensor, Tensor], x: Tensor | None, gains: tuple[Tensor, Tensor] | None, cos: Tensor,
    sin: Tensor, epsilon: float, sums: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the gradient of `x`, contiguous, and with `sums` those of both gains, float32 [2, dim].

    Args:
        grads: Gradients of queries, keys and values, each [tokens, heads, dim].
        x: See `rotate_heads`; without gains it is not read.
        gains: See `rotate_heads`.
        cos: See `rotate_heads`.
        sin: See `rotate_heads`.
        epsilon: See `rotate_heads`.
        sums: Whether to compute the gradients of the gains; the sums have a fixed order.
    """
    query, key, value = (grad.contiguous() for grad in grads)
    x = query if x is None else x if x.stride(1) == 1 else x.contiguous()
    tokens, dim = cos.shape
    heads = Heads(query.shape[1], key.shape[1], value.shape[1])
    grad = torch.empty(tokens, sum(heads) * dim, dtype=query.dtype, device=query.device)
    rows, steps, block = tokens * sum(heads), STEPS if sums else 1, _block(dim, BACKWARD)
    programs = triton.cdiv(rows, block["ROWS"] * steps)
    parts = torch.empty(programs if sums else 0, 2, dim, dtype=torch.float32, device=query.device)
    if tokens:
        with torch.cuda.device_of(query):  # Triton launches on the current device
            _backward[(programs,)](
                query, key, value, x, *_pair(x, gains), cos.contiguous(), sin.contiguous(), grad, parts, rows,
                x.stride(0), EPSILON=epsilon, HEADS=heads.query, KEY_HEADS=heads.key, VALUE_HEADS=heads.value,
                NORM=gains is not None, GAINS=sums, STEPS=steps, **block,
            )  # fmt: skip
    return grad, column_sums(parts) if sums else None


def _block(dim: int, settings: dict[str, int]) -> dict[str, int]:
    """Return the sizes of a block, and its warps."""
    width = triton.next_power_of_2(dim // 2)
    rows = max(settings["VALUES"] // width, 1)
    return {"HALF": dim // 2, "WIDTH": width, "ROWS": rows, "num_warps": settings["num_warps"]}


def _pair(x: Tensor, gains: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Return two pointers for the gains; without gains, they are not read."""
    return (x, x) if gains is None else gains
