"""Times of single kernels of the fastest path on a GPU, for several launch settings.

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
from transformers.models.qwen3 import modeling_qwen3 as qwen3

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from one_line import need, one_line  # noqa: E402
from train_throughput import lognormal  # noqa: E402

need("triton")

from triton.testing import do_bench  # noqa: E402

from ranker.encoders import grouped_attention as grouped  # noqa: E402
from ranker.encoders.adapted_linear import adapted_linear  # noqa: E402
from ranker.encoders.kernels import (  # noqa: E402
    add_norm,
    gated_activation,
    residual_norm,
    rotation,
    short_attention,
)
from ranker.encoders.kernels import grouped_attention as own_grouped  # noqa: E402
from ranker.encoders.kernels import rotary_heads as own_rotary  # noqa: E402
from ranker.encoders.kernels.short_attention_backward import attend_backward  # noqa: E402
from ranker.encoders.ragged import RaggedLayout  # noqa: E402
from ranker.encoders.rotary_heads import HeadNorms, rotary_heads  # noqa: E402
from ranker.types import TokenBatch  # noqa: E402

TOKENS = 65536


def rows_of(mean: int, deviation: int) -> tuple[RaggedLayout, int]:
    """Return rows with `TOKENS` tokens in all, and the length of the longest row."""
    rng = np.random.default_rng(0)
    lengths = lognormal(rng, mean, deviation, TOKENS // mean, 512)
    ends = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    nothing = torch.zeros(int(ends[-1]), dtype=torch.long, device="cuda")
    return RaggedLayout.of(TokenBatch(nothing, nothing, ends, int(lengths.max()))), int(lengths.max())


def show(name: str, call: Callable[[], Any]) -> None:
    """Print the median time of a call."""
    try:
        print(f"{name:64s} {do_bench(call, return_mode='median'):.4f} ms", flush=True)
    except Exception as error:  # settings that do not fit must not end the benchmark
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
            backward = lambda: attend_backward(above, qkv, mixed, sums, *boundaries, window=window)  # noqa: E731
            angles = tuple(torch.randn(2, 512, dim // 2, device="cuda"))
            show(
                f"{label}: backward, turned back, without bias",
                lambda: attend_backward(
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


def grouped_attention() -> None:
    """Time causal attention with grouped heads: this package's kernel, torch's, and torch's with repeated key heads."""
    for mean, deviation in ((87, 35), (180, 40), (410, 40)):
        layout, longest = rows_of(mean, deviation)
        ends, blocks, tokens = layout.batch.cu_seqlens, layout.blocks, layout.batch.num_tokens
        for heads, key_heads, dim in ((16, 8, 128), (32, 8, 128), (9, 3, 64)):
            label = f"{mean} tokens, {heads} / {key_heads} heads of {dim}"
            shapes = ((heads, dim), (key_heads, dim), (key_heads, dim))
            parts = [half(tokens, *shape).requires_grad_() for shape in shapes]
            above, scale = half(tokens, heads, dim), dim**-0.5

            def operator(short: bool) -> torch.Tensor:
                options = (ends, ends, blocks, longest, short, True, -1, scale)
                return grouped.grouped_attention(*parts, *options)[0]

            def repeated() -> torch.Tensor:
                query, *others = parts
                key, value = (part.repeat_interleave(heads // key_heads, dim=1) for part in others)
                return varlen_attn(query, key, value, ends, ends, longest, longest, scale=scale, window_size=(-1, 0))

            calls = {"repeated": repeated, "torch": lambda: operator(False), "own": lambda: operator(True)}
            for name, call in calls.items():
                show(f"{label}: {name}, forward", call)
                try:
                    result = call()
                except Exception as error:  # an operator that refuses grouped heads must not end the others
                    print(f"{label}: {name} failed: {str(error)[:200]}", flush=True)
                    continue
                show(
                    f"{label}: {name}, backward",
                    lambda: torch.autograd.grad(result, parts, above, retain_graph=True),
                )
            launches = (own_grouped.FORWARD, own_grouped.QUERIES_BACKWARD, own_grouped.KEYS_BACKWARD)
            usual = [dict(launch) for launch in launches]
            mixed, sums = own_grouped.attend(*(part.detach() for part in parts), ends, blocks, scale)
            states = [part.detach() for part in parts]
            for keys, warps, stages in ((32, 4, 2), (32, 4, 3), (64, 4, 1), (64, 4, 2), (64, 8, 2)):
                own_grouped.FORWARD.update(KEYS=keys, num_warps=warps, num_stages=stages)
                show(
                    f"{label}: own forward, {keys} keys, {warps} warps, {stages} stages",
                    lambda: own_grouped.attend(*states, ends, blocks, scale),
                )
            for warps, stages in ((4, 1), (4, 2), (8, 1), (8, 2)):
                for launch in launches[1:]:
                    launch.update(num_warps=warps, STAGES=stages)
                show(
                    f"{label}: own backward, {warps} warps, {stages} stages",
                    lambda: own_grouped.attend_backward(above, *states, mixed, sums, ends, blocks, scale),
                )
            for launch, settings in zip(launches, usual, strict=True):
                launch.update(settings)


def rotary() -> None:
    """Time the norms and rotation of heads: this package's kernel, and transformers' code compiled by torch."""
    for heads, key_heads, dim, with_norms in ((16, 8, 128, True), (9, 3, 64, False)):
        label = f"{heads} / {key_heads} heads of {dim}, {'with' if with_norms else 'without'} norms"
        x = half(TOKENS, (heads + 2 * key_heads) * dim).requires_grad_()
        cos, sin = half(TOKENS, dim), half(TOKENS, dim)
        above = [half(TOKENS, count, dim) for count in (heads, key_heads, key_heads)]
        norms = [qwen3.Qwen3RMSNorm(dim).cuda().bfloat16().requires_grad_(False) for _ in range(2 * with_norms)]

        def transformers_code(x: torch.Tensor) -> list[torch.Tensor]:
            parts = [
                part.view(1, TOKENS, -1, dim) for part in x.split([n * dim for n in (heads, key_heads, key_heads)], 1)
            ]
            for number, norm in enumerate(norms):
                parts[number] = norm(parts[number])
            turned = [part.transpose(1, 2) for part in parts]
            turned[:2] = qwen3.apply_rotary_pos_emb(turned[0], turned[1], cos[None], sin[None])
            return [part[0].transpose(0, 1) for part in turned]

        def own(x: torch.Tensor) -> list[torch.Tensor]:
            gains = HeadNorms(norms[0].weight, norms[1].weight, 1e-6) if norms else None
            return list(rotary_heads(x, gains, cos, sin, heads, key_heads))

        for trained in (False, True) if norms else (False,):
            leaves = [x, *(norm.weight.requires_grad_(trained) for norm in norms if trained)]
            for name, call in (("transformers' code, compiled", torch.compile(transformers_code)),
                               ("own, compiled", torch.compile(own))):  # fmt: skip
                show(f"{label}: {name}, forward", lambda: call(x))
                results = call(x)
                show(
                    f"{label}: {name}, backward{', gains' if trained else ''}",
                    lambda: torch.autograd.grad(results, leaves, above, retain_graph=True),
                )
            usual = dict(own_rotary.FORWARD), dict(own_rotary.BACKWARD)
            for values, warps in ((512, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8)):
                for launch in (own_rotary.FORWARD, own_rotary.BACKWARD):
                    launch.update(VALUES=values, num_warps=warps)
                show(f"{label}: own, {values} values, {warps} warps, forward", lambda: own(x))
                results = own(x)
                show(
                    f"{label}: own, {values} values, {warps} warps, backward{', gains' if trained else ''}",
                    lambda: torch.autograd.grad(results, leaves, above, retain_graph=True),
                )
            own_rotary.FORWARD.update(usual[0])
            own_rotary.BACKWARD.update(usual[1])


def adapters() -> None:
    """Time Qwen3-0.6B's linear layers with adapters of rank 16: as columns of one product, and as separate products."""
    for name, inputs, outputs in (("qkv", 1024, (2048, 1024, 1024)), ("o", 2048, (1024,)),
                                  ("gate up", 1024, (3072, 3072)), ("down", 3072, (1024,))):  # fmt: skip
        count, total = 16 * len(outputs), sum(outputs)
        states, above = half(TOKENS // 2, inputs).requires_grad_(), half(TOKENS // 2, total)
        first, wide = half(count, inputs), half(total, inputs + count)
        firsts = [torch.randn(16, inputs, device="cuda").requires_grad_() for _ in outputs]
        seconds = [torch.randn(size, 16, device="cuda").requires_grad_() for size in outputs]
        weight = wide[:, :inputs].contiguous()

        def columns() -> torch.Tensor:
            return adapted_linear(states, firsts, seconds, [1.0] * len(outputs), None, first, wide)[0]

        def apart() -> torch.Tensor:
            parts = zip(weight.split(outputs), firsts, seconds, strict=True)
            mixed = [
                torch.nn.functional.linear(states, base)
                + torch.nn.functional.linear(torch.nn.functional.linear(states, a.bfloat16()), b.bfloat16())
                for base, a, b in parts
            ]
            return torch.cat(mixed, 1) if len(mixed) > 1 else mixed[0]

        def frozen() -> torch.Tensor:
            return torch.nn.functional.linear(states, weight)

        for label, call in (("columns", columns), ("apart", apart), ("no adapter", frozen)):
            show(f"{name}: {label}, forward", call)
            result, leaves = call(), [states] if label == "no adapter" else [states, *firsts, *seconds]
            show(
                f"{name}: {label}, backward",
                lambda: torch.autograd.grad(result, leaves, above, retain_graph=True),
            )


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
            gated_activation.LAUNCH["gelu"].update(ROWS=rows, COLUMNS=columns)
            label = f"gated gelu {dim}: {rows} x {columns}"
            show(f"{label}, forward", lambda: gated_activation.gated(wide, "gelu"))
            show(f"{label}, backward", lambda: gated_activation.gated_backward(above, wide, "gelu"))
    layout, longest = rows_of(87, 35)
    qkv = half(layout.batch.num_tokens, 3, 12, 64)
    cos, sin = torch.randn(2, longest, 32, device="cuda")
    show("rotation", lambda: rotation.rotate_(qkv, cos, sin, layout.position_ids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parts = {
        "attention": attention,
        "grouped": grouped_attention,
        "adapters": adapters,
        "rotary": rotary,
        "others": others,
    }
    parser.add_argument("--only", choices=parts)
    only = parser.parse_args().only
    for name, part in parts.items():
        if only in (None, name):
            part()


if __name__ == "__main__":
    one_line(main)
