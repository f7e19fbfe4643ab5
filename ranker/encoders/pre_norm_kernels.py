"""A pre-norm layer through this package's kernels, with explicit backward passes; CUDA in half precision.

One kernel computes a residual sum and the norm after it, even if the norm belongs to the next layer. So a layer returns
two terms: the sum so far, and the output of its last linear layer. The next layer's first kernel adds both. Weight
gradients are computed in the precision of the weights, and nothing is copied. Layers with biases are not supported;
ModernBERT has no biases.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ranker.encoders.attention import PackedRows, library_attention
from ranker.encoders.kernel_layer import weight_gradient
from ranker.encoders.layer import Dropout
from ranker.encoders.pre_norm_layer import PreNormSettings, PreNormWeights, Rotary

try:
    from ranker.encoders.kernels import add_norm, gated_activation, rotation, short_attention, short_attention_backward
except ImportError:  # no Triton
    add_norm = gated_activation = rotation = short_attention = short_attention_backward = None  # type: ignore[assignment]


class PreNormKernels(NamedTuple):
    """The kernels of one layer: modules of `ranker.encoders.kernels`, or objects with the same functions.

    Args:
        add_norm: See `ranker.encoders.kernels.add_norm`.
        gated_activation: See `ranker.encoders.kernels.gated_activation`.
        rotation: See `ranker.encoders.kernels.rotation`.
        attention: See `ranker.encoders.kernels.short_attention`; None: torch's kernel is used, for long rows.
        attention_backward: See `ranker.encoders.kernels.short_attention_backward`.
    """

    add_norm: Any
    gated_activation: Any
    rotation: Any
    attention: Any
    attention_backward: Any


def triton_pre_norm_kernels(short: bool) -> PreNormKernels:
    """Return the Triton kernels of this package.

    Args:
        short: Whether attention runs through the kernel for short rows.
    """
    attention = (short_attention, short_attention_backward) if short else (None, None)
    return PreNormKernels(add_norm, gated_activation, rotation, *attention)


class Stream(NamedTuple):
    """The states between layers, as two terms: `summed + pending`.

    Args:
        summed: [tokens, dim].
        pending: Output of the last layer, which is not added yet, [tokens, dim]; None: there is nothing to add.
    """

    summed: Tensor
    pending: Tensor | None

    @property
    def states(self) -> Tensor:
        """The states, [tokens, dim]."""
        return self.summed if self.pending is None else self.summed + self.pending


def pre_norm_kernel_layer(
    stream: Stream,
    weights: PreNormWeights,
    settings: PreNormSettings,
    kernels: PreNormKernels,
    rows: PackedRows,
    rotary: Rotary,
    hashes: tuple[Tensor | None, Tensor | None],
    first_tokens: Tensor | None,
) -> Stream:
    """Run `pre_norm_layer` through kernels.

    Args:
        stream: The states, in bf16 or fp16.
        weights: Weights of the layer.
        settings: Constants of the layer.
        kernels: The kernels to call.
        rows: Row boundaries for attention.
        rotary: Rotations, float32.
        hashes: See `pre_norm_layer`.
        first_tokens: See `pre_norm_layer`.
    """
    w, none = weights, Dropout(None, 0.0)
    summed, qkv = norm_linear(stream, w.attention_gain, w.qkv, none, settings.epsilon, kernels)
    mixed = _attend(qkv, settings, kernels, rows, rotary).flatten(1)
    if first_tokens is not None:
        mixed, summed = mixed.index_select(0, first_tokens), summed.index_select(0, first_tokens)
    stream = Stream(summed, _linear(mixed, w.attention_out))
    dropout = Dropout(hashes[0], settings.attention_dropout)
    summed, wide = norm_linear(stream, w.mlp_gain, w.up, dropout, settings.epsilon, kernels)
    gated: Any = _GatedGelu.apply(wide, Dropout(hashes[1], settings.mlp_dropout), kernels)
    return Stream(summed, _linear(gated, w.down))


def final_norm(stream: Stream, gain: Tensor, epsilon: float, kernels: PreNormKernels) -> Tensor:
    """Return the norm of the states after the last layer, [tokens, dim]."""
    _, normed = norm_linear(stream, gain, None, Dropout(None, 0.0), epsilon, kernels)
    return normed


def norm_linear(
    stream: Stream, gain: Tensor | None, weight: Any, dropout: Dropout, epsilon: float, kernels: Any
) -> tuple[Tensor, Tensor]:
    """Return `summed = summed + dropout(pending)`, [tokens, dim], and `norm(summed) @ weight.T`, [tokens, out].

    Args:
        stream: The states.
        gain: Gain of the norm, [dim]; None: no norm, as in the first layer. Nothing is pending before that layer.
        weight: [out, dim]; None: no product, so the second result is the norm.
        dropout: Dropout of `pending`.
        epsilon: Epsilon of the norm.
        kernels: The kernels to call.
    """
    if gain is None:
        return stream.states, _linear(stream.states, weight)
    pending = torch.zeros_like(stream.summed) if stream.pending is None else stream.pending
    result: Any = _NormLinear.apply(stream.summed, pending, gain, weight, dropout, epsilon, kernels)
    return result


def _linear(inner: Tensor, weight: Tensor) -> Tensor:
    product: Any = _Linear.apply(inner, weight)
    return product


def _attend(
    qkv: Tensor, settings: PreNormSettings, kernels: PreNormKernels, rows: PackedRows, rotary: Rotary
) -> Tensor:
    """Rotate queries and keys of [tokens, 3 * dim] in place, and compute attention, [tokens, heads, head size]."""
    if kernels.attention is None:
        rotated: Any = _Rotation.apply(qkv, settings.num_heads, rotary, kernels)
        return library_attention(rotated.view(len(qkv), 3, settings.num_heads, -1), rows, settings.window)
    boundaries = (rows.cu_seqlens, rows.cu_keys, rows.blocks)
    mixed: Any = _ShortAttention.apply(qkv, settings.num_heads, rotary, boundaries, settings.window, kernels)
    return mixed


class _NormLinear(torch.autograd.Function):
    """Compute `summed = residual + dropout(pending)` and `norm(summed)`, multiplied by a weight if there is one."""

    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, pending: Tensor, gain: Tensor, weight: Tensor | None, dropout: Dropout,
        epsilon: float, kernels: PreNormKernels,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        summed, normed = kernels.add_norm.add_norm(pending, residual, *dropout, gain, epsilon)
        half = None if weight is None else weight.to(normed.dtype)
        ctx.dropout, ctx.epsilon, ctx.kernels = dropout, epsilon, kernels
        ctx.weight_dtype = None if weight is None else weight.dtype
        ctx.save_for_backward(summed, None if half is None else normed, half, gain)
        return summed, normed if half is None else normed @ half.t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_summed: Tensor, grad_out: Tensor) -> tuple[Any, ...]:
        summed, normed, half, gain = ctx.saved_tensors
        grad_weight = None
        if half is not None:
            if ctx.needs_input_grad[3]:
                grad_weight = weight_gradient(grad_out, normed, ctx.weight_dtype)
            grad_out = grad_out @ half
        grad_pending, grad_residual, grad_gain = ctx.kernels.add_norm.add_norm_backward(
            grad_out, grad_summed, summed, *ctx.dropout, gain, ctx.epsilon
        )
        return grad_residual, grad_pending, grad_gain.to(gain.dtype), grad_weight, None, None, None


class _Linear(torch.autograd.Function):
    """`inner @ weight.T`."""

    @staticmethod
    def forward(ctx: Any, inner: Tensor, weight: Tensor) -> Tensor:
        half = weight.to(inner.dtype)
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(inner, half)
        return inner @ half.t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        inner, half = ctx.saved_tensors
        grad_weight = weight_gradient(grad_out, inner, ctx.weight_dtype) if ctx.needs_input_grad[1] else None
        return grad_out @ half if ctx.needs_input_grad[0] else None, grad_weight


class _Rotation(torch.autograd.Function):
    """Rotate queries and keys in place; nothing else reads the linear layer's output or its gradient."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, num_heads: int, rotary: Rotary, kernels: PreNormKernels) -> Tensor:
        ctx.shape, ctx.rotary, ctx.kernels = (len(qkv), 3, num_heads, -1), rotary, kernels
        ctx.mark_dirty(qkv)
        kernels.rotation.rotate_(qkv.view(ctx.shape), *rotary)
        return qkv

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        grad = grad_out.contiguous()
        ctx.kernels.rotation.rotate_(grad.view(ctx.shape), *ctx.rotary, back=True)
        return grad, None, None, None


