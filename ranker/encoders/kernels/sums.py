"""Sums of what programs found, in a fixed order: few columns for each program, so that they are many."""

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
    """COLUMNS columns."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, count, ROWS):
        rows = first + tl.arange(0, ROWS)
        places = rows[:, None].to(tl.int64) * WIDTH + columns[None, :]
        total += tl.load(parts + places, mask=(rows < count)[:, None] & (columns < WIDTH)[None, :], other=0.0)
    tl.store(out + columns, tl.sum(total, 0), mask=columns < WIDTH)


def column_sums(parts: Tensor, wrap: Callable[..., Any] = lambda kernel: kernel) -> Tensor:
    """Sum over the first axis, float32 [parts, ...]; `wrap` is `wrap_triton` where the kernel is traced."""
    width = parts.shape[1:].numel()
    out = torch.empty(parts.shape[1:], dtype=torch.float32, device=parts.device)
    with torch.cuda.device_of(parts):  # Triton launches on the current device
        wrap(_sum)[(triton.cdiv(width, SUM["COLUMNS"]),)](parts, out, parts.shape[0], WIDTH=width, **SUM)
    return out
