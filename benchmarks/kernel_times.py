"""Times of single kernels of the fast path on a GPU, for several launch settings.

python benchmarks/kernel_times.py --only attention
"""

# ruff: noqa: B023 - each function is called before its variables change
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn
from triton.testing import do_bench

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from train_throughput import lognormal  # noqa: E402

from ranker.encoders.kernels import add_norm, gated_gelu, residual_norm, rotation, short_attention  # noqa: E402
from ranker.encoders.ragged import RaggedLayout  # noqa: E402
from ranker.types import TokenBatch  # noqa: E402

TOKENS = 65536


def rows_of(mean: int, deviation: int) -> tuple[RaggedLayout, int]:
    """Rows of `TOKENS` tokens and the longest length."""
    rng = np.random.default_rng(0)
    lengths = lognormal(rng, mean, deviation, TOKENS // mean, 512)
    ends = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    nothing = torch.zeros(int(ends[-1]), dtype=torch.long, device="cuda")
    return RaggedLayout.of(TokenBatch(nothing, nothing, ends, int(lengths.max()))), int(lengths.max())


def show(name: str, call: Callable[[], Any]) -> None:
    """Print a call's median time."""
    try:
        print(f"{name:64s} {do_bench(call, return_mode='median'):.4f} ms", flush=True)
    except Exception as error:  # settings that do not fit must not end the others
        print(f"{name:64s} failed: {str(error)[:80]}", flush=True)


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def attention() -> None:
    heads, dim = 12, 64
    for mean, deviation in ((87, 35), (200, 40), (410, 40)):
        layout, longest = rows_of(mean, deviation)
        ends, blocks, tokens = layout.batch.cu_seqlens, layout.blocks, layout.batch.num_tokens
        qkv, above = half(tokens, 3, heads, dim), half(tokens, heads, dim)
        query, key, value = (part.contiguous().requires_grad_() for part in qkv.unbind(1))
        own = short_attention
        for window in (None, 64):
            label, boundaries = f"{mean} tokens, window {window}", (ends, ends, blocks)
            sides = (-1, -1) if window is None else (window, window)
            theirs = lambda: varlen_attn(query, key, value, ends, ends, longest, longest, window_size=sides)  # noqa: E731
            show(f"{label}: torch forward", theirs)
            result = theirs()
            show(
                f"{label}: torch backward",
                lambda: torch.autograd.grad(result, (query, key, value), above, retain_graph=True),
            )
            usual = dict(own.FORWARD)
            for keys, warps, stages in ((32, 4, 3), (64, 4, 3)):
                own.FORWARD.update(KEYS=keys, num_warps=warps, num_stages=stages)
                show(
                    f"{label}: forward, {keys} keys, {warps} warps, {stages} stages",
                    lambda: own.attend(qkv, *boundaries, window=window),
                )
            own.FORWARD.update(usual)
            mixed, sums = own.attend(qkv, *boundaries, window=window)
            backward = lambda: own.attend_backward(above, qkv, mixed, sums, *boundaries, window=window)  # noqa: E731
            angles = tuple(torch.randn(2, 512, dim // 2, device="cuda"))
            show(
                f"{label}: backward, turned back, without bias",
                lambda: own.attend_backward(
                    above,
                    qkv,
                    mixed,
                    sums,
                    *boundaries,
                    window=window,
                    bias=False,
                    angles=angles,
                ),
            )
            show(f"{label}: backward", backward)


def others() -> None:
    for dim in (768, 1024):
        x, bias, hashes = half(TOKENS, dim), torch.randn(dim, device="cuda"), torch.arange(TOKENS, device="cuda").int()
        for programs in (1056, 2112, 4224):
            residual_norm.PROGRAMS = programs
            show(
                f"residual_norm {dim}: backward, {programs} programs",
                lambda: residual_norm.residual_norm_backward(x, x, bias, x, hashes, 0.1, bias, 1e-5),
            )
        x, residual, gain = half(TOKENS, dim), half(TOKENS, dim), torch.randn(dim, device="cuda")
        show(f"add_norm {dim}: forward", lambda: add_norm.add_norm(x, residual, None, 0.0, gain, 1e-5))
        for programs in (1056, 2112, 3168):
            add_norm.PROGRAMS = programs
            show(
                f"add_norm {dim}: backward, {programs} programs",
                lambda: add_norm.add_norm_backward(x, residual, x, None, 0.0, gain, 1e-5),
            )
    for dim in (1152, 2624):
        wide, above = half(TOKENS, 2 * dim), half(TOKENS, dim)
        for rows, columns in ((16, 128), (2, 1024)):
            gated_gelu.LAUNCH.update(ROWS=rows, COLUMNS=columns)
            label = f"gated_gelu {dim}: {rows} x {columns}"
            show(f"{label}, forward", lambda: gated_gelu.gated_gelu(wide, None, 0.0))
            show(f"{label}, backward", lambda: gated_gelu.gated_gelu_backward(above, wide, None, 0.0))
    layout, longest = rows_of(87, 35)
    qkv = half(layout.batch.num_tokens, 3, 12, 64)
    cos, sin = torch.randn(2, longest, 32, device="cuda")
    show("rotation", lambda: rotation.rotate_(qkv, cos, sin, layout.position_ids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", choices=["attention", "others"])
    only = parser.parse_args().only
    if only != "others":
        attention()
    if only != "attention":
        others()


if __name__ == "__main__":
    main()
