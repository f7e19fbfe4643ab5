"""One transformer layer through this package's kernels, with an explicit backward pass; CUDA in half precision.

The gradient that arrives through a residual sum is added to a matrix product. Autograd, and compiled code with the same
kernels, would copy this gradient first. The backward pass here adds in place, and it computes weight gradients in the
precision of the weights. Only the kernels are compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ranker.encoders.attention import PackedRows
from ranker.encoders.kernel_functions import Kernels
from ranker.encoders.layer import LayerSettings, LayerWeights, first_token_attention, hashes_of_sums


class ResidualNorm(NamedTuple):
    """The end of both blocks of a layer: `norm(dropout(product + bias) + states)`.

    Args:
        kernels: The kernels to call.
        hashes: Dropout hashes, int32 [tokens] (`dropout_hashes`); None: no dropout.
        rate: Probability of dropout.
        epsilon: Number that the norm adds to the variance.
    """

    kernels: Kernels
    hashes: Tensor | None
    rate: float
    epsilon: float

    def forward(self, product: Tensor, bias: Tensor, states: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        """Return the normed sum, [tokens, dim]."""
        return self.kernels.residual_norm(product, bias, states, self.hashes, self.rate, gain, shift, self.epsilon)

    def backward(
        self, grad_out: Tensor, product: Tensor, bias: Tensor, states: Tensor, gain: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return d/d(bias, gain, shift) [3, dim], d/d(states) and d/d(product) [tokens, dim].

        The last two results may share memory.
        """
        return self.kernels.residual_norm_backward(
            grad_out, product, bias, states, self.hashes, self.rate, gain, self.epsilon
        )


def kernel_layer(
    states: Tensor,
    weights: LayerWeights,
    settings: LayerSettings,
    kernels: Kernels,
    rows: PackedRows,
    hashes: Tensor | None,
    first_tokens: Tensor | None,
) -> Tensor:
    """Run `post_norm_layer` through kernels.

    Args:
        states: bf16 or fp16 [tokens, dim].
        weights: Weights of the layer.
        settings: Constants of the layer.
        kernels: The kernels to call.
        rows: Row boundaries for attention.
        hashes: Dropout hashes of the residual sums, int32 [2 or 1, output tokens], see `hashes_of_sums`; None: no
            dropout.
        first_tokens: Index of each row's first token, int32 [rows]; only these get an output. None: all tokens get an
            output.

    Returns:
        [output tokens, dim]
    """
    w = weights
    attention_norm, feed_forward_norm = (
        ResidualNorm(kernels, site_hashes, settings.dropout, settings.epsilon) for site_hashes in hashes_of_sums(hashes)
    )
    attended: Any
    boundaries = (rows.cu_seqlens, rows.cu_keys, rows.blocks, *rows.lists)
    if first_tokens is None:
        attended = _Attention.apply(
            states,
            attention_norm,
            settings.num_heads,
            boundaries,
            w.query,
            w.key,
            w.value,
            w.query_bias,
            w.key_bias,
            w.value_bias,
            w.attention_out,
            w.attention_out_bias,
            w.attention_gain,
            w.attention_shift,
        )
    else:
        mixed, first_states = first_token_attention(states, w, settings.num_heads, first_tokens, kernels.average, rows)
        attended = _LinearResidualNorm.apply(
            mixed.to(first_states.dtype),
            first_states,
            attention_norm,
            w.attention_out,
            w.attention_out_bias,
            w.attention_gain,
            w.attention_shift,
        )
    out: Any = _FeedForward.apply(
        attended,
        feed_forward_norm,
        w.up,
        w.up_bias,
        w.down,
        w.down_bias,
        w.feed_forward_gain,
        w.feed_forward_shift,
    )
    return out


class _LinearResidualNorm(torch.autograd.Function):
    """`norm(dropout(inner @ weight.T + bias) + states)`."""

    @staticmethod
    def forward(
        ctx: Any,
        inner: Tensor,
        states: Tensor,
        norm: ResidualNorm,
        weight: Tensor,
        bias: Tensor,
        gain: Tensor,
        shift: Tensor,
    ) -> Tensor:
        (half_weight,) = _converted([[weight]], inner.dtype)
        product = inner @ half_weight.t()
        ctx.norm, ctx.dtypes = norm, (weight.dtype, bias.dtype, gain.dtype, shift.dtype)
        ctx.save_for_backward(inner, states, product, half_weight, bias, gain)
        return norm.forward(product, bias, states, gain, shift)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        inner, states, product, half_weight, bias, gain = ctx.saved_tensors
        sums, grad_states, grad_product = ctx.norm.backward(grad_out, product, bias, states, gain)
        weight_dtype, *dtypes = ctx.dtypes
        grad_weight = weight_gradient(grad_product, inner, weight_dtype) if ctx.needs_input_grad[3] else None
        return grad_product @ half_weight, grad_states, None, grad_weight, *_split(sums, dtypes)


