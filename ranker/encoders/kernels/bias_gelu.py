"""Add a bias and apply GELU in one Triton kernel, with its backward pass.

These are the widest tensors of a layer. Phi, the normal distribution function, is formula 7.1.26 of Abramowitz and
Stegun (1964), accurate to 1e-7. The derivative needs a density, which is the only exponential in this formula. The
backward pass also sums the gradient of the bias over the tokens that it reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ranker.encoders.kernels.sums import column_sums

FORWARD = {"ROWS": 2, "COLUMNS": 1024, "num_warps": 2}  # measured on an H200, see docs/performance.md
BACKWARD = {"ROWS": 2, "COLUMNS": 1024, "BLOCKS": 32, "num_warps": 4}


@triton.jit
def phi(x):
    """Return Phi(x), the normal distribution function, and exp(-x^2 / 2)."""
    t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(x))
    bell = tl.exp2(-0.7213475204444817 * x * x)
    tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t * 0.5 * bell
    return tl.where(x < 0, tail, 1.0 - tail), bell


@triton.jit(do_not_specialize=["tokens"])
def _forward(x, bias, out, tokens, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute the results of a block of ROWS tokens and COLUMNS columns."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_dim = columns < DIM
    mask = (rows < tokens)[:, None] & in_dim[None, :]
    offsets = rows[:, None].to(tl.int64) * DIM + columns[None, :]
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(bias + columns, mask=in_dim, other=0.0).to(tl.float32)[None, :]
    below, _ = phi(value)
    tl.store(out + offsets, (value * below).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _backward(
    grad_out,
    x,
    bias,
    grad,
    sums,
    tokens,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Compute the gradients of BLOCKS times ROWS tokens and COLUMNS columns, and their part of that of the bias."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_dim = columns < DIM
    biases = tl.load(bias + columns, mask=in_dim, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([COLUMNS], tl.float32)
    for block in range(BLOCKS):
        rows = (tl.program_id(0) * BLOCKS + block) * ROWS + tl.arange(0, ROWS)
        mask = (rows < tokens)[:, None] & in_dim[None, :]
        offsets = rows[:, None].to(tl.int64) * DIM + columns[None, :]
        value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) + biases
        below, bell = phi(value)
        slope = below + value * bell * 0.3989422804014327
        grad_x = tl.load(grad_out + offsets, mask=mask, other=0.0).to(tl.float32) * slope
        tl.store(grad + offsets, grad_x.to(grad.dtype.element_ty), mask=mask)
        total += tl.sum(grad_x, 0)
    tl.store(sums + tl.program_id(0) * DIM + columns, total, mask=in_dim)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Return `gelu(x + bias)` (Hendrycks and Gimpel, 2016, arXiv:1606.08415), computed in float32.

    Args:
        x: bf16 or fp16 [tokens, dim].
        bias: [dim].

    Returns:
        [tokens, dim]
    """
    x = x.contiguous()
    tokens, dim = x.shape
    out = torch.empty_like(x)
    grid = (triton.cdiv(tokens, FORWARD["ROWS"]), triton.cdiv(dim, FORWARD["COLUMNS"]))
    if tokens:
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _forward[grid](x, bias, out, tokens, DIM=dim, **FORWARD)
    return out


def bias_gelu_backward(grad_out: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `bias_gelu`; the arguments are its own, and `grad_out` [tokens, dim].

    Returns:
        d/d(x) [tokens, dim], which overwrites `grad_out`; d/d(bias), float32 [dim].
    """
    grad_out, x = grad_out.contiguous(), x.contiguous()
    tokens, dim = x.shape
    grid = (triton.cdiv(tokens, BACKWARD["ROWS"] * BACKWARD["BLOCKS"]), triton.cdiv(dim, BACKWARD["COLUMNS"]))
    sums = torch.empty(grid[0], dim, dtype=torch.float32, device=x.device)
    if tokens:
        with torch.cuda.device_of(x):
            _backward[grid](grad_out, x, bias, grad_out, sums, tokens, DIM=dim, **BACKWARD)
    return grad_out, column_sums(sums)
