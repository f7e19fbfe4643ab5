"""Transformers' own forward over a batch: on one packed row, or on padded groups of rows."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from ranker.encoders import packing
from ranker.encoders.packing import IMPLEMENTATION, Packing, Pass
from ranker.encoders.passes import ForwardPass
from ranker.encoders.ragged import RaggedLayout
from ranker.encoders.row_groups import NEAR, RowGroup, row_groups, select_rows
from ranker.errors import ConfigError
from ranker.types import TokenBatch


@dataclass(frozen=True)
class Request:
    """What a forward pass computes.

    Args:
        batch: The rows.
        all_layers: Whether to return the states of all layers.
        seed: Seed of the dropout masks; None: no hashed dropout.
    """

    batch: TokenBatch
    all_layers: bool
    seed: int | None = None


class TransformersForward:
    """Run a transformers model, of any family, over ragged batches.

    Args:
        model: The model.
        attention_dropout: Rate on attention weights where rows are packed; None: the model's own.

    Attributes:
        first_position: Position id of a row's first token on the packed path.
        reads_segments: Whether the model gets segment ids.
    """

    def __init__(self, model: Any, reads_segments: bool, attention_dropout: float | None = None) -> None:
        packing.register()
        self.packing = Packing(model, attention_dropout)
        self.first_position = 0
        parameters = inspect.signature(model.forward).parameters
        self.reads_segments = reads_segments and "token_type_ids" in parameters
        self._takes_positions = "position_ids" in parameters
        self._own_implementation: str | None = None

    def packed(self, model: Any, request: Request) -> ForwardPass:
        """Run a batch as one row [1, tokens]."""
        return ForwardPass(self._packed_states(model, request), request.batch.num_tokens)

    def padded(self, model: Any, request: Request, shortest: float = NEAR) -> ForwardPass:
        """Run a batch in groups of rows of near lengths, each padded to its longest row.

        Args:
            model: The model.
            request: What to compute.
            shortest: Length of a group's shortest row as a share of its longest; 1: rows of one length.
        """
        groups = row_groups(request.batch.cu_seqlens, shortest)
        computed = sum(group.longest * len(group.rows) for group in groups)
        return ForwardPass(self._padded_states(model, request, groups), computed)

    def use(self, model: Any, packed: bool) -> None:
        """Select the attention function of the packed path, or the model's own."""
        config = model.config
        if packed and config._attn_implementation != IMPLEMENTATION:
            self._own_implementation = config._attn_implementation
            model.set_attn_implementation(IMPLEMENTATION)
            if config._attn_implementation != IMPLEMENTATION:
                raise NotImplementedError("its attention does not go through transformers' attention functions")
        elif not packed and config._attn_implementation == IMPLEMENTATION:
            model.set_attn_implementation(self._own_implementation)

    def find_dropout(self, model: Any, batch: TokenBatch, packed: bool) -> None:
        """Replace dropout modules by hashed ones; see `Packing.find_dropout`.

        Args:
            model: The model.
            batch: One row.
            packed: Whether the packed path is in use.
        """

        def run() -> None:
            training = model.training
            model.eval()
            with torch.no_grad():
                request = Request(batch, all_layers=False)
                next((self.packed if packed else self.padded)(model, request).states)
            model.train(training)

        self.packing.find_dropout(model, run, batch.num_tokens)

    def checkpoint_activations(self, model: Any) -> None:
        """Recompute each layer's activations in the backward pass in place of storing them.

        Raises:
            ConfigError: The family has no such layers.
        """
        repeated = any(len(getattr(module, "sites", ())) > 1 for module in model.modules())
        if repeated or not any(isinstance(module, GradientCheckpointingLayer) for module in model.modules()):
            raise ConfigError(
                f"encoder.checkpointing: expected false for {model.config.model_type}, whose layers transformers "
                "can't recompute one by one; got true"
            )

        def contexts() -> tuple[Any, Any]:
            current = self.packing.current
            return nullcontext(), nullcontext() if current is None else self.packing.running(current)

        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})

    def call(self, model: Any, input_ids: Tensor, attention_mask: Tensor | None, segments: Tensor, **more: Any) -> Any:
        """Call the model on token ids [rows, columns]; segments go only to a model that reads them."""
        if self.reads_segments:
            more["token_type_ids"] = segments
        return model(input_ids=input_ids, attention_mask=attention_mask, **more)

    def _packed_states(self, model: Any, request: Request) -> Iterator[Tensor]:
        batch, layout = request.batch, RaggedLayout.of(request.batch)
        hashes = None if request.seed is None else self.packing.hashes(layout, request.seed).unsqueeze(1)
        positions = {"position_ids": (layout.position_ids + self.first_position).unsqueeze(0)}
        with self.packing.running(Pass(batch, layout, True, hashes)):
            output = self.call(
                model, batch.tokens.unsqueeze(0), None, batch.segments.unsqueeze(0),
                output_hidden_states=request.all_layers, **(positions if self._takes_positions else {}),
            )  # fmt: skip
        for states in _states_of(output, request.all_layers):
            yield states[0]

    def _padded_states(self, model: Any, request: Request, groups: list[RowGroup]) -> Iterator[Tensor]:
        """Yield each layer's states of all groups in the order of the batch's tokens, [tokens, dim]."""
        parts, indices = [], []
        for group in groups:
            rows, tokens = select_rows(request.batch, group)
            parts.append(self._group_states(model, replace(request, batch=rows)))
            indices.append(tokens)
        order = torch.cat(indices)
        inverse = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        for layer in zip(*parts, strict=True):
            yield torch.cat(layer).index_select(0, inverse)

    def _group_states(self, model: Any, request: Request) -> list[Tensor]:
        batch, layout = request.batch, RaggedLayout.of(request.batch)
        hashes = None
        if request.seed is not None:
            hashes = torch.stack([layout.pad(site) for site in self.packing.hashes(layout, request.seed)])
        tokens = torch.where(layout.mask, layout.pad(batch.tokens), padding_id(model.config))
        with self.packing.running(Pass(batch, layout, False, hashes)):
            output = self.call(
                model, tokens, layout.key_mask.long(), layout.pad(batch.segments),
                output_hidden_states=request.all_layers,
            )  # fmt: skip
        width = batch.max_length  # some families round their states up to more
        # and Funnel's middle layers have fewer states than tokens
        layers = [states for states in _states_of(output, request.all_layers) if states.shape[1] >= width]
        return [layout.unpad(states[:, :width]) for states in layers]


def padding_id(config: Any) -> int:
    """Return the token id for padding, which the mask hides anyway: the family's, else its end of text, else 0."""
    config = config.get_text_config()
    for key in ("pad_token_id", "eos_token_id"):
        token = getattr(config, key, None)
        if isinstance(token, int) and token >= 0:
            return token
    return 0


def _states_of(output: Any, all_layers: bool) -> list[Tensor]:
    """Return the states of all layers, or of the last; of an encoder-decoder, its decoder's."""
    if not all_layers:
        return [output.last_hidden_state]
    return list(output.decoder_hidden_states if "decoder_hidden_states" in output else output.hidden_states)
