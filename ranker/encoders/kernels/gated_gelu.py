"""GELU times a gate, with dropout, in one Triton kernel with its backward pass (GeGLU; Shazeer, arXiv:2002.05202).

The backward pass computes GELU again, so only the linear layer's output has to be stored.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ranker.encoders.dropout import COLUMN, FIRST, SECOND, threshold
from ranker.encoders.kernels.bias_gelu import phi
from ranker.encoders.kernels.hashed import kept

LAUNCH = {"ROWS": 16, "COLUMNS": 128, "num_warps": 4}  # measured on an H200, see docs/performance.md


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    x, hashes, out, tokens, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DROP: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr, COLUMN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Compute the results of ROWS tokens and COLUMNS columns."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < tokens)[:, None] & (columns < DIM)[None, :]
    offsets = rows[:, None].to(tl.int64) * (2 * DIM) + columns[None, :]
    inner = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(x + offsets + DIM, mask=mask, other=0.0).to(tl.float32)
    below, _ = phi(inner)
    value = inner * below * gate
    if DROP:
        row_hashes = tl.load(hashes + rows, mask=rows < tokens, other=0)
        value = tl.where(kept(row_hashes, columns, THRESHOLD, COLUMN, FIRST, SECOND), value * SCALE, 0.0)
    out_offsets = rows[:, None].to(tl.int64) * DIM + columns[None, :]
    tl.store(out + out_offsets, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _backward(
    grad_out, x, hashes, grad, tokens, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DROP: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, COLUMN: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of ROWS tokens and COLUMNS columns of both halves, inner values and gates."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < tokens)[:, None] & (columns < DIM)[None, :]
    offsets = rows[:, None].to(tl.int64) * (2 * DIM) + columns[None, :]
    inner = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(x + offsets + DIM, mask=mask, other=0.0).to(tl.float32)
    upstream = tl.load(grad_out + rows[:, None].to(tl.int64) * DIM + columns[None, :], mask=mask, other=0.0)
    upstream = upstream.to(tl.float32)
    if DROP:
        row_hashes = tl.load(hashes + rows, mask=rows < tokens, other=0)
        upstream = tl.where(kept(row_hashes, columns, THRESHOLD, COLUMN, FIRST, SECOND), upstream * SCALE, 0.0)
    below, bell = phi(inner)
    slope = below + inner * bell * 0.3989422804014327
    tl.store(grad + offsets, (upstream * gate * slope).to(grad.dtype.element_ty), mask=mask)
    tl.store(grad + offsets + DIM, (upstream * inner * below).to(grad.dtype.element_ty), mask=mask)


def _settings(hashes: Tensor | None, rate: float) -> dict[str, Any]:
    return {
        "DROP": hashes is not None,
        "THRESHOLD": threshold(rate),
        "SCALE": 1 / (1 - rate),
        "COLUMN": COLUMN % 2**32,
        "FIRST": FIRST % 2**32,
        "SECOND": SECOND % 2**32,
        **LAUNCH,
    }


def gated_gelu(x: Tensor, hashes: Tensor | None, rate: float) -> Tensor:
    """Return `dropout(gelu(inner) * gate)`, computed in float32.

    Args:
        x: Inner values and gates, bf16 or fp16 [tokens, 2 * dim].
        hashes: Dropout hashes, int32 [tokens] (`dropout_hashes`); None: no dropout.
        rate: Probability of dropout.

    Returns:
        [tokens, dim]
    """
    x = x.contiguous()
    tokens, dim = x.shape[0], x.shape[1] // 2
    out = torch.empty(tokens, dim, dtype=x.dtype, device=x.device)
    if tokens:
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _forward[(triton.cdiv(tokens, LAUNCH["ROWS"]), triton.cdiv(dim, LAUNCH["COLUMNS"]))](
                x, x if hashes is None else hashes.contiguous(), out, tokens, DIM=dim, **_settings(hashes, rate)
            )
    return out


def gated_gelu_backward(grad_out: Tensor, x: Tensor, hashes: Tensor | None, rate: float) -> Tensor:
    """Return the gradient of `gated_gelu`, [tokens, 2 * dim], from its arguments and `grad_out` [tokens, dim]."""
    grad_out, x = grad_out.contiguous(), x.contiguous()
    tokens, dim = grad_out.shape
    grad = torch.empty_like(x)
    if tokens:
        with torch.cuda.device_of(x):
            _backward[(triton.cdiv(tokens, LAUNCH["ROWS"]), triton.cdiv(dim, LAUNCH["COLUMNS"]))](
                grad_out,
                x,
                x if hashes is None else hashes.contiguous(),
                grad,
                tokens,
                DIM=dim,
                **_settings(hashes, rate),
            )
    return grad
