"""Deterministic column sums. Each Triton program sums few columns, so there are enough programs to fill the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SUM = {"ROWS": 256, "COLUMNS": 8, "num_warps": 8}  # measured on an H200, see docs/performance.md


@triton.jit(do_not_specialize=["count"])
def _sum(parts, out, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum COLUMNS columns."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, count, ROWS):
        rows = first + tl.arange(0, ROWS)
        offsets = rows[:, None].to(tl.int64) * WIDTH + columns[None, :]
        total += tl.load(parts + offsets, mask=(rows < count)[:, None] & (columns < WIDTH)[None, :], other=0.0)
    tl.store(out + columns, tl.sum(total, 0), mask=columns < WIDTH)


def column_sums(parts: Tensor, wrap: Callable[..., Any] = lambda kernel: kernel) -> Tensor:
    """Sum float32 [parts, ...] over the first axis, in a fixed order.

    Args:
        parts: Partial sums.
        wrap: Wrapper of the kernel; `wrap_triton` if it is traced.

    Returns:
        float32 [...]
    """
    width = parts.shape[1:].numel()
    out = torch.empty(parts.shape[1:], dtype=torch.float32, device=parts.device)
    with torch.cuda.device_of(parts):  # Triton launches on the current device
        wrap(_sum)[(triton.cdiv(width, SUM["COLUMNS"]),)](parts, out, parts.shape[0], WIDTH=width, **SUM)
    return out
