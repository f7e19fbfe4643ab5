"""One post-norm transformer layer over ragged tokens: the readable reference with which `kernel_layer` must agree.

The layer is a function of its weights, so that one compiled function runs all layers (`compiled_layer`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from ranker.encoders.attention import PackedRows, PaddedRows
from ranker.encoders.dropout import hashed_dropout

try:
    from ranker.encoders.kernels import first_attention as first
except ImportError:  # no Triton
    first = None  # type: ignore[assignment]


class LayerWeights(NamedTuple):
    """Weights of a post-norm layer: matrices [out, in] and biases [out]; gains and shifts of the norms [dim]."""

    query: Tensor
    query_bias: Tensor
    key: Tensor
    key_bias: Tensor
    value: Tensor
    value_bias: Tensor
    attention_out: Tensor
    attention_out_bias: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor
    attention_gain: Tensor
    attention_shift: Tensor
    feed_forward_gain: Tensor
    feed_forward_shift: Tensor

    @classmethod
    def of(cls, layer: Any) -> LayerWeights:
        """Return the weights of a transformers layer with BERT's module names."""
        attention, output = layer.attention.self, layer.attention.output
        modules = (
            attention.query,
            attention.key,
            attention.value,
            output.dense,
            layer.intermediate.dense,
            layer.output.dense,
            output.LayerNorm,
            layer.output.LayerNorm,
        )
        return cls(*(weight for module in modules for weight in (module.weight, module.bias)))


class LayerSettings(NamedTuple):
    """Constants of a layer.

    Args:
        num_heads: Attention heads.
        dropout: Probability of dropout before the residual sums.
        epsilon: Number that both layer norms add to the variance.
    """

    num_heads: int
    dropout: float
    epsilon: float


class LayerFunctions(NamedTuple):
    """The operations that `post_norm_layer` calls.

    Args:
        attend: Attention of all tokens, see `linear_attention`.
        average: Average of each row's states by the attention weights of one query per row and head; see
            `padded_average`.
        linear_activation: First half of the feed-forward block, see `linear_activation`.
        linear_residual_norm: End of both blocks, see `linear_residual_norm`.
    """

    attend: Callable[..., Tensor]
    average: Callable[..., Tensor]
    linear_activation: Callable[..., Tensor]
    linear_residual_norm: Callable[..., Tensor]


class Dropout(NamedTuple):
    """Dropout at one site, a place in the model that has dropout.

    Args:
        hashes: One row of `dropout_hashes`, int32 [tokens]; None: no dropout.
        rate: Probability of dropping a value.
    """

    hashes: Tensor | None
    rate: float


class Norm(NamedTuple):
    """Parameters of a layer norm: gain and shift [dim], and the epsilon added to the variance."""

    gain: Tensor
    shift: Tensor
    epsilon: float


def post_norm_layer(
    states: Tensor,
    weights: LayerWeights,
    settings: LayerSettings,
    functions: LayerFunctions,
    rows: PackedRows | PaddedRows,
    hashes: Tensor | None,
    first_tokens: Tensor | None,
) -> Tensor:
    """Run one post-norm transformer layer (Devlin et al., 2019).

    Args:
        states: [tokens, dim].
        weights: Weights of the layer.
        settings: Constants of the layer.
        functions: The operations; their `attend` and `average` determine the type of `rows`.
        rows: Row boundaries for attention.
        hashes: Dropout hashes of the residual sums (`hashes_of_sums`), int32 [2 or 1, output tokens]; None: no dropout.
        first_tokens: Index of each row's first token, int32 [rows]; only these get an output, and they attend to all
            tokens. None: all tokens get an output.

    Returns:
        [output tokens, dim]. The output tokens are all tokens, or with `first_tokens` one token per row.
    """
    w = weights
    if first_tokens is None or rows.has_lists:
        weight, bias = torch.cat([w.query, w.key, w.value]), torch.cat([w.query_bias, w.key_bias, w.value_bias])
        mixed = functions.attend(states, weight, bias, settings.num_heads, rows)
        if first_tokens is not None:
            mixed, states = mixed.index_select(0, first_tokens), states.index_select(0, first_tokens)
    else:
        mixed, states = first_token_attention(states, w, settings.num_heads, first_tokens, functions.average, rows)
    attention_hashes, feed_forward_hashes = hashes_of_sums(hashes)
    dropout = Dropout(attention_hashes, settings.dropout)
    norm = Norm(w.attention_gain, w.attention_shift, settings.epsilon)
    states = functions.linear_residual_norm(mixed, w.attention_out, w.attention_out_bias, states, dropout, norm)
    wide = functions.linear_activation(states, w.up, w.up_bias)
    dropout = Dropout(feed_forward_hashes, settings.dropout)
    norm = Norm(w.feed_forward_gain, w.feed_forward_shift, settings.epsilon)
    return functions.linear_residual_norm(wide, w.down, w.down_bias, states, dropout, norm)


