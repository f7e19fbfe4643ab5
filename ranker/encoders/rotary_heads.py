"""Normalise and rotate the heads of queries and keys as one operation for torch.compile (`kernels.rotary_heads`).

The operation reads the output of the linear layer of queries, keys and values in place. Its backward pass writes the
gradient of that whole output, so that torch neither splits it nor joins its parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

try:  # Triton comes with torch's CUDA builds
    from ranker.encoders.kernels import rotary_heads as kernels
except ImportError:
    kernels = None  # type: ignore[assignment]


class HeadNorms(NamedTuple):
    """RMSNorm of the heads of queries and keys.

    Args:
        query: Gain of the norm of queries, [dim].
        key: Gain of the norm of keys, [dim]; None if there are no keys.
        epsilon: Epsilon of both norms.
    """

    query: Tensor
    key: Tensor | None
    epsilon: float


@custom_op("ranker::rotate_heads", mutates_args=())
def rotate_heads(
    x: Tensor, query_gain: Tensor | None, key_gain: Tensor | None, cos: Tensor, sin: Tensor, heads: list[int],
    epsilon: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return queries [tokens, heads, dim] and keys [tokens, key heads, dim], normalised and rotated.

    Args:
        x: Queries, keys and values, [tokens, all heads * dim].
        query_gain: Gain of the norm of queries, [dim]; None: no norm.
        key_gain: Gain of the norm of keys, [dim]; None: no norm, or no keys.
        cos: Cosines of each token's angles, [tokens, dim].
        sin: Sines of each token's angles, [tokens, dim].
        heads: Numbers of heads of queries and keys.
        epsilon: Epsilon of the norms.
    """
    gains = _gains(query_gain, key_gain)
    if kernels is not None and x.is_cuda:
        return kernels.rotate_heads(x, gains, cos, sin, kernels.Heads(heads[0], heads[1], 0), epsilon)
    results, first = [], 0
    for number, count in enumerate(heads):
        part = _wide(x[:, first : first + count * cos.shape[1]].unflatten(1, (count, cos.shape[1])))
        if gains is not None:
            part = part * _spread(part, epsilon) * gains[number]
        results.append((part * cos.unsqueeze(1) + _turned(part) * sin.unsqueeze(1)).to(x.dtype))
        first += count * cos.shape[1]
    return results[0], results[1]


