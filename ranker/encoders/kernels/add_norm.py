"""Dropout, residual sum and layer norm in one Triton kernel, forward and backward, for pre-norm layers.

Unlike in `residual_norm`, the sum is also a result, because pre-norm layers continue with it. The backward pass reads
the sum, so nothing else is stored, and it adds the gradients that arrive through the sum and through the norm.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ranker.encoders.kernels.hashed import dropout_constants, kept
from ranker.encoders.kernels.sums import column_sums

# launch settings for states of up to 1,024 values, measured on an H200, see docs/performance.md
FORWARD = {"num_warps": 1}
BACKWARD = {"num_warps": 1}
PROGRAMS = 3168  # number of Triton programs of a backward pass over tokens; also measured


@triton.jit
def _forward(
    x, residual, hashes, gain, summed, out, EPSILON: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    DROP: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, COLUMN: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):  # fmt: skip
    """Compute the results of one token."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    in_dim = columns < DIM
    value = tl.load(x + row * DIM + columns, mask=in_dim, other=0.0).to(tl.float32)
    if DROP:
        keep = kept(tl.load(hashes + row + tl.arange(0, 1)), columns, THRESHOLD, COLUMN, FIRST, SECOND)
        value = tl.where(tl.reshape(keep, [WIDTH]), value * SCALE, 0.0)
    value += tl.load(residual + row * DIM + columns, mask=in_dim, other=0.0).to(tl.float32)
    rounded = value.to(summed.dtype.element_ty)
    tl.store(summed + row * DIM + columns, rounded, mask=in_dim)
    value = rounded.to(tl.float32)  # the backward pass reads the rounded sum
    centred = tl.where(in_dim, value - tl.sum(value, 0) / DIM, 0.0)
    spread = tl.rsqrt(tl.sum(centred * centred, 0) / DIM + EPSILON)
    normed = centred * spread * tl.load(gain + columns, mask=in_dim, other=0.0).to(tl.float32)
    tl.store(out + row * DIM + columns, normed.to(out.dtype.element_ty), mask=in_dim)


@triton.jit(do_not_specialize=["tokens", "count"])
def _backward(
    grad_out, grad_summed, summed, hashes, gain, grad_x, grad_residual, sums, tokens, count, EPSILON: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, DROP: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
    COLUMN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `count` tokens, one after another, and this program's part of the gain's gradient."""
    columns = tl.arange(0, WIDTH)
    in_dim = columns < DIM
    gains = tl.load(gain + columns, mask=in_dim, other=0.0).to(tl.float32)
    gain_sum = tl.zeros([WIDTH], tl.float32)
    for step in range(count):
        row = tl.program_id(0).to(tl.int64) * count + step
        if row < tokens:
            value = tl.load(summed + row * DIM + columns, mask=in_dim, other=0.0).to(tl.float32)
            grad = tl.load(grad_out + row * DIM + columns, mask=in_dim, other=0.0).to(tl.float32)
            centred = tl.where(in_dim, value - tl.sum(value, 0) / DIM, 0.0)
            spread = tl.rsqrt(tl.sum(centred * centred, 0) / DIM + EPSILON)
            normed = centred * spread
            gain_sum += grad * normed
            grad *= gains
            grad = (grad - tl.sum(grad, 0) / DIM - normed * (tl.sum(grad * normed, 0) / DIM)) * spread
            grad += tl.load(grad_summed + row * DIM + columns, mask=in_dim, other=0.0).to(tl.float32)
            tl.store(grad_residual + row * DIM + columns, grad.to(grad_residual.dtype.element_ty), mask=in_dim)
            if DROP:
                row_hash = tl.load(hashes + row + tl.arange(0, 1))
                keep = tl.reshape(kept(row_hash, columns, THRESHOLD, COLUMN, FIRST, SECOND), [WIDTH])
                tl.store(
                    grad_x + row * DIM + columns,
                    tl.where(keep, grad * SCALE, 0.0).to(grad_x.dtype.element_ty),
                    mask=in_dim,
                )
    tl.store(sums + tl.program_id(0) * DIM + columns, gain_sum, mask=in_dim)


def _settings(gain: Tensor, hashes: Tensor | None, rate: float, epsilon: float, warps: int) -> dict[str, Any]:
    width = triton.next_power_of_2(len(gain))
    return {
        "EPSILON": epsilon,
        "DIM": len(gain),
        "WIDTH": width,
        **dropout_constants(hashes, rate),
        "num_warps": warps * max(width // 1024, 1),
    }


def add_norm(
    x: Tensor, residual: Tensor, hashes: Tensor | None, rate: float, gain: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return `summed = dropout(x) + residual` and `layer_norm(summed)`, each [tokens, dim]; computed in float32.

    Args:
        x: bf16 or fp16 [tokens, dim].
        residual: As `x`.
        hashes: Dropout hashes, int32 [tokens] (`dropout_hashes`); None: no dropout.
        rate: Probability of dropout.
        gain: Gain of the norm, [dim]; the norm has no shift.
        epsilon: Epsilon of the norm.
    """
    x, residual = x.contiguous(), residual.contiguous()
    summed, out = torch.empty_like(x), torch.empty_like(x)
    if len(x):
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _forward[(len(x),)](
                x, residual, x if hashes is None else hashes.contiguous(), gain, summed, out,
                **_settings(gain, hashes, rate, epsilon, FORWARD["num_warps"]),
            )  # fmt: skip
    return summed, out


def add_norm_backward(
    grad_out: Tensor, grad_summed: Tensor, summed: Tensor, hashes: Tensor | None, rate: float, gain: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of `add_norm`; the arguments are its own, and the gradients of its results [tokens, dim].

    Returns:
        d/d(x) and d/d(residual), [tokens, dim], which are the same tensor without dropout; d/d(gain), float32 [dim].
    """
    grad_out, grad_summed, summed = grad_out.contiguous(), grad_summed.contiguous(), summed.contiguous()
    tokens = len(summed)
    grad_residual = torch.empty_like(summed)
    grad_x = grad_residual if hashes is None else torch.empty_like(summed)
    sums = torch.empty(PROGRAMS, len(gain), dtype=torch.float32, device=summed.device)
    with torch.cuda.device_of(summed):  # a program without tokens gives sums of 0
        _backward[(PROGRAMS,)](
            grad_out, grad_summed, summed, summed if hashes is None else hashes.contiguous(), gain, grad_x,
            grad_residual, sums, tokens, triton.cdiv(tokens, PROGRAMS),
            **_settings(gain, hashes, rate, epsilon, BACKWARD["num_warps"]),
        )  # fmt: skip
    return grad_x, grad_residual, column_sums(sums)