def hashes_of_sums(hashes: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the dropout hashes of a layer's two residual sums, int32 [tokens] each; None: no dropout at this sum.

    Args:
        hashes: Hashes of both sums, int32 [2, tokens] (`dropout_hashes`), or of the second sum alone, int32 [1,
            tokens], as in DistilBERT; None: no dropout.
    """
    if hashes is None:
        return None, None
    return (None, hashes[0]) if len(hashes) == 1 else (hashes[0], hashes[1])


def first_token_attention(
    states: Tensor,
    weights: LayerWeights,
    num_heads: int,
    first_tokens: Tensor,
    average: Callable[..., Tensor],
    rows: PackedRows | PaddedRows,
) -> tuple[Tensor, Tensor]:
    """Return the attention output of each row's first token, and the state of this token, both [rows, dim].

    A logit q . (W_k x) equals (W_k^T q) . x. An attention-weighted mean of W_v x equals W_v times the mean of x. So
    weights multiply only vectors of first tokens. The key bias adds the same constant to all logits of a row and head,
    so softmax cancels it, and its gradient is 0. It is added with a factor of 0, because DDP expects a gradient for
    every parameter.

    Args:
        states: [tokens, dim].
        weights: Weights of the layer.
        num_heads: Attention heads.
        first_tokens: Index of each row's first token, int32 [rows].
        average: See `padded_average`.
        rows: Row boundaries, an argument of `average`.
    """
    w = weights
    first_states = states.index_select(0, first_tokens)
    queries = linear(first_states, w.query, w.query_bias).unflatten(1, (num_heads, -1))
    whole, size = states.shape[1] // num_heads, queries.shape[2]
    if whole != size:  # heads were removed, but `average` takes dim / heads as the size of a head
        queries = queries * (whole / size) ** 0.5
    queries = torch.einsum("rhe,hed->rhd", queries, w.key.unflatten(0, (num_heads, -1)))
    means = average(states, queries, rows)
    mixed = torch.einsum("rhd,hed->rhe", means, w.value.unflatten(0, (num_heads, -1))).flatten(1)
    return mixed + (w.value_bias + 0.0 * w.key_bias), first_states


@cache  # equal arguments return the same function object, so that compiled layers are reused
def linear_attention(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function (states [tokens, dim], weight, bias, num_heads, rows) -> [tokens, dim].

    The function computes queries, keys and values with one linear layer, [tokens, 3, heads, head size], and applies
    `attention` to them.
    """
    return lambda states, weight, bias, num_heads, rows: attention(
        linear(states, weight, bias).unflatten(1, (3, num_heads, -1)), rows
    ).flatten(1)


@cache
def linear_activation(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return a function (states [tokens, dim], weight, bias) -> [tokens, out]: a linear layer, then `activation`."""
    return lambda states, weight, bias: activation(linear(states, weight, bias))


def linear_residual_norm(
    inner: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, dropout: Dropout, norm: Norm
) -> Tensor:
    """Return `layer_norm(dropout(linear(inner)) + residual)`, [tokens, dim], in the linear layer's precision.

    Args:
        inner: [tokens, in].
        weight: [dim, in].
        bias: [dim].
        residual: [tokens, dim].
        dropout: Applied to the linear layer's output.
        norm: The layer norm.
    """
    product = linear(inner, weight, bias)
    dropped = product if dropout.hashes is None else hashed_dropout(product, dropout.hashes, dropout.rate)
    normed = layer_norm(dropped + residual, residual.shape[-1:], norm.gain, norm.shift, norm.epsilon)
    return normed.to(product.dtype)  # under autocast, norms return float32


def kernel_average(states: Tensor, queries: Tensor, rows: PackedRows) -> Tensor:
    """Compute what `padded_average` computes, but without padding, with a kernel of this package."""
    return first.first_attention(states, queries, rows.cu_seqlens, rows.cu_keys, rows.blocks)[0].to(states.dtype)
