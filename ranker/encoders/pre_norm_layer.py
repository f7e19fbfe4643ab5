"""One pre-norm transformer layer with rotary positions over ragged tokens, as in ModernBERT.

This is the readable reference with which `pre_norm_kernels` must agree. ModernBERT is Warner et al., 2024
(arXiv:2412.13663). The layer is a function of its weights, so that one compiled function runs all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

from ranker.encoders.attention import PackedRows, PaddedRows, library_attention
from ranker.encoders.dropout import hashed_dropout
from ranker.encoders.layer import Dropout
from ranker.encoders.row_attention import row_attention

Activation = Callable[[Tensor], Tensor]


class PreNormWeights(NamedTuple):
    """Weights of a ModernBERT layer: matrices [out, in] and biases [out]; gains and shifts of the norms [dim].

    None: the layer does not have this weight. The first layer has no norm before attention.
    """

    attention_gain: Tensor | None
    attention_shift: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    attention_out: Tensor
    attention_out_bias: Tensor | None
    mlp_gain: Tensor
    mlp_shift: Tensor | None
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    @classmethod
    def of(cls, layer: Any) -> PreNormWeights:
        """Return the weights of a transformers layer with ModernBERT's module names."""
        first = layer.attn_norm if isinstance(layer.attn_norm, nn.LayerNorm) else None
        modules: Any = (first, layer.attn.Wqkv, layer.attn.Wo, layer.mlp_norm, layer.mlp.Wi, layer.mlp.Wo)
        weights: Any = (getattr(module, name, None) for module in modules for name in ("weight", "bias"))
        return cls(*weights)

    @property
    def has_biases(self) -> bool:
        """Whether a linear layer has a bias, or a norm has a shift."""
        return any(
            weight is not None
            for weight in (self.attention_shift, self.qkv_bias, self.attention_out_bias, self.mlp_shift, self.up_bias,
                           self.down_bias)
        )  # fmt: skip


class PreNormSettings(NamedTuple):
    """Constants of a layer.

    Args:
        num_heads: Attention heads.
        window: Largest distance between a token and a token that it attends to; None: no limit.
        attention_dropout: Probability of dropout before the first residual sum.
        mlp_dropout: Probability of dropout before the last linear layer.
        epsilon: Number that both norms add to the variance.
    """

    num_heads: int
    window: int | None
    attention_dropout: float
    mlp_dropout: float
    epsilon: float


class Rotary(NamedTuple):
    """Rotations of queries and keys (Su et al., 2021, arXiv:2104.09864).

    Args:
        cos: Cosines of the angles of each position, [positions, head size / 2].
        sin: Sines of the angles, [positions, head size / 2].
        position_ids: Position of each token in its row, int64 [tokens].
    """

    cos: Tensor
    sin: Tensor
    position_ids: Tensor


class PreNormFunctions(NamedTuple):
    """The operations that `pre_norm_layer` calls.

    Args:
        attend: Function that rotates queries and keys and computes attention: (queries, keys and values [tokens, 3,
            heads, head size], rows, rotary, window) -> [tokens, heads, head size].
        activation: Activation of the gated feed-forward block.
    """

    attend: Callable[..., Tensor]
    activation: Activation


def pre_norm_layer(
    states: Tensor,
    weights: PreNormWeights,
    settings: PreNormSettings,
    functions: PreNormFunctions,
    rows: PackedRows | PaddedRows,
    rotary: Rotary,
    hashes: tuple[Tensor | None, Tensor | None],
    first_tokens: Tensor | None,
) -> Tensor:
    """Run one layer: attention, then a feed-forward block with a gate (GeGLU; Shazeer, 2020, arXiv:2002.05202).

    Args:
        states: [tokens, dim].
        weights: Weights of the layer.
        settings: Constants of the layer.
        functions: The operations; their `attend` determines the type of `rows`.
        rows: Row boundaries for attention.
        rotary: Rotations of the layer, which differ between layers with and without a window.
        hashes: Dropout hashes after attention and within the feed-forward block, each int32 [output tokens] or None.
        first_tokens: Index of each row's first token, int32 [rows]; only these get an output. None: all do.

    Returns:
        [output tokens, dim]. The output tokens are all tokens, or with `first_tokens` one token per row.
    """
    w = weights
    normed = states if w.attention_gain is None else _norm(states, w.attention_gain, w.attention_shift, settings)
    qkv = linear(normed, w.qkv, w.qkv_bias).unflatten(1, (3, settings.num_heads, -1))
    mixed = functions.attend(qkv, rows, rotary, settings.window).flatten(1)
    if first_tokens is not None:
        mixed, states = mixed.index_select(0, first_tokens), states.index_select(0, first_tokens)
    attended = linear(mixed, w.attention_out, w.attention_out_bias)
    states = states + dropped(attended, Dropout(hashes[0], settings.attention_dropout))
    wide = linear(_norm(states, w.mlp_gain, w.mlp_shift, settings), w.up, w.up_bias)
    inner, gate = wide.chunk(2, -1)
    gated = dropped(functions.activation(inner) * gate, Dropout(hashes[1], settings.mlp_dropout))
    return states + linear(gated, w.down, w.down_bias)


def _norm(states: Tensor, gain: Tensor, shift: Tensor | None, settings: PreNormSettings) -> Tensor:
    return layer_norm(states, states.shape[-1:], gain, shift, settings.epsilon).to(states.dtype)


def dropped(values: Tensor, dropout: Dropout) -> Tensor:
    """Apply hashed dropout to [tokens, dim]."""
    return values if dropout.hashes is None else hashed_dropout(values, dropout.hashes, dropout.rate)


def rotated(qkv: Tensor, rotary: Rotary) -> Tensor:
    """Rotate queries and keys as transformers does: in float32, or in the cosines' precision if it is higher.

    Args:
        qkv: [tokens, 3, heads, head size].
        rotary: Rotations.
    """
    both, value = qkv[:, :2], qkv[:, 2:]
    cos, sin = (torch.cat([part, part], -1)[rotary.position_ids][:, None, None] for part in (rotary.cos, rotary.sin))
    one, other = both.float().chunk(2, -1)
    turned = both.float() * cos + torch.cat([-other, one], -1) * sin
    return torch.cat([turned.to(qkv.dtype), value], 1)


def rotary_row_attention(qkv: Tensor, rows: PaddedRows, rotary: Rotary, window: int | None) -> Tensor:
    """Rotate queries and keys, then compute `row_attention`."""
    return row_attention(rotated(qkv, rotary), rows, window)


def rotary_library_attention(qkv: Tensor, rows: PackedRows, rotary: Rotary, window: int | None) -> Tensor:
    """Rotate queries and keys, then compute `library_attention`."""
    return library_attention(rotated(qkv, rotary), rows, window)
