"""One transformer layer through our kernels, with its backward pass written out.

Half precision on CUDA takes it. Unlike autograd or compiled code over the same kernels the backward pass adds a product
in place to the gradient that the residual sum hands down, where both would copy that first, and makes the weights'
gradients in the weights' precision. Nothing is compiled but the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ranker.encoders.fused import first_states, kernel_average

try:
    from ranker.encoders.kernels import bias_gelu, residual_norm, short_attention
except ImportError:  # no Triton
    bias_gelu = residual_norm = short_attention = None  # type: ignore[assignment]


class Kernels(NamedTuple):
    """What a layer runs through: functions without autograd, each with the one that gives its gradients, but for the last.

    Args:
        attend: See `ranker.encoders.kernels.short_attention.attend`.
        attend_backward: See `attend_backward` there.
        widen: See `ranker.encoders.kernels.bias_gelu.bias_gelu`.
        widen_backward: See `bias_gelu_backward` there.
        join: See `ranker.encoders.kernels.residual_norm.residual_norm`.
        join_backward: See `residual_norm_backward` there.
        average: Attention of first tokens, with its gradients, see `ranker.encoders.fused.kernel_average`.
    """

    attend: Callable[..., tuple[Tensor, Tensor]]
    attend_backward: Callable[..., tuple[Tensor, Tensor]]
    widen: Callable[..., Tensor]
    widen_backward: Callable[..., tuple[Tensor, Tensor]]
    join: Callable[..., Tensor]
    join_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    average: Callable[..., Tensor]


def triton_kernels() -> Kernels:
    """Our own."""
    return Kernels(
        short_attention.attend,
        short_attention.attend_backward,
        bias_gelu.bias_gelu,
        bias_gelu.bias_gelu_backward,
        residual_norm.residual_norm,
        residual_norm.residual_norm_backward,
        kernel_average,
    )


class Join(NamedTuple):
    """What ends both halves of a layer: `norm(dropout(product + bias) + states)`.

    Args:
        kernels: What it runs through.
        hashes: What is dropped by, int32 [tokens] (`dropout_hashes`); None where nothing is dropped.
        rate: Of dropout.
        epsilon: Of the norm.
    """

    kernels: Kernels
    hashes: Tensor | None
    rate: float
    epsilon: float

    def of(self, product: Tensor, bias: Tensor, states: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        """The joined states."""
        return self.kernels.join(product, bias, states, self.hashes, self.rate, gain, shift, self.epsilon)

    def gradients(
        self, above: Tensor, product: Tensor, bias: Tensor, states: Tensor, gain: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """By bias, gain and shift, [3, dim]; by the states; by the product, which may be the same tensor."""
        return self.kernels.join_backward(above, product, bias, states, self.hashes, self.rate, gain, self.epsilon)


def kernel_layer(
    states: Tensor,
    weights: tuple[Tensor, ...],
    heads: int,
    drop: float,
    hashes: Tensor | None,
    epsilon: float,
    firsts: Tensor | None,
    kernels: Kernels,
    places: tuple[Any, ...],
) -> Tensor:
    """`post_norm_layer` through kernels.

    Args:
        states: bf16 or fp16 [tokens, dim].
        weights: See `ranker.encoders.fused.layer_weights`.
        heads: Attention heads.
        drop: Dropout before both residual sums.
        hashes: What both drop by, int32 [2, tokens that leave]; None where nothing is dropped.
        epsilon: Of the layer norms.
        firsts: Places of the rows' first tokens, where only their states are wanted; None: all are.
        kernels: What it runs through.
        places: (cu_seqlens, cu_keys, keys or None, max_length, blocks), see
            `ranker.encoders.attention.library_attention`.

    Returns:
        [tokens that leave, dim]
    """
    wq, bq, wk, bk, wv, bv, wo, bo, w1, b1, w2, b2, gain1, shift1, gain2, shift2 = weights
    early, late = (Join(kernels, None if hashes is None else hashes[place], drop, epsilon) for place in range(2))
    found: Any
    if firsts is None:
        cu_seqlens, cu_keys, _, _, blocks = places
        found = _Attention.apply(
            states, early, heads, (cu_seqlens, cu_keys, blocks), wq, wk, wv, bq, bk, bv, wo, bo, gain1, shift1
        )
    else:
        mixed, own = first_states(states, weights, heads, firsts, kernels.average, places)
        found = _Joined.apply(mixed.to(own.dtype), own, early, wo, bo, gain1, shift1)
    return _FeedForward.apply(found, late, w1, b1, w2, b2, gain2, shift2)  # type: ignore[no-any-return]


class _Joined(torch.autograd.Function):
    """`norm(dropout(inner @ weight.T + bias) + states)`."""

    @staticmethod
    def forward(
        ctx: Any, inner: Tensor, states: Tensor, end: Join, weight: Tensor, bias: Tensor, gain: Tensor, shift: Tensor
    ) -> Tensor:
        (own,) = _converted([[weight]], inner.dtype)
        product = inner @ own.t()
        ctx.end, ctx.types = end, (weight.dtype, bias.dtype, gain.dtype, shift.dtype)
        ctx.save_for_backward(inner, states, product, own, bias, gain)
        return end.of(product, bias, states, gain, shift)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Any, ...]:
        inner, states, product, own, bias, gain = ctx.saved_tensors
        sums, down, grad = ctx.end.gradients(above, product, bias, states, gain)
        weight_type, *types = ctx.types
        own_grad = _product(grad, inner, weight_type) if ctx.needs_input_grad[3] else None
        return grad @ own, down, None, own_grad, *_split(sums, types)


class _Attention(torch.autograd.Function):
    """Self-attention, the linear layer after it, and what joins it to the states it came from."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, end: Join, heads: int, places: tuple[Tensor, ...], wq: Tensor, wk: Tensor, wv: Tensor, bq: Tensor, bk: Tensor,
        bv: Tensor, wo: Tensor, bo: Tensor, gain: Tensor, shift: Tensor,
    ) -> Tensor:  # fmt: skip
        tokens, dim = states.shape
        packed, bias, own = _converted([[wq, wk, wv], [bq, bk, bv], [wo]], states.dtype)
        qkv = torch.addmm(bias, states, packed.t()).view(tokens, 3, heads, dim // heads)
        mixed, logs = end.kernels.attend(qkv, *places)
        product = mixed.view(tokens, dim) @ own.t()
        ctx.end, ctx.places, ctx.types = end, places, (wq.dtype, bq.dtype, wo.dtype, bo.dtype, gain.dtype, shift.dtype)
        ctx.save_for_backward(states, qkv, mixed, logs, product, packed, own, bo, gain)
        return end.of(product, bo, states, gain, shift)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Any, ...]:
        states, qkv, mixed, logs, product, packed, own, bias, gain = ctx.saved_tensors
        packed_type, packed_bias_type, own_type, *types = ctx.types
        sums, down, grad = ctx.end.gradients(above, product, bias, states, gain)
        inner = mixed.view_as(states)
        own_grad = _product(grad, inner, own_type) if ctx.needs_input_grad[10] else None
        through, packed_bias = ctx.end.kernels.attend_backward(
            (grad @ own).view_as(mixed), qkv, mixed, logs, *ctx.places
        )
        through = through.view(len(states), -1)
        split: Sequence[Tensor | None] = [None] * 3
        if any(ctx.needs_input_grad[4:7]):
            split = _product(through, states, packed_type).chunk(3)
        below = down.addmm_(through, packed) if ctx.needs_input_grad[0] else None
        return (
            below,
            None,
            None,
            None,
            *split,
            *packed_bias.to(packed_bias_type).chunk(3),
            own_grad,
            *_split(sums, types),
        )


