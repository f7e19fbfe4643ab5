"""Attention within short ragged rows as an operator of torch, with gradients and for compiled code."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.library import triton_op, wrap_triton

from ranker.encoders.kernels.short_attention import attend
from ranker.encoders.kernels.short_attention_backward import attend_backward


@triton_op("ranker::short_attention", mutates_args=())
def short_attention(qkv: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Run `attend` with gradients, also in compiled code; arguments and results are the same."""
    return attend(qkv, cu_seqlens, cu_keys, blocks, wrap_triton)


@triton_op("ranker::short_attention_backward", mutates_args=())
def short_attention_backward(
    grad_out: Tensor, qkv: Tensor, out: Tensor, sums: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, blocks: Tensor
) -> Tensor:  # fmt: skip
    """Return the gradient of `short_attention`, d/d(qkv) [tokens, 3, heads, dim]."""
    return attend_backward(grad_out, qkv, out, sums, cu_seqlens, cu_keys, blocks, wrap_triton)[0]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, *boundaries = inputs
    ctx.save_for_backward(qkv, *output, *boundaries)


def _backward(ctx: Any, grad_out: Tensor, grad_sums: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG001 - the sums have no gradient
    return short_attention_backward(grad_out, *ctx.saved_tensors), None, None, None


short_attention.register_autograd(_backward, setup_context=_keep)
