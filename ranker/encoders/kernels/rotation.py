"""Rotate queries and keys by their positions (RoPE; Su et al., 2021, arXiv:2104.09864) in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LAUNCH = {"ROWS": 64, "num_warps": 4}  # ROWS counts pairs of token and head; measured on an H200, docs/performance.md


@triton.jit(do_not_specialize=["rows"])
def _rotate(
    qkv, cos, sin, position_ids, rows, SIGN: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr
):
    """Rotate ROWS heads. A token has 2 * HEADS heads: first those of its query, then those of its key."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // (2 * HEADS), row % (2 * HEADS)
    dims = tl.arange(0, HALF)
    mask = (row < rows)[:, None]
    angles = tl.load(position_ids + token, mask=row < rows, other=0)[:, None] * HALF + dims[None, :]
    cosine = tl.load(cos + angles, mask=mask, other=0.0)
    sine = tl.load(sin + angles, mask=mask, other=0.0) * SIGN
    pointers = qkv + token[:, None].to(tl.int64) * (6 * HEADS * HALF) + head[:, None] * (2 * HALF) + dims[None, :]
    one = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(pointers + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, (one * cosine - other * sine).to(qkv.dtype.element_ty), mask=mask)
    tl.store(pointers + HALF, (other * cosine + one * sine).to(qkv.dtype.element_ty), mask=mask)


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, back: bool = False) -> Tensor:
    """Rotate queries and keys in place, computed in float32.

    Args:
        qkv: Queries, keys and values, bf16 or fp16 [tokens, 3, heads, dim], contiguous.
        cos: Cosines of the angles, float32 [positions, dim / 2], contiguous.
        sin: Sines of the angles, float32 [positions, dim / 2], contiguous.
        position_ids: Position of each token, int64 [tokens].
        back: Whether to rotate by the negative angles, which turns gradients of rotated values into gradients of the
            values.

    Returns:
        `qkv`
    """
    tokens, _, heads, dim = qkv.shape
    rows = tokens * 2 * heads
    if tokens:
        with torch.cuda.device_of(qkv):  # Triton launches on the current device
            _rotate[(triton.cdiv(rows, LAUNCH["ROWS"]),)](
                qkv, cos, sin, position_ids, rows, SIGN=-1.0 if back else 1.0, HEADS=heads, HALF=dim // 2, **LAUNCH
            )  # fmt: skip
    return qkv