@rotate_heads.register_fake
def _(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    cos, heads = others[2], others[4]
    tokens, dim = x.shape[0], cos.shape[1]
    return x.new_empty(tokens, heads[0], dim), x.new_empty(tokens, heads[1], dim)


@custom_op("ranker::rotate_heads_backward", mutates_args=())
def rotate_heads_backward(
    grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, x: Tensor | None, query_gain: Tensor | None,
    key_gain: Tensor | None, cos: Tensor, sin: Tensor, epsilon: float, sums: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradient of `x` [tokens, all heads * dim] and, with `sums`, those of both gains, [2, dim].

    Args:
        grad_query: Gradient of the queries, [tokens, heads, dim].
        grad_key: Gradient of the keys, [tokens, key heads, dim].
        grad_value: Gradient of the values, [tokens, value heads, dim].
        x: See `rotate_heads`; not read without norms.
        query_gain: See `rotate_heads`.
        key_gain: See `rotate_heads`.
        cos: See `rotate_heads`.
        sin: See `rotate_heads`.
        epsilon: See `rotate_heads`.
        sums: Whether to compute the gradients of the gains; else the second result is empty.
    """
    gains = _gains(query_gain, key_gain)
    if kernels is not None and grad_query.is_cuda:
        grads = (grad_query, grad_key, grad_value)
        grad, parts = kernels.rotate_heads_backward(grads, x, gains, cos, sin, epsilon, sums)
        return grad, grad.new_empty(0) if parts is None else parts
    results, sums_of_gains, first = [], [], 0
    for number, upstream in enumerate((grad_query, grad_key)):
        # the transpose of `_turned` is its negative
        above = _wide(upstream)
        above = above * cos.unsqueeze(1) - _turned(above * sin.unsqueeze(1))
        if x is not None and gains is not None:
            width = upstream.shape[1] * upstream.shape[2]
            part = _wide(x[:, first : first + width].view(upstream.shape))
            spread = _spread(part, epsilon)
            normed = part * spread
            sums_of_gains.append((above * normed).sum((0, 1)))
            above = above * gains[number]
            above = (above - normed * (above * normed).mean(-1, keepdim=True)) * spread
            first += width
        results.append(above.to(upstream.dtype).flatten(1))
    total = torch.stack(sums_of_gains) if sums else grad_query.new_empty(0)
    return torch.cat([*results, grad_value.flatten(1)], 1), total


@rotate_heads_backward.register_fake
def _(grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    cos, sums = others[3], others[6]
    tokens, dim = cos.shape
    width = (grad_query.shape[1] + grad_key.shape[1] + grad_value.shape[1]) * dim
    wide = torch.promote_types(grad_query.dtype, torch.float32)
    total = grad_query.new_empty(2, dim, dtype=wide) if sums else grad_query.new_empty(0)
    return grad_query.new_empty(tokens, width), total


def _gains(query: Tensor | None, key: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if query is None else (query, query if key is None else key)


def _wide(part: Tensor) -> Tensor:
    return part.to(torch.promote_types(part.dtype, torch.float32))


def _spread(part: Tensor, epsilon: float) -> Tensor:
    return torch.rsqrt(part.square().mean(-1, keepdim=True) + epsilon)


def _turned(part: Tensor) -> Tensor:
    """Return the second half of each head, negated, and then its first half."""
    low, high = part.chunk(2, -1)
    return torch.cat([-high, low], -1)


class _Rotary(torch.autograd.Function):
    """`rotate_heads` with its gradient. An operator's results can't be views of its arguments, and values are one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, query_gain: Tensor | None, key_gain: Tensor | None, cos: Tensor, sin: Tensor,
        heads: list[int], epsilon: float, sums: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        query, key = rotate_heads(x, query_gain, key_gain, cos, sin, heads, epsilon)
        ctx.save_for_backward(None if query_gain is None else x, query_gain, key_gain, cos, sin)
        ctx.epsilon, ctx.sums = epsilon, sums
        return query, key, x[:, sum(heads) * cos.shape[1] :].unflatten(1, (-1, cos.shape[1]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = grads
        saved = ctx.saved_tensors  # checkpointing allows one access only
        grad, sums = rotate_heads_backward(query, key, value, *saved, ctx.epsilon, ctx.sums)
        if not ctx.sums:
            return (grad, *[None] * 7)
        sums_of = (None if gain is None else sums[i].to(gain.dtype) for i, gain in enumerate(saved[1:3]))
        return grad, *sums_of, *[None] * 5


def rotary_heads(
    x: Tensor, norms: HeadNorms | None, cos: Tensor, sin: Tensor, heads: int, key_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, normalised and rotated, and values, each [tokens, own heads, dim].

    Let x be a head of a query or key. With norms, y = x / sqrt(mean(x ** 2) + epsilon) * gain; without norms, y = x.
    The head becomes y * cos + rotate_half(y) * sin, where rotate_half(y) is the second half of y, negated, followed by
    the first half. Sums are in float32, or in float64 for float64 inputs. Values are a view of `x`.

    Args:
        x: Queries, keys and values, [tokens, all heads * dim].
        norms: The norms; None: none.
        cos: Cosines of each token's angles, [tokens, dim].
        sin: Sines of each token's angles, [tokens, dim].
        heads: Number of heads of queries.
        key_heads: Number of heads of keys; the heads that follow are those of values.
    """
    query_gain, key_gain, epsilon = (None, None, 0.0) if norms is None else norms
    trained = any(gain is not None and gain.requires_grad for gain in (query_gain, key_gain))
    sums = torch.is_grad_enabled() and trained
    results: tuple[Tensor, Tensor, Tensor] = _Rotary.apply(
        x, query_gain, key_gain, cos, sin, [heads, key_heads], epsilon, sums
    )
    return results
