"""Embeddings and layers of models with BERT's modules."""

from __future__ import annotations

from collections.abc import Iterator
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
    """See `ranker.encoders.stack.Stack`."""

    def rates(self, model: Any) -> tuple[float, ...]:
        """Return the rates of the embeddings and of the layers, whose mode and rate are those of the whole model."""
        return _rate(model), model.encoder.layer[0].output.dropout.p if _rate(model) else 0.0

    def attention_dropout(self, model: Any) -> float:
        """Return the last layer's rate on attention weights."""
        attention = model.encoder.layer[-1].attention.self
        return attention.dropout.p if attention.training else 0.0

    def weights_per_layer(self, config: Any) -> int:
        """Return the weights of queries, keys, values, output and both feed-forward products."""
        return 4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size

    def states(self, model: Any, run: RaggedPass) -> Iterator[Tensor]:
        """Yield the states after the embeddings and after each layer."""
        layout = run.layout
        if getattr(model.config, "type_vocab_size", 0) <= 1:
            layout = replace(layout, batch=replace(layout.batch, segments=torch.zeros_like(layout.batch.segments)))
        path = choose_path(model, run.execution, layout.batch.max_length, run.device, run.log)
        packed = path.packed_rows(layout) if run.unpadded else None
        hashes = run.hashes(1 + 2 * model.config.num_hidden_layers) if _rate(model) else None
        if run.begin is None:
            states = _embedded(model, replace(run, layout=layout), path, None if hashes is None else hashes[0])
        else:  # states of padding tokens are 0
            states = pad(run.begin.states, (0, 0, 0, layout.batch.num_tokens - len(run.begin.states)))
            states = states.to(run.state_dtype(states))
        yield states
        layers = model.encoder.layer
        final = max((number for number in range(len(layers)) if number not in run.skipped), default=-1)
        for number, layer in enumerate(layers):
            if run.begin is not None and number < run.begin.layer:
                continue
            if number in run.skipped:
                states = left_out(layer, states)
                yield states
                continue
            layer_hashes = None if hashes is None else hashes[2 * number + 1 : 2 * number + 3]
            selected = run.selected(number == final)
            if layer_hashes is not None and selected is not None:
                layer_hashes = layer_hashes.index_select(1, selected)
            attention = layer.attention.self
            attention_dropout = attention.dropout.p if attention.training else 0.0
            rows: PackedRows | PaddedRows = PaddedRows(layout, attention_dropout) if packed is None else packed
            settings = LayerSettings(attention.num_attention_heads, layer.output.dropout.p, layer.output.LayerNorm.eps)
            states = run.run(
                path.run_layer, states, LayerWeights.of(layer), settings, path.functions, rows, layer_hashes, selected
            )
            yield states


def _embedded(model: Any, run: RaggedPass, path: LayerPath, hashes: Tensor | None) -> Tensor:
    """Return the states before the first layer, [tokens, dim]; without padding in the precision of the layers."""
    embeddings, layout = model.embeddings, run.layout
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
