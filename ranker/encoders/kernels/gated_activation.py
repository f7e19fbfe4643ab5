"""An activation times a second factor, with dropout, in one Triton kernel with its backward pass.

With GELU this is GeGLU, and with SiLU it is SwiGLU (Shazeer, 2020, arXiv:2002.05202). The backward pass computes the
activation again, so only the linear layer's output has to be stored.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ranker.encoders.kernels.bias_gelu import phi
from ranker.encoders.kernels.hashed import dropout_constants, kept

# activation -> launch settings, measured on an H200: GELU see docs/performance.md, SiLU with dim 3,072
LAUNCH = {
    "gelu": {"ROWS": 16, "COLUMNS": 128, "num_warps": 4},
    "silu": {"ROWS": 2, "COLUMNS": 1024, "num_warps": 4},
}


@triton.jit
def _share_and_slope(x, ACTIVATION: tl.constexpr):
    """Return the activation of x divided by x, and the derivative of the activation at x."""
    if ACTIVATION == "gelu":
        below, bell = phi(x)
        return below, below + x * bell * 0.3989422804014327
    else:  # noqa: RET505 - without this branch, Triton compiles both returns
        share = tl.sigmoid(x)
        return share, share * (1 + x * (1 - share))


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    x, hashes, out, tokens, ACTIVATION: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DROP: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, COLUMN: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):  # fmt: skip
    """Compute the results of ROWS tokens and COLUMNS columns."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < tokens)[:, None] & (columns < DIM)[None, :]
    offsets = rows[:, None].to(tl.int64) * (2 * DIM) + columns[None, :]
    first = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + offsets + DIM, mask=mask, other=0.0).to(tl.float32)
    share, _ = _share_and_slope(first, ACTIVATION)
    value = first * share * second
    if DROP:
        row_hashes = tl.load(hashes + rows, mask=rows < tokens, other=0)
        value = tl.where(kept(row_hashes, columns, THRESHOLD, COLUMN, FIRST, SECOND), value * SCALE, 0.0)
    out_offsets = rows[:, None].to(tl.int64) * DIM + columns[None, :]
    tl.store(out + out_offsets, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _backward(
    grad_out, x, hashes, grad, tokens, STRIDE: tl.constexpr, ACTIVATION: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DROP: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
    COLUMN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of ROWS tokens and COLUMNS columns of both halves of `x`.

    STRIDE is the distance of tokens in `grad_out`. It is a constant, because a variable takes more registers.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < tokens)[:, None] & (columns < DIM)[None, :]
    offsets = rows[:, None].to(tl.int64) * (2 * DIM) + columns[None, :]
    first = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + offsets + DIM, mask=mask, other=0.0).to(tl.float32)
    upstream = tl.load(grad_out + rows[:, None].to(tl.int64) * STRIDE + columns[None, :], mask=mask, other=0.0)
    upstream = upstream.to(tl.float32)
    if DROP:
        row_hashes = tl.load(hashes + rows, mask=rows < tokens, other=0)
        upstream = tl.where(kept(row_hashes, columns, THRESHOLD, COLUMN, FIRST, SECOND), upstream * SCALE, 0.0)
    share, slope = _share_and_slope(first, ACTIVATION)
    tl.store(grad + offsets, (upstream * second * slope).to(grad.dtype.element_ty), mask=mask)
    tl.store(grad + offsets + DIM, (upstream * first * share).to(grad.dtype.element_ty), mask=mask)


def gated(x: Tensor, activation: str, hashes: Tensor | None = None, rate: float = 0.0) -> Tensor:
    """Return `dropout(activation(first) * second)`, computed in float32.

    Args:
        x: The first and the second factors of each token, bf16 or fp16 [tokens, 2 * dim].
        activation: `gelu` or `silu`.
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
            _forward[_grid(tokens, dim, activation)](
                x, x if hashes is None else hashes.contiguous(), out, tokens, DIM=dim,
                **_settings(activation, hashes, rate),
            )  # fmt: skip
    return out


def gated_backward(
    grad_out: Tensor, x: Tensor, activation: str, hashes: Tensor | None = None, rate: float = 0.0
) -> Tensor:
    """Return the gradient of `gated`, [tokens, 2 * dim].

    Args:
        grad_out: Gradient of the output, [tokens, dim].
        x: See `gated`.
        activation: See `gated`.
        hashes: See `gated`.
        rate: See `gated`.
    """
    x = x.contiguous()
    grad_out = grad_out if grad_out.stride(1) == 1 else grad_out.contiguous()
    tokens, dim = grad_out.shape
    grad = torch.empty_like(x)
    if tokens:
        with torch.cuda.device_of(x):
            _backward[_grid(tokens, dim, activation)](
                grad_out, x, x if hashes is None else hashes.contiguous(), grad, tokens, STRIDE=grad_out.stride(0),
                DIM=dim, **_settings(activation, hashes, rate),
            )  # fmt: skip
    return grad


def _grid(tokens: int, dim: int, activation: str) -> tuple[int, int]:
    launch = LAUNCH[activation]
    return triton.cdiv(tokens, launch["ROWS"]), triton.cdiv(dim, launch["COLUMNS"])


def _settings(activation: str, hashes: Tensor | None, rate: float) -> dict[str, Any]:
    return {
        "ACTIVATION": activation,
        **dropout_constants(hashes, rate),
        **LAUNCH[activation],
    }
