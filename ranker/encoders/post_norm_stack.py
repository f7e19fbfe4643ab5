"""Embeddings and layers of post-norm models such as BERT. `DistilBertStack` is a subclass for DistilBERT."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ranker.encoders.attention import PackedRows, PaddedRows
from ranker.encoders.embeddings import (
    SMALL_TABLE,
    EmbeddingInputs,
    fused_embedding,
    position_embedding,
    segment_embedding,
)
from ranker.encoders.family import first_position
from ranker.encoders.layer import LayerSettings, LayerWeights
from ranker.encoders.paths import LayerPath, choose_path
from ranker.encoders.stack import RaggedPass, left_out


class PostNormStack:
    """BERT's embeddings and layers; for the methods see `ranker.encoders.stack.Stack`."""

    dropouts_per_layer = 2  # before the residual sums of both blocks; 1: only of the feed-forward block

    def layers_of(self, model: Any) -> Sequence[Any]:
        """Return the layers."""
        return model.encoder.layer

    def attention_of(self, layer: Any) -> Any:
        """Return a layer's attention module, whose `dropout` is the rate of attention weights."""
        return layer.attention.self

    def activation_of(self, layer: Any) -> Callable[[Tensor], Tensor]:
        """Return the activation of the feed-forward blocks; all layers have the same activation."""
        return layer.intermediate.intermediate_act_fn

    def weights_of(self, layer: Any) -> LayerWeights:
        """Return a layer's weights."""
        return LayerWeights.of(layer)

    def settings_of(self, layer: Any) -> LayerSettings:
        """Return a layer's constants."""
        output = layer.output
        return LayerSettings(layer.attention.self.num_attention_heads, output.dropout.p, output.LayerNorm.eps)

    def embeddings_of(self, model: Any) -> Any:
        """Return the module with `word_embeddings`, `position_embeddings`, `token_type_embeddings` and `LayerNorm`."""
        return model.embeddings

    def rates(self, model: Any) -> tuple[float, ...]:
        """Return the dropout rate of the embeddings, and that of the layers; all layers have the same rate."""
        rate = _rate(model)
        return rate, self.settings_of(self.layers_of(model)[0]).dropout if rate else 0.0

    def attention_dropout(self, model: Any) -> float:
        """Return the dropout rate of the last layer's attention weights."""
        return _attention_rate(self.attention_of(self.layers_of(model)[-1]))

    def weights_per_layer(self, config: Any) -> int:
        """Return the number of weights in a layer's six matrices: queries, keys, values, output, two feed-forward."""
        return 4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size

    def states(self, model: Any, run: RaggedPass) -> Iterator[Tensor]:
        """Yield the states after the embeddings and after each layer."""
        layout, layers = run.layout, self.layers_of(model)
        if getattr(model.config, "type_vocab_size", 0) <= 1:
            layout = replace(layout, batch=replace(layout.batch, segments=torch.zeros_like(layout.batch.segments)))
        path = choose_path(
            model,
            self.activation_of(layers[0]),
            run.execution,
            layout.batch.max_length,
            run.device,
            run.log,
            layout.batch.lists is not None,
        )
        packed = path.packed_rows(layout) if run.unpadded else None
        hashes = run.hashes(1 + self.dropouts_per_layer * len(layers)) if _rate(model) else None
        if run.begin is None:
            states = self._embedded(model, replace(run, layout=layout), path, None if hashes is None else hashes[0])
        else:  # the states of padding tokens are 0
            states = pad(run.begin.states, (0, 0, 0, layout.batch.num_tokens - len(run.begin.states)))
            states = states.to(run.state_dtype(states))
        yield states
        final = max((number for number in range(len(layers)) if number not in run.skipped), default=-1)
        for number, layer in enumerate(layers):
            if run.begin is not None and number < run.begin.layer:
                continue
            if number in run.skipped:
                states = left_out(layer, states)
                yield states
                continue
            sites = slice(1 + self.dropouts_per_layer * number, 1 + self.dropouts_per_layer * (number + 1))
            layer_hashes = None if hashes is None else hashes[sites]
            selected = run.selected(number == final)
            if layer_hashes is not None and selected is not None:
                layer_hashes = layer_hashes.index_select(1, selected)
            rate = _attention_rate(self.attention_of(layer))
            rows: PackedRows | PaddedRows = PaddedRows(layout, rate) if packed is None else packed
            weights, settings = self.weights_of(layer), self.settings_of(layer)
            states = run.run(path.run_layer, states, weights, settings, path.functions, rows, layer_hashes, selected)
            yield states

    def _embedded(self, model: Any, run: RaggedPass, path: LayerPath, hashes: Tensor | None) -> Tensor:
        """Return the states before the first layer, [tokens, dim]; without padding, in the dtype of the layers."""
        embeddings, layout = self.embeddings_of(model), run.layout
        offset, rate = first_position(model.config), _rate(model)
        words, segments = embeddings.word_embeddings, embeddings.token_type_embeddings
        dtype = run.state_dtype(words.weight)
        if path.uses_kernels and run.ids_in_table and segments.num_embeddings <= SMALL_TABLE:
            states = fused_embedding(
                embeddings, EmbeddingInputs(layout, layout.batch.segments, offset, hashes, rate, dtype)
            )
        else:
            states = words(layout.batch.tokens) + position_embedding(embeddings.position_embeddings, layout, offset)
            states = embeddings.LayerNorm(states + segment_embedding(segments, layout.batch.segments))
            if hashes is not None:
                states = path.dropout(states, hashes, rate)
        if hasattr(model, "embeddings_project"):  # ELECTRA
            states = model.embeddings_project(states)
        return states.to(dtype) if path.unpadded else states


def _rate(model: Any) -> float:
    dropout = model.embeddings.dropout
    return dropout.p if dropout.training else 0.0


def _attention_rate(attention: Any) -> float:
    return attention.dropout.p if attention.training else 0.0
