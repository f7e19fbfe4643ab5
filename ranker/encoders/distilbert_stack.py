"""DistilBERT's embeddings and layers: like BERT's, but without segments and without dropout after attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ranker.encoders.layer import LayerSettings, LayerWeights
from ranker.encoders.post_norm_stack import PostNormStack


class DistilBertStack(PostNormStack):
    """DistilBERT's embeddings and layers; for the methods see `ranker.encoders.stack.Stack`."""

    dropouts_per_layer = 1

    def layers_of(self, model: Any) -> Sequence[Any]:
        """Return the layers."""
        return model.transformer.layer

    def attention_of(self, layer: Any) -> Any:
        """Return a layer's attention."""
        return layer.attention

    def activation_of(self, layer: Any) -> Callable[[Tensor], Tensor]:
        """Return the activation of a layer's feed-forward block."""
        return layer.ffn.activation

    def weights_of(self, layer: Any) -> LayerWeights:
        """Return a layer's weights."""
        attention, block = layer.attention, layer.ffn
        linear = (attention.q_lin, attention.k_lin, attention.v_lin, attention.out_lin, block.lin1, block.lin2)
        norms = (layer.sa_layer_norm, layer.output_layer_norm)
        return LayerWeights(*(weight for module in (*linear, *norms) for weight in (module.weight, module.bias)))

    def settings_of(self, layer: Any) -> LayerSettings:
        """Return a layer's constants."""
        norm = layer.output_layer_norm
        return LayerSettings(layer.attention.n_heads, layer.ffn.dropout.p, norm.eps)

    def embeddings_of(self, model: Any) -> Any:
        """Return the embeddings with a segment table of zeros added, since DistilBERT has no segments."""
        embeddings = model.embeddings
        words = embeddings.word_embeddings.weight
        segments = nn.Embedding.from_pretrained(torch.zeros_like(words[:1]))  # frozen
        return SimpleNamespace(
            word_embeddings=embeddings.word_embeddings,
            position_embeddings=embeddings.position_embeddings,
            token_type_embeddings=segments,
            LayerNorm=embeddings.LayerNorm,
        )

    def weights_per_layer(self, config: Any) -> int:
        """Return the number of weights in a layer's six matrices: queries, keys, values, output, two feed-forward."""
        return 4 * config.dim**2 + 2 * config.dim * config.hidden_dim
