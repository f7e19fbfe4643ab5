"""Bias, dropout, residual sum and layer norm in one Triton kernel, with its backward pass.

A post-norm layer runs this operation twice. Only the inputs are stored: the backward pass recomputes sums, norms and
masks from two tensors of the layer's size. It also sums the gradients of bias, gain and shift over the tokens that it
reads, so these need no second pass over the data.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ranker.encoders.kernels.hashed import PROGRAMS, dropout_constants, kept
from ranker.encoders.kernels.sums import column_sums

# launch settings for states of up to 1,024 values, measured on an H200, see docs/performance.md
FORWARD = {"ROWS": 1, "num_warps": 1}
BACKWARD = {"ROWS": 1, "num_warps": 1}


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    x, bias, residual, hashes, gain, shift, out, tokens, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
    EPSILON: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr,
    COLUMN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Compute the results of ROWS tokens."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    in_dim, in_batch = columns < DIM, rows < tokens
    mask = in_batch[:, None] & in_dim[None, :]
    offsets = rows[:, None].to(tl.int64) * DIM + columns[None, :]
    summed = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    summed += tl.load(bias + columns, mask=in_dim, other=0.0).to(tl.float32)[None, :]
    if DROP:
        row_hashes = tl.load(hashes + rows, mask=in_batch, other=0)
        summed = tl.where(kept(row_hashes, columns, THRESHOLD, COLUMN, FIRST, SECOND), summed * SCALE, 0.0)
    summed += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(in_dim[None, :], summed - (tl.sum(summed, 1) / DIM)[:, None], 0.0)
    spread = tl.rsqrt(tl.sum(centred * centred, 1) / DIM + EPSILON)
    gains = tl.load(gain + columns, mask=in_dim, other=0.0).to(tl.float32)
    shifts = tl.load(shift + columns, mask=in_dim, other=0.0).to(tl.float32)
    normed = centred * spread[:, None] * gains[None, :] + shifts[None, :]
    tl.store(out + offsets, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _backward(
    grad_out, x, bias, residual, hashes, gain, grad_x, grad_residual, sums, tokens, blocks, THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr, EPSILON: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    DROP: tl.constexpr, COLUMN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `blocks` times ROWS tokens, and this program's part of the sums over tokens.

    The sums, [3, DIM], are the gradients of bias, gain and shift.
    """
    columns = tl.arange(0, WIDTH)
    in_dim = columns < DIM
    biases = tl.load(bias + columns, mask=in_dim, other=0.0).to(tl.float32)[None, :]
    gains = tl.load(gain + columns, mask=in_dim, other=0.0).to(tl.float32)[None, :]
    bias_sum = tl.zeros([WIDTH], tl.float32)
    gain_sum = tl.zeros([WIDTH], tl.float32)
    shift_sum = tl.zeros([WIDTH], tl.float32)
    for block in range(blocks):
        rows = (tl.program_id(0) * blocks + block) * ROWS + tl.arange(0, ROWS)
        in_batch = rows < tokens
        mask = in_batch[:, None] & in_dim[None, :]
        offsets = rows[:, None].to(tl.int64) * DIM + columns[None, :]
        summed = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) + biases
        if DROP:
            keep = kept(tl.load(hashes + rows, mask=in_batch, other=0), columns, THRESHOLD, COLUMN, FIRST, SECOND)
            summed = tl.where(keep, summed * SCALE, 0.0)
        summed += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_out + offsets, mask=mask, other=0.0).to(tl.float32)
        centred = tl.where(in_dim[None, :], summed - (tl.sum(summed, 1) / DIM)[:, None], 0.0)
        spread = tl.rsqrt(tl.sum(centred * centred, 1) / DIM + EPSILON)
        normed = centred * spread[:, None]
        shift_sum += tl.sum(grad, 0)
        gain_sum += tl.sum(grad * normed, 0)
        grad *= gains
        along = tl.sum(grad * normed, 1) / DIM
        grad = (grad - (tl.sum(grad, 1) / DIM)[:, None] - normed * along[:, None]) * spread[:, None]
        tl.store(grad_residual + offsets, grad.to(grad_residual.dtype.element_ty), mask=mask)
        if DROP:
            grad = tl.where(keep, grad * SCALE, 0.0)
            tl.store(grad_x + offsets, grad.to(grad_x.dtype.element_ty), mask=mask)
        bias_sum += tl.sum(tl.where(mask, grad, 0.0), 0)
    sums += tl.program_id(0) * (3 * DIM) + columns
    tl.store(sums, bias_sum, mask=in_dim)
    tl.store(sums + DIM, gain_sum, mask=in_dim)
    tl.store(sums + 2 * DIM, shift_sum, mask=in_dim)


def _settings(x: Tensor, rate: float, hashes: Tensor | None, epsilon: float, launch: dict[str, int]) -> dict[str, Any]:
    width = triton.next_power_of_2(x.shape[1])
    return {
        "EPSILON": epsilon,
        "DIM": x.shape[1],
        "WIDTH": width,
        **dropout_constants(hashes, rate),
        "ROWS": launch["ROWS"],
        "num_warps": launch["num_warps"] * max(width // 1024, 1),
    }


def residual_norm(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    hashes: Tensor | None,
    rate: float,
    gain: Tensor,
    shift: Tensor,
    epsilon: float,
) -> Tensor:
    """Return `layer_norm(dropout(x + bias) + residual)`, [tokens, dim], computed in float32.

    Args:
        x: bf16 or fp16 [tokens, dim].
        bias: [dim].
        residual: As `x`.
        hashes: Dropout hashes, int32 [tokens] (`dropout_hashes`); None: no dropout.
        rate: Probability of dropout.
        gain: Gain of the norm, [dim].
        shift: Shift of the norm, [dim].
        epsilon: Epsilon of the norm.
    """
    x, residual = x.contiguous(), residual.contiguous()
    out, tokens = torch.empty_like(x), x.shape[0]
    row_hashes = x if hashes is None else hashes.contiguous()
    if tokens:
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _forward[(triton.cdiv(tokens, FORWARD["ROWS"]),)](
                x, bias, residual, row_hashes, gain, shift, out, tokens, **_settings(x, rate, hashes, epsilon, FORWARD)
            )
    return out


def residual_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    hashes: Tensor | None,
    rate: float,
    gain: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `residual_norm`; the arguments are its own, and `grad_out` [tokens, dim].

    Returns:
        d/d(bias, gain, shift), float32 [3, dim]; d/d(residual) and d/d(x), [tokens, dim]. Without dropout, the last two
        are the same tensor.
    """
    grad_out, x, residual = grad_out.contiguous(), x.contiguous(), residual.contiguous()
    tokens, dim = x.shape
    grad_residual = torch.empty_like(residual)
    grad_x = grad_residual if hashes is None else torch.empty_like(x)
    sums = torch.empty(PROGRAMS, 3, dim, dtype=torch.float32, device=x.device)
    row_hashes = x if hashes is None else hashes.contiguous()  # without dropout, the hashes are not read
    with torch.cuda.device_of(x):  # a program without tokens gives sums of 0
        _backward[(PROGRAMS,)](
            grad_out,
            x,
            bias,
            residual,
            row_hashes,
            gain,
            grad_x,
            grad_residual,
            sums,
            tokens,
            triton.cdiv(tokens, PROGRAMS * BACKWARD["ROWS"]),
            **_settings(x, rate, hashes, epsilon, BACKWARD),
        )
    return column_sums(sums), grad_residual, grad_x