class _ShortAttention(torch.autograd.Function):
    """Rotate queries and keys in place, and compute attention with the kernel for short rows."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, num_heads: int, rotary: Rotary, rows: tuple[Tensor, ...], window: int | None,
        kernels: PreNormKernels,
    ) -> Tensor:  # fmt: skip
        ctx.shape, ctx.rows, ctx.window, ctx.kernels = (len(qkv), 3, num_heads, -1), rows, window, kernels
        ctx.angles = (rotary.cos, rotary.sin)
        mixed, log_sums = kernels.attention.attend(
            kernels.rotation.rotate_(qkv.view(ctx.shape), *rotary), *rows, window=window
        )
        ctx.save_for_backward(qkv, mixed, log_sums)
        return mixed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        qkv, mixed, log_sums = ctx.saved_tensors
        grad, _ = ctx.kernels.attention_backward.attend_backward(
            grad_out, qkv.view(ctx.shape), mixed, log_sums, *ctx.rows, window=ctx.window, bias=False, angles=ctx.angles
        )
        return grad.view(len(grad), -1), *[None] * 5


class _GatedGelu(torch.autograd.Function):
    """`dropout(gelu(inner) * gate)`."""

    @staticmethod
    def forward(ctx: Any, wide: Tensor, dropout: Dropout, kernels: PreNormKernels) -> Tensor:
        ctx.dropout, ctx.kernels = dropout, kernels
        ctx.save_for_backward(wide)
        return kernels.gated_activation.gated(wide, "gelu", *dropout)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        (wide,) = ctx.saved_tensors
        return ctx.kernels.gated_activation.gated_backward(grad_out, wide, "gelu", *ctx.dropout), None, None
