"""Embeddings and layers of models with ModernBERT's modules (Warner et al., 2024, arXiv:2412.13663)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ranker.encoders.attention import PackedRows, PaddedRows
from ranker.encoders.embeddings import fused_word_embedding
from ranker.encoders.passes import Output
from ranker.encoders.paths import LayerPath, choose_pre_norm_path
from ranker.encoders.pre_norm_kernels import Stream, final_norm
from ranker.encoders.pre_norm_layer import PreNormSettings, PreNormWeights, Rotary
from ranker.encoders.stack import RaggedPass, left_out

WINDOWED = "sliding_attention"  # type of layers whose tokens attend only within a window


class PreNormStack:
    """ModernBERT's embeddings and layers; for the methods see `ranker.encoders.stack.Stack`."""

    def rates(self, model: Any) -> tuple[float, ...]:
        """Return the dropout rates of the embeddings and of a layer's two sites; all layers have the same rates."""
        first = model.layers[0]
        return tuple(_rate(dropout) for dropout in (model.embeddings.drop, first.attn.out_drop, first.mlp.drop))

    def attention_dropout(self, model: Any) -> float:
        """Return the dropout rate of the last layer's attention weights."""
        attention = model.layers[-1].attn
        return attention.attention_dropout if attention.training else 0.0

    def weights_per_layer(self, config: Any) -> int:
        """Return the number of weights in a layer's matrices: queries, keys, values, output, three feed-forward."""
        return 4 * config.hidden_size**2 + 3 * config.hidden_size * config.intermediate_size

    def states(self, model: Any, run: RaggedPass) -> Iterator[Tensor]:
        """Yield the states after the embeddings and after each layer, or only the last layer's."""
        path = choose_pre_norm_path(model, run)
        sites = _Sites(model, run)
        states = _embedded(model, run, path, sites.next(model.embeddings.drop))
        if run.output is Output.ALL_LAYERS:
            yield states
        packed = path.packed_rows(run.layout) if run.unpadded else None
        longest = run.layout.batch.max_length if packed is None else packed.max_length
        rotary = {kind: _rotary(model, run, kind, longest) for kind in sorted(set(model.config.layer_types))}
        stream: Any = Stream(states, None) if path.uses_kernels else states
        for number, layer in enumerate(model.layers):
            selected = run.selected(number == len(model.layers) - 1)
            hashes = (sites.next(layer.attn.out_drop, selected), sites.next(layer.mlp.drop, selected))
            if number in run.skipped:
                if isinstance(stream, Stream):
                    stream = stream._replace(summed=left_out(layer, stream.summed))
                else:
                    stream = left_out(layer, stream)
                if run.output is Output.ALL_LAYERS:
                    yield stream.states if isinstance(stream, Stream) else stream
                continue
            dropout = layer.attn.attention_dropout if layer.attn.training else 0.0
            rows: PackedRows | PaddedRows = PaddedRows(run.layout, dropout) if packed is None else packed
            stream = run.run(
                path.run_layer, stream, PreNormWeights.of(layer), _settings(model.config, layer), path.functions, rows,
                rotary[layer.attention_type], hashes, selected,
            )  # fmt: skip
            if run.output is Output.ALL_LAYERS and number < len(model.layers) - 1:
                yield stream.states if isinstance(stream, Stream) else stream
        norm = model.final_norm
        if isinstance(stream, Stream):
            yield final_norm(stream, norm.weight, norm.eps, path.functions)
        else:
            yield norm(stream).to(stream.dtype)


class _Sites:
    """Dropout hashes of each site (a place in the model with dropout), in the order of transformers' dropout calls."""

    def __init__(self, model: Any, run: RaggedPass) -> None:
        dropouts = [model.embeddings.drop]
        for layer in model.layers:
            dropouts += [layer.attn.out_drop, layer.mlp.drop]
        dropouts = [dropout for dropout in dropouts if isinstance(dropout, nn.Dropout)]  # other modules drop nothing
        self._hashes = run.hashes(len(dropouts)) if any(map(_rate, dropouts)) else None
        self._site = 0

    def next(self, dropout: nn.Module, selected: Tensor | None = None) -> Tensor | None:
        """Return the hashes of the next module, int32 [selected tokens]; None: the module drops nothing."""
        if not isinstance(dropout, nn.Dropout):
            return None
        site, self._site = self._site, self._site + 1
        if self._hashes is None or not _rate(dropout):
            return None
        return self._hashes[site] if selected is None else self._hashes[site].index_select(0, selected)


def _embedded(model: Any, run: RaggedPass, path: LayerPath, hashes: Tensor | None) -> Tensor:
    """Return the states before the first layer, [tokens, dim]; without padding, in the dtype of the layers."""
    embeddings, tokens = model.embeddings, run.layout.batch.tokens
    words, rate = embeddings.tok_embeddings, _rate(embeddings.drop)
    dtype = run.state_dtype(words.weight)
    if path.uses_kernels and run.ids_in_table:
        return fused_word_embedding(words, embeddings.norm, tokens, (hashes, rate), dtype)
    states = embeddings.norm(words(tokens))
    if hashes is not None:
        states = path.dropout(states, hashes, rate)
    return states.to(dtype) if path.unpadded else states


def _rotary(model: Any, run: RaggedPass, kind: str, longest: int) -> Rotary:
    """Return the rotations of one kind of layers, computed by transformers' own module."""
    weight = model.embeddings.tok_embeddings.weight
    precise = torch.promote_types(weight.dtype, torch.float32)
    positions = torch.arange(longest, device=weight.device).unsqueeze(0)
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        tables = model.rotary_emb(weight.new_empty(0, dtype=precise), positions, kind)
    # both halves of a head have the same angles
    cos, sin = (table[0, :, : table.shape[-1] // 2].to(precise).contiguous() for table in tables)
    return Rotary(cos, sin, run.layout.position_ids)


def _settings(config: Any, layer: Any) -> PreNormSettings:
    return PreNormSettings(
        config.num_attention_heads,
        config.sliding_window if layer.attention_type == WINDOWED else None,
        _rate(layer.attn.out_drop),
        _rate(layer.mlp.drop),
        layer.mlp_norm.eps,
    )


def _rate(dropout: Any) -> float:
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
