"""The forward pass of models with BERT's modules over ragged batches: linear layers see real tokens only."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ranker.encoders.attention import PackedRows, PaddedRows, short_unavailable
from ranker.encoders.dropout import dropout_hashes
from ranker.encoders.embeddings import (
    SMALL_TABLE,
    EmbeddingInputs,
    fused_embedding,
    position_embedding,
    segment_embedding,
)
from ranker.encoders.execution import Execution
from ranker.encoders.family import first_position
from ranker.encoders.graphs import MAX_SMALL_PASS, ROW_MULTIPLE, Graphs, rounding
from ranker.encoders.layer import LayerSettings, LayerWeights
from ranker.encoders.passes import ForwardPass, Output
from ranker.encoders.paths import LayerPath, attention_is_unpadded, can_skip_other_tokens, choose_path
from ranker.encoders.ragged import RaggedLayout, pad_to_tiles
from ranker.types import TokenBatch

log = logging.getLogger(__name__)


class RaggedForward:
    """Run batches without padding; small training passes on CUDA are replayed as CUDA graphs.

    Args:
        execution: Options.
        ids_in_table: Whether the word table has a row for every token id of the tokenizer. If False,
            torch's lookup is used instead of the embedding kernel, because only the former reports an out-of-range id.
    """

    def __init__(self, execution: Execution, ids_in_table: bool) -> None:
        self.execution = execution
        self.graphs = Graphs()
        self._ids_in_table = ids_in_table
        self._logged: set[str] = set()

    def __call__(
        self, model: Any, batch: TokenBatch, output: Output, training: bool, dropout_seed: int | None
    ) -> ForwardPass:
        """Run the model over a batch.

        Args:
            model: A transformers model with BERT's modules.
            batch: The batch.
            output: States to return.
            training: Whether the encoder is in training mode; only then passes are replayed.
            dropout_seed: Seed of the dropout masks; None: drawn from torch's generator, if dropout is on.
        """
        unpadded = attention_is_unpadded(model, batch.tokens.device, self._log_once)
        one_layer = output is not Output.ALL_LAYERS
        replay = unpadded and training and one_layer and self._may_replay(model, batch)
        if replay:
            batch = pad_to_tiles(batch, rounding(batch.num_tokens), ROW_MULTIPLE)
        elif unpadded:
            batch = pad_to_tiles(batch)
        if replay:
            states = self._replayed(model, batch, dropout_seed, output)
        else:
            states = self._states(model, batch, unpadded, dropout_seed, output)
        return ForwardPass(states, batch.num_tokens)

    def can_skip_other_tokens(self, model: Any, device: torch.device) -> bool:
        """Return whether `Output.FIRST_TOKENS` is available; see `paths.can_skip_other_tokens`."""
        return can_skip_other_tokens(model, self.execution, attention_is_unpadded(model, device, self._log_once))

    def _may_replay(self, model: Any, batch: TokenBatch) -> bool:
        """Return whether a CUDA graph may ever replay this training pass; if so, its sizes are rounded up.

        Decided from the batch, the model and the options alone, so a resumed or repeated step pads to the same sizes
        and gets the same bits.
        """
        graphs, config = self.execution.graphs, model.config
        if graphs is False or batch.attended is not None:
            return False
        dim = config.hidden_size
        if graphs == "auto":
            weights = config.num_hidden_layers * (4 * dim**2 + 2 * dim * config.intermediate_size)
            if batch.num_tokens * weights > MAX_SMALL_PASS:
                return False
        return self.execution.attention != "library" and not short_unavailable(
            dim // config.num_attention_heads, batch.max_length
        )

    def _replayed(self, model: Any, batch: TokenBatch, dropout_seed: int | None, output: Output) -> Iterator[Tensor]:
        """Yield the last layer's states from a CUDA graph, or from a plain pass where there is none (yet)."""
        rate = dropout_rate(model)
        seed = _seed(dropout_seed) if rate else 0
        replayed = None
        if self.execution.graphs is True or not _several_processes():
            dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
            replayed = self.graphs(
                lambda inputs, graph_seed: last(self._states(model, inputs, True, graph_seed, output)),
                batch,
                seed,
                model,
                (output, rate, model.encoder.layer[0].output.dropout.p, dtype, self.execution),
            )
        if self.graphs.why_off:
            self._log_once(f"no more CUDA graphs are captured, because {self.graphs.why_off}")
        if replayed is not None:
            self._log_once("small training passes are replayed as CUDA graphs")
        yield last(self._states(model, batch, True, seed, output)) if replayed is None else replayed

    def _states(
        self, model: Any, batch: TokenBatch, unpadded: bool, seed: int | Tensor | None, output: Output
    ) -> Iterator[Tensor]:
        """Yield the states after the embeddings and after each layer."""
        if getattr(model.config, "type_vocab_size", 0) <= 1:
            batch = replace(batch, segments=torch.zeros_like(batch.segments))
        layout = RaggedLayout.of(batch)
        device = batch.tokens.device if unpadded else None
        path = choose_path(model, self.execution, batch.max_length, device, self._log_once)
        first_tokens = batch.cu_seqlens[:-1]
        packed = None
        if unpadded:
            # `pad_to_tiles` added at least one padding row, so there are at least two rows (compiled code would treat a
            # count of 1 as a constant). An empty padding row starts past the last token, so its index is clamped.
            first_tokens = first_tokens.clamp(max=batch.num_tokens - 1)
            packed = path.packed_rows(layout)
        hashes = _hashes(model, layout, seed)
        states = self._embedded(model, layout, path, None if hashes is None else hashes[0])
        yield states
        layers = model.encoder.layer
        for number, layer in enumerate(layers):
            layer_hashes = None if hashes is None else hashes[2 * number + 1 : 2 * number + 3]
            selected = first_tokens if output is Output.FIRST_TOKENS and number == len(layers) - 1 else None
            if layer_hashes is not None and selected is not None:
                layer_hashes = layer_hashes.index_select(1, selected)
            attention = layer.attention.self
            attention_dropout = attention.dropout.p if attention.training else 0.0
            rows: PackedRows | PaddedRows = PaddedRows(layout, attention_dropout) if packed is None else packed
            settings = LayerSettings(attention.num_attention_heads, layer.output.dropout.p, layer.output.LayerNorm.eps)
            states = path.run_layer(
                states, LayerWeights.of(layer), settings, path.functions, rows, layer_hashes, selected
            )
            yield states

    def _embedded(self, model: Any, layout: RaggedLayout, path: LayerPath, hashes: Tensor | None) -> Tensor:
        """Return the states before the first layer, [tokens, dim]; without padding in the precision of the layers."""
        embeddings, batch = model.embeddings, layout.batch
        offset, rate = first_position(model.config), dropout_rate(model)
        words, segments = embeddings.word_embeddings, embeddings.token_type_embeddings
        autocast = path.unpadded and torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if autocast else words.weight.dtype
        if path.uses_kernels and self._ids_in_table and segments.num_embeddings <= SMALL_TABLE:
            states = fused_embedding(embeddings, EmbeddingInputs(layout, batch.segments, offset, hashes, rate, dtype))
        else:
            states = words(batch.tokens) + position_embedding(embeddings.position_embeddings, layout, offset)
            states = embeddings.LayerNorm(states + segment_embedding(segments, batch.segments))
            if hashes is not None:
                states = path.dropout(states, hashes, rate)
        if hasattr(model, "embeddings_project"):  # ELECTRA
            states = model.embeddings_project(states)
        return states.to(dtype) if path.unpadded else states

    def _log_once(self, line: str) -> None:
        """Log a line about the path that is taken, once."""
        if line not in self._logged:
            self._logged.add(line)
            log.info("encoder: %s", line)


def last(states: Iterator[Tensor]) -> Tensor:
    """Return the last of some states without keeping the earlier ones in memory."""
    return deque(states, maxlen=1).pop()


def dropout_rate(model: Any) -> float:
    """Return the current dropout rate; the embeddings' mode and rate are those of the whole model."""
    dropout = model.embeddings.dropout
    return dropout.p if dropout.training else 0.0


def _several_processes() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _seed(dropout_seed: int | None) -> int:
    return int(torch.randint(2**62, ())) if dropout_seed is None else dropout_seed


def _hashes(model: Any, layout: RaggedLayout, seed: int | Tensor | None) -> Tensor | None:
    """Return the dropout hashes of the embeddings and of both sites of each layer, int32 [1 + 2 * layers, tokens].

    None if dropout is off.
    """
    if not dropout_rate(model):
        return None
    row_ids = layout.row_indices if layout.batch.row_ids is None else layout.batch.row_ids[layout.row_indices]
    sites = 1 + 2 * model.config.num_hidden_layers
    return dropout_hashes(seed if isinstance(seed, Tensor) else _seed(seed), row_ids, layout.position_ids, sites)