class _FeedForward(torch.autograd.Function):
    """The feed-forward part, and what joins it to the states it came from."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, end: Join, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, gain: Tensor, shift: Tensor
    ) -> Tensor:  # fmt: skip
        first, second = _converted([[w1], [w2]], states.dtype)
        wide = states @ first.t()
        active = end.kernels.widen(wide, b1)
        product = active @ second.t()
        ctx.end, ctx.types = end, (w1.dtype, b1.dtype, w2.dtype, b2.dtype, gain.dtype, shift.dtype)
        ctx.save_for_backward(states, wide, active, product, first, second, b1, b2, gain)
        return end.of(product, b2, states, gain, shift)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Any, ...]:
        states, wide, active, product, first, second, b1, b2, gain = ctx.saved_tensors
        first_type, first_bias_type, second_type, *types = ctx.types
        sums, down, grad = ctx.end.gradients(above, product, b2, states, gain)
        second_grad = _product(grad, active, second_type) if ctx.needs_input_grad[4] else None
        through, first_bias = ctx.end.kernels.widen_backward(grad @ second, wide, b1)
        first_grad = _product(through, states, first_type) if ctx.needs_input_grad[2] else None
        below = down.addmm_(through, first) if ctx.needs_input_grad[0] else None
        return below, None, first_grad, first_bias.to(first_bias_type), second_grad, *_split(sums, types)


def _converted(groups: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    """The weights in this precision, those of a group joined along their first axis."""
    sizes = [sum(weight.numel() for weight in group) for group in groups]
    flat = torch.empty(sum(sizes), dtype=dtype, device=groups[0][0].device)
    joined = [part.view(-1, *group[0].shape[1:]) for part, group in zip(flat.split(sizes), groups, strict=True)]
    parts = [
        part for one, group in zip(joined, groups, strict=True) for part in one.split([len(weight) for weight in group])
    ]
    torch._foreach_copy_(parts, [weight for group in groups for weight in group])
    return joined


def _product(above: Tensor, inner: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight's gradient, summed over tokens in float32 and given in the weight's precision; [tokens, out] and [tokens, in] to [out, in]."""
    if above.is_cuda and dtype == torch.float32:
        return torch.mm(above.t(), inner, out_dtype=dtype)
    return (above.t() @ inner).to(dtype)


def _split(sums: Tensor, types: Sequence[torch.dtype]) -> list[Tensor]:
    return [part.to(dtype) for part, dtype in zip(sums, types, strict=True)]
