"""Lookups of words, positions and segments, their sum, layer norm and dropout in one Triton kernel, forward and backward.

Nothing is kept for the backward pass, which looks up again. It sums the gradients of gain, shift and segments on the
way; those of words and positions are for `ranker.encoders.lookup` to sum by token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ranker.encoders.dropout import COLUMN, FIRST, SECOND, threshold
from ranker.encoders.kernels.hashed import PROGRAMS, kept
from ranker.encoders.kernels.sums import column_sums

# the launches, for rows of up to 1,024 numbers: measured on an H200, see docs/performance.md
FORWARD = {"ROWS": 1, "num_warps": 1}
BACKWARD = {"num_warps": 1}


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    words, places, kinds, ids, positions, segments, hashes, gain, shift, out, tokens, OFFSET: tl.constexpr, THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr, EPSILON: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr,
    COLUMN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """ROWS tokens."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    here, real = columns < DIM, rows < tokens
    mask = real[:, None] & here[None, :]
    word = tl.load(ids + rows, mask=real, other=0).to(tl.int64) * DIM
    place = (tl.load(positions + rows, mask=real, other=0).to(tl.int64) + OFFSET) * DIM
    kind = tl.load(segments + rows, mask=real, other=0).to(tl.int64) * DIM
    value = tl.load(words + word[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    value += tl.load(places + place[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    value += tl.load(kinds + kind[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(here[None, :], value - (tl.sum(value, 1) / DIM)[:, None], 0.0)
    spread = tl.rsqrt(tl.sum(centred * centred, 1) / DIM + EPSILON)
    gains = tl.load(gain + columns, mask=here, other=0.0).to(tl.float32)
    shifts = tl.load(shift + columns, mask=here, other=0.0).to(tl.float32)
    normed = centred * spread[:, None] * gains[None, :] + shifts[None, :]
    if DROP:
        drawn = tl.load(hashes + rows, mask=real, other=0)
        normed = tl.where(kept(drawn, columns, THRESHOLD, COLUMN, FIRST, SECOND), normed * SCALE, 0.0)
    tl.store(out + rows[:, None].to(tl.int64) * DIM + columns[None, :], normed.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "count"])
def _backward(
    above, words, places, kinds, ids, positions, segments, hashes, gain, grad, sums, tokens, count, OFFSET: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr, EPSILON: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, KINDS: tl.constexpr,
    DROP: tl.constexpr, COLUMN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """`count` tokens, one after another, and this program's part of the sums over tokens, [2 + KINDS, DIM]: of gain, shift and segments."""
    columns = tl.arange(0, WIDTH)
    here = columns < DIM
    numbers = tl.arange(0, KINDS)
    gains = tl.load(gain + columns, mask=here, other=0.0).to(tl.float32)
    gain_sum = tl.zeros([WIDTH], tl.float32)
    shift_sum = tl.zeros([WIDTH], tl.float32)
    kind_sum = tl.zeros([KINDS, WIDTH], tl.float32)
    for step in range(count):
        row = tl.program_id(0).to(tl.int64) * count + step
        if row < tokens:
            kind = tl.load(segments + row)
            value = tl.load(words + tl.load(ids + row).to(tl.int64) * DIM + columns, mask=here, other=0.0).to(
                tl.float32
            )
            value += tl.load(
                places + (tl.load(positions + row).to(tl.int64) + OFFSET) * DIM + columns, mask=here, other=0.0
            ).to(tl.float32)
            value += tl.load(kinds + kind.to(tl.int64) * DIM + columns, mask=here, other=0.0).to(tl.float32)
            own = tl.load(above + row * DIM + columns, mask=here, other=0.0).to(tl.float32)
            if DROP:
                drawn = tl.load(hashes + row + tl.arange(0, 1))
                stays = tl.reshape(kept(drawn, columns, THRESHOLD, COLUMN, FIRST, SECOND), [WIDTH])
                own = tl.where(stays, own * SCALE, 0.0)
            centred = tl.where(here, value - tl.sum(value, 0) / DIM, 0.0)
            spread = tl.rsqrt(tl.sum(centred * centred, 0) / DIM + EPSILON)
            normed = centred * spread
            shift_sum += own
            gain_sum += own * normed
            own *= gains
            own = (own - tl.sum(own, 0) / DIM - normed * (tl.sum(own * normed, 0) / DIM)) * spread
            tl.store(grad + row * DIM + columns, own, mask=here)
            kind_sum += tl.where((numbers == kind)[:, None], own[None, :], 0.0)
    sums += tl.program_id(0).to(tl.int64) * ((2 + KINDS) * DIM)
    tl.store(sums + columns, gain_sum, mask=here)
    tl.store(sums + DIM + columns, shift_sum, mask=here)
    tl.store(sums + (2 + numbers)[:, None] * DIM + columns[None, :], kind_sum, mask=here[None, :])


def _settings(
    gain: Tensor, offset: int, hashes: Tensor | None, rate: float, epsilon: float, launch: dict[str, int]
) -> dict[str, Any]:
    width = triton.next_power_of_2(len(gain))
    return {
        "OFFSET": offset,
        "THRESHOLD": threshold(rate),
        "SCALE": 1 / (1 - rate),
        "EPSILON": epsilon,
        "DIM": len(gain),
        "WIDTH": width,
        "DROP": hashes is not None,
        "COLUMN": COLUMN % 2**32,
        "FIRST": FIRST % 2**32,
        "SECOND": SECOND % 2**32,
        **launch,
        "num_warps": launch["num_warps"] * max(width // 1024, 1),
    }


def embedding_norm(
    tables: tuple[Tensor, Tensor, Tensor], ids: Tensor, positions: Tensor, segments: Tensor, offset: int, hashes: Tensor | None, rate: float,
    gain: Tensor, shift: Tensor, epsilon: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return `dropout(layer_norm(word + position + segment))`, computed in float32.

    Args:
        tables: Of words, positions and segments, each [rows, dim].
        ids: Of words, int64 [tokens].
        positions: Places of the tokens in their rows, int64 [tokens].
        segments: int64 [tokens].
        offset: Row of the table of positions for place 0.
        hashes: What is dropped by, int32 [tokens] (`dropout_hashes`); None: nothing is.
        rate: Of dropout.
        gain: Of the norm, [dim].
        shift: Of the norm, [dim].
        epsilon: Of the norm.
        dtype: Of the result, [tokens, dim].
    """
    tokens = len(ids)
    out = torch.empty(tokens, len(gain), dtype=dtype, device=ids.device)
    settings = _settings(gain, offset, hashes, rate, epsilon, FORWARD)
    if tokens:
        with torch.cuda.device_of(ids):  # Triton launches on the current device
            _forward[(triton.cdiv(tokens, FORWARD["ROWS"]),)](
                *tables,
                ids,
                positions,
                segments,
                ids if hashes is None else hashes.contiguous(),
                gain,
                shift,
                out,
                tokens,
                **settings,
            )
    return out


def embedding_norm_backward(
    above: Tensor, tables: tuple[Tensor, Tensor, Tensor], ids: Tensor, positions: Tensor, segments: Tensor, offset: int, hashes: Tensor | None,
    rate: float, gain: Tensor, epsilon: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of `embedding_norm`.

    Returns:
        By the sum of what was looked up, float32 [tokens, dim]; by gain, shift and the table of segments, float32 [2 +
        segments, dim].
    """
    above = above.contiguous()
    tokens, dim = above.shape
    kinds = triton.next_power_of_2(len(tables[2]))
    grad = torch.empty(tokens, dim, dtype=torch.float32, device=above.device)
    sums = torch.empty(PROGRAMS, 2 + kinds, dim, dtype=torch.float32, device=above.device)
    with torch.cuda.device_of(above):  # a program without tokens gives sums of 0
        _backward[(PROGRAMS,)](
            above,
            *tables,
            ids,
            positions,
            segments,
            ids if hashes is None else hashes.contiguous(),
            gain,
            grad,
            sums,
            tokens,
            triton.cdiv(tokens, PROGRAMS),
            KINDS=kinds,
            **_settings(gain, offset, hashes, rate, epsilon, BACKWARD),
        )
    return grad, column_sums(sums)[: 2 + len(tables[2])]