class _Attention(torch.autograd.Function):
    """Self-attention, the linear layer after it, the residual sum and the sum's norm."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, norm: ResidualNorm, num_heads: int, rows: tuple[Tensor, ...],
        wq: Tensor, wk: Tensor, wv: Tensor, bq: Tensor, bk: Tensor, bv: Tensor,
        wo: Tensor, bo: Tensor, gain: Tensor, shift: Tensor,
    ) -> Tensor:  # fmt: skip
        tokens, dim = states.shape
        half_qkv, bias_qkv, half_out = _converted([[wq, wk, wv], [bq, bk, bv], [wo]], states.dtype)
        qkv = torch.addmm(bias_qkv, states, half_qkv.t()).view(tokens, 3, num_heads, dim // num_heads)
        mixed, log_sums = norm.kernels.attend(qkv, *rows)
        product = mixed.view(tokens, dim) @ half_out.t()
        ctx.norm, ctx.rows = norm, rows
        ctx.dtypes = (wq.dtype, bq.dtype, wo.dtype, bo.dtype, gain.dtype, shift.dtype)
        ctx.save_for_backward(states, qkv, mixed, log_sums, product, half_qkv, half_out, bo, gain)
        return norm.forward(product, bo, states, gain, shift)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        states, qkv, mixed, log_sums, product, half_qkv, half_out, bias, gain = ctx.saved_tensors
        qkv_dtype, qkv_bias_dtype, out_dtype, *dtypes = ctx.dtypes
        sums, grad_states, grad_product = ctx.norm.backward(grad_out, product, bias, states, gain)
        inner = mixed.view_as(states)
        grad_wo = weight_gradient(grad_product, inner, out_dtype) if ctx.needs_input_grad[10] else None
        grad_qkv, grad_bias = ctx.norm.kernels.attend_backward(
            (grad_product @ half_out).view_as(mixed), qkv, mixed, log_sums, *ctx.rows
        )
        grad_qkv = grad_qkv.view(len(states), -1)
        grad_weights: Sequence[Tensor | None] = [None] * 3
        if any(ctx.needs_input_grad[4:7]):
            grad_weights = weight_gradient(grad_qkv, states, qkv_dtype).chunk(3)
        below = grad_states.addmm_(grad_qkv, half_qkv) if ctx.needs_input_grad[0] else None
        grad_biases = grad_bias.to(qkv_bias_dtype).chunk(3)
        return below, None, None, None, *grad_weights, *grad_biases, grad_wo, *_split(sums, dtypes)


class _FeedForward(torch.autograd.Function):
    """The feed-forward block, the residual sum and the sum's norm."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        norm: ResidualNorm,
        w1: Tensor,
        b1: Tensor,
        w2: Tensor,
        b2: Tensor,
        gain: Tensor,
        shift: Tensor,
    ) -> Tensor:
        half_up, half_down = _converted([[w1], [w2]], states.dtype)
        wide = states @ half_up.t()
        active = norm.kernels.bias_gelu(wide, b1)
        product = active @ half_down.t()
        ctx.norm, ctx.dtypes = norm, (w1.dtype, b1.dtype, w2.dtype, b2.dtype, gain.dtype, shift.dtype)
        ctx.save_for_backward(states, wide, active, product, half_up, half_down, b1, b2, gain)
        return norm.forward(product, b2, states, gain, shift)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        states, wide, active, product, half_up, half_down, b1, b2, gain = ctx.saved_tensors
        up_dtype, up_bias_dtype, down_dtype, *dtypes = ctx.dtypes
        sums, grad_states, grad_product = ctx.norm.backward(grad_out, product, b2, states, gain)
        grad_down = weight_gradient(grad_product, active, down_dtype) if ctx.needs_input_grad[4] else None
        grad_wide, grad_b1 = ctx.norm.kernels.bias_gelu_backward(grad_product @ half_down, wide, b1)
        grad_up = weight_gradient(grad_wide, states, up_dtype) if ctx.needs_input_grad[2] else None
        below = grad_states.addmm_(grad_wide, half_up) if ctx.needs_input_grad[0] else None
        return below, None, grad_up, grad_b1.to(up_bias_dtype), grad_down, *_split(sums, dtypes)


def _converted(groups: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    """Return the weights in a precision; those of a group are concatenated along their first axis."""
    sizes = [sum(weight.numel() for weight in group) for group in groups]
    flat = torch.empty(sum(sizes), dtype=dtype, device=groups[0][0].device)
    joined = [part.view(-1, *group[0].shape[1:]) for part, group in zip(flat.split(sizes), groups, strict=True)]
    parts = [
        part for one, group in zip(joined, groups, strict=True) for part in one.split([len(weight) for weight in group])
    ]
    torch._foreach_copy_(parts, [weight for group in groups for weight in group])
    return joined


def weight_gradient(grad_out: Tensor, inner: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight's gradient [out, in], summed over tokens in float32, in the weight's precision.

    Args:
        grad_out: Gradient of the linear layer's output, [tokens, out].
        inner: Input of the linear layer, [tokens, in].
        dtype: Precision of the weight.
    """
    if grad_out.is_cuda and dtype == torch.float32:
        return torch.mm(grad_out.t(), inner, out_dtype=dtype)
    return (grad_out.t() @ inner).to(dtype)


def _split(sums: Tensor, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Return the rows of `sums`, each converted to its dtype."""
    return [part.to(dtype) for part, dtype in zip(sums, dtypes, strict=True)]
