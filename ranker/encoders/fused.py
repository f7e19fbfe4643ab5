"""One transformer layer over flat tokens, as a function of its weights, so that one compiled function serves all layers.

Compiling a layer and not the whole encoder takes a twelfth of the time, leaves the state dict's keys alone, and lets
DDP send a layer's gradients while the layers below still run backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from ranker.encoders.attention import triton_missing
from ranker.encoders.dropout import hashed_dropout

try:
    from ranker.encoders.kernels import first_attention as first
except ImportError:  # no Triton
    first = None  # type: ignore[assignment]


def layer_weights(layer: Any) -> tuple[Tensor, ...]:
    """The weights of a BERT layer, in the order in which `post_norm_layer` takes them."""
    attention, output = layer.attention.self, layer.attention.output
    linears = (
        attention.query,
        attention.key,
        attention.value,
        output.dense,
        layer.intermediate.dense,
        layer.output.dense,
    )
    parts = (*linears, output.LayerNorm, layer.output.LayerNorm)
    return tuple(weight for part in parts for weight in (part.weight, part.bias))


class Parts(NamedTuple):
    """The functions that a layer is made of: the plain ones, or kernels.

    Args:
        attend: Attention of all tokens, as `plain_attend`.
        average: Means of each row's states by one query a row and head, as `padded_average`.
        widen: First half of the feed-forward part, as `plain_widen`.
        join: Linear layer, dropout, residual sum and norm, as `plain_join`.
    """

    attend: Callable[..., Tensor]
    average: Callable[..., Tensor]
    widen: Callable[..., Tensor]
    join: Callable[..., Tensor]


def post_norm_layer(
    states: Tensor,
    weights: tuple[Tensor, ...],
    heads: int,
    drop: float,
    hashes: Tensor | None,
    epsilon: float,
    firsts: Tensor | None,
    parts: Parts,
    places: tuple[Any, ...],
) -> Tensor:
    """One post-norm transformer layer (Devlin et al., 2019).

    Args:
        states: [tokens, dim].
        weights: See `layer_weights`.
        heads: Attention heads.
        drop: Dropout before both residual sums.
        hashes: What both drop by, int32 [2, tokens that leave] (`dropout_hashes`); None where nothing is dropped.
        epsilon: Of the layer norms.
        firsts: Places of the rows' first tokens, int32, where only their states are wanted; they still attend to all.
            None: all are wanted.
        parts: What the layer is made of.
        places: What `parts.attend` and `parts.average` have to know about the rows.

    Returns:
        [tokens that leave, dim]
    """
    wq, bq, wk, bk, wv, bv, wo, bo, w1, b1, w2, b2, gain1, shift1, gain2, shift2 = weights
    if firsts is None:
        mixed = parts.attend(states, torch.cat([wq, wk, wv]), torch.cat([bq, bk, bv]), heads, *places)
    else:
        mixed, states = first_states(states, weights, heads, firsts, parts.average, places)
    early, late = (None, None) if hashes is None else hashes.unbind(0)
    states = parts.join(mixed, wo, bo, states, early, drop, gain1, shift1, epsilon)
    return parts.join(parts.widen(states, w1, b1), w2, b2, states, late, drop, gain2, shift2, epsilon)


def first_states(
    states: Tensor,
    weights: tuple[Tensor, ...],
    heads: int,
    firsts: Tensor,
    average: Callable[..., Tensor],
    places: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    """What first tokens attend to, and their own states, both [rows, dim]; arguments as those of `post_norm_layer` and `Parts`.

    A logit q . (W_k x) is (W_k^T q) . x and a mean of W_v x is W_v times a mean of x, so no token but the first ones
    goes through weights. The keys' bias adds the same to all logits of a row, and has a gradient of 0 (DDP wants one).
    """
    wq, bq, wk, bk, wv, bv, *_ = weights
    own = states.index_select(0, firsts)
    reach = torch.einsum("rhe,hed->rhd", linear(own, wq, bq).unflatten(1, (heads, -1)), wk.unflatten(0, (heads, -1)))
    means = average(states, reach, *places)
    return torch.einsum("rhd,hed->rhe", means, wv.unflatten(0, (heads, -1))).flatten(1) + (bv + 0.0 * bk), own


@cache  # one function for each argument, so that compiled layers know it again
def plain_attend(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Queries, keys and values by one linear layer, [tokens, 3, heads, head size], and `attention` of them; [tokens, dim]."""
    return lambda states, weight, bias, heads, *places: attention(
        linear(states, weight, bias).unflatten(1, (3, heads, -1)), *places
    ).flatten(1)


@cache
def plain_widen(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The linear layer and then `activation`."""
    return lambda states, weight, bias: activation(linear(states, weight, bias))


def plain_join(
    inner: Tensor, weight: Tensor, bias: Tensor, states: Tensor, hashes: Tensor | None, drop: float, gain: Tensor, shift: Tensor, epsilon: float
) -> Tensor:  # fmt: skip
    """Return `layer_norm(dropout(linear(inner)) + states)`, in the linear layer's precision."""
    joined = linear(inner, weight, bias)
    dropped = joined if hashes is None else hashed_dropout(joined, hashes, drop)
    return layer_norm(dropped + states, states.shape[-1:], gain, shift, epsilon).to(
        joined.dtype
    )  # autocast makes norms float32


def kernel_average(
    states: Tensor, reach: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, keys: Tensor | None, max_length: int, blocks: Tensor  # noqa: ARG001
) -> Tensor:  # fmt: skip
    """`padded_average` without padding; `places` are those of `compiled_layer`."""
    return first.first_attention(states, reach, cu_seqlens, cu_keys, blocks)[0].to(states.dtype)


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    config: Any = torch._dynamo.config  # type: ignore[attr-defined]
    # without this, torch would cut the function at DDP's buckets, of which a layer fills no more than one
    config.optimize_ddp = False
    # a rate of dropout or an epsilon is a constant: as a variable it would take dropout out of the fused kernels
    config.specialize_float = True
    config.recompile_limit = (
        64  # one function serves all encoders of a process, in training and evaluation; past it torch runs eagerly
    )
    return torch.compile(function)


def compiled_layer(
    states: Tensor, weights: tuple[Tensor, ...], heads: int, drop: float, hashes: Tensor | None, epsilon: float, firsts: Tensor | None, *rest: Any
) -> Tensor:  # fmt: skip
    """`post_norm_layer`, compiled for any number of tokens and rows; `places` are (cu_seqlens, cu_keys, keys or None, max_length, blocks)."""
    cu_seqlens, cu_keys, keys, _, blocks = rest[-1]
    _mark_dynamic((states, 0), (cu_seqlens, 0), (cu_keys, 0), (keys, 0), (blocks, 0), (hashes, 1), (firsts, 0))
    return _compiled(post_norm_layer)(states, weights, heads, drop, hashes, epsilon, firsts, *rest)


def compiled_dropout(states: Tensor, hashes: Tensor, rate: float) -> Tensor:
    """`hashed_dropout`, compiled for any number of tokens: one kernel and not a dozen."""
    _mark_dynamic((states, 0), (hashes, 0))
    return _compiled(hashed_dropout)(states, hashes, rate)


def _mark_dynamic(*varying: tuple[Tensor | None, int]) -> None:
    """Say along which axis each tensor's size changes from batch to batch."""
    for tensor, axis in varying:
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, axis)  # type: ignore[attr-defined]


def compile_missing(device: torch.device) -> str:
    """Why layers can't be compiled, in words; empty when they can."""
    if device.type != "cuda":
        return f"the device is {device.type}, not cuda"
    return triton_missing()
