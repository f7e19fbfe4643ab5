"""Run transformers' own forward pass over a batch: on one packed row, or on padded groups of rows."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_layers import GradientCheckpointingLayer

from ranker.encoders.adapted_linear import group_siblings
from ranker.encoders.attention import triton_unavailable, unpadded_unavailable
from ranker.encoders.compiled_layer import compile_layers, compile_unavailable
from ranker.encoders.gated_mlp import use_gated_kernel
from ranker.encoders.grouped_attention import grouped_rows
from ranker.encoders.lora_layers import adapted_layers, has_adapter, refresh_stacked
from ranker.encoders.packed_attention import IMPLEMENTATION, register
from ranker.encoders.packing import Packing, Pass
from ranker.encoders.passes import ForwardPass
from ranker.encoders.ragged import RaggedLayout
from ranker.encoders.rotary_attention import use_rotary_kernel
from ranker.encoders.row_groups import NEAR, RowGroup, row_groups, select_rows
from ranker.encoders.shared_prefix import SharedPrefixes
from ranker.errors import ConfigError
from ranker.types import TokenBatch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What a forward pass has to compute.

    Args:
        batch: The rows.
        all_layers: Whether to return the states of all layers.
        seed: Seed of the dropout masks; None: no hashed dropout.
        first_token_is_global: See `Encoder.make_first_token_global`.
        prefixes: How the rows share prefixes, on the packed path; `batch` is then the batch of segments.
        attention: Whether to return each layer's attention weights after the states, on the padded path.
        columns: Number of columns of the attention weights, at least the length of the longest row.
    """

    batch: TokenBatch
    all_layers: bool
    seed: int | None = None
    first_token_is_global: bool = False
    prefixes: SharedPrefixes | None = None
    attention: bool = False
    columns: int = 0


class TransformersForward:
    """Run a transformers model of any family over ragged batches.

    Args:
        model: The model.
        reads_segments: Whether the model may get segment ids.

    Attributes:
        first_position: Position id of a row's first token on the packed path.
        unattended_position: On the packed path, position id of tokens to which no other token attends; None: their
            own position.
        reads_segments: Whether the model gets segment ids.
    """

    def __init__(self, model: Any, reads_segments: bool) -> None:
        register()
        self.packing = Packing.of(model)
        self.first_position = 0
        self.unattended_position: int | None = None
        parameters = inspect.signature(model.forward).parameters
        self.reads_segments = reads_segments and "token_type_ids" in parameters
        self._takes_positions = "position_ids" in parameters
        self._takes_cache = "use_cache" in parameters
        self._compiled = False
        self._takes_global = "global_attention_mask" in parameters

    def packed(self, model: Any, request: Request, compile: bool | str = False) -> ForwardPass:
        """Run a batch as one packed row [1, tokens].

        Args:
            model: The model.
            request: What to compute.
            compile: Whether to compile the layers, see `Execution`. Compiled layers stay compiled.

        Raises:
            ConfigError: `compile` is True, but the layers can't be compiled here.
        """
        if compile and not self._compiled:
            self._compile(model, request.batch.tokens.device, compile is True)
        return ForwardPass(self._packed_states(model, request), request.batch.num_tokens)

    def padded(self, model: Any, request: Request, shortest: float = NEAR) -> ForwardPass:
        """Run a batch in groups of rows of near lengths, each padded to its longest row.

        Args:
            model: The model.
            request: What to compute.
            shortest: Least length in a group divided by the group's largest; 1: all rows of a group have one length.
        """
        groups = row_groups(request.batch.cu_seqlens, shortest)
        computed = sum(group.longest * len(group.rows) for group in groups)
        return ForwardPass(self._padded_states(model, request, groups), computed)

    def use(self, model: Any, packed: bool, weights: bool = False) -> None:
        """Select an attention function: that of the packed path, the model's own, or one that returns the weights.

        Raises:
            NotImplementedError: The family's attention can't be replaced.
        """
        wanted = "eager" if weights else IMPLEMENTATION if packed else self.packing.own_implementation
        if model.config._attn_implementation != wanted:
            model.set_attn_implementation(wanted)
            if model.config._attn_implementation != wanted:
                raise NotImplementedError("its attention does not go through transformers' attention functions")

    def find_dropout(self, model: Any, batch: TokenBatch, packed: bool) -> None:
        """Replace dropout modules by hashed ones (`Packing.find_dropout`); find layers that kernels can compute.

        Args:
            model: The model.
            batch: A batch of one row.
            packed: Whether the packed path is in use.
        """

        def run() -> None:
            training = model.training
            model.eval()
            with torch.no_grad():
                request = Request(batch, all_layers=False)
                next((self.packed if packed else self.padded)(model, request).states)
            model.train(training)

        self.packing.find_dropout(model, run)
        if packed and has_adapter(model):
            group_siblings(adapted_layers(model), run)
            use_gated_kernel(model)
        if packed:
            use_rotary_kernel(model)

    def checkpoint_activations(self, model: Any, num_layers: int) -> None:
        """Recompute each layer's activations in the backward pass instead of storing them.

        Args:
            model: The model.
            num_layers: Number of the model's layers.

        Raises:
            ConfigError: The family has no such layers.
        """
        layers = sum(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
        if layers < num_layers:  # ALBERT runs one layer several times, and its dropout masks depend on the call
            raise ConfigError(
                f"encoder.checkpointing: expected false for {model.config.model_type}, whose layers transformers "
                "can't recompute one by one; got true"
            )

        # older versions of transformers have only the second name
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False, "context_fn": self.packing.contexts})

    def call(self, model: Any, input_ids: Tensor, attention_mask: Tensor | None, segments: Tensor, **more: Any) -> Any:
        """Call the model on token ids [rows, columns]. Segments are passed only to a model that reads them."""
        if self.reads_segments:
            more["token_type_ids"] = segments
        if self._takes_cache:  # a cache keeps keys and values, and makes torch compile each layer
            more["use_cache"] = False
        return model(input_ids=input_ids, attention_mask=attention_mask, **more)

    def _compile(self, model: Any, device: torch.device, required: bool) -> None:
        reason = unpadded_unavailable(device, _precision(model, device)) or compile_unavailable(device)
        if reason and required:
            raise ConfigError(f"encoder.compile: expected auto or false, got true, but {reason}")
        if not reason:
            self._compiled = True
            log.info("encoder: %d layers run compiled", compile_layers(model))

    def _packed_states(self, model: Any, request: Request) -> Iterator[Tensor]:
        self.use(model, packed=True)
        batch, layout, prefixes = request.batch, RaggedLayout.of(request.batch), request.prefixes
        if prefixes is not None:  # the positions of a segment continue where its prefix ends
            layout = replace(layout, position_ids=layout.position_ids + prefixes.starts[layout.row_indices])
        hashes = None if request.seed is None else self.packing.hashes(layout, request.seed).unsqueeze(1)
        ids = layout.position_ids + self.first_position
        if batch.attended is not None and self.unattended_position is not None:
            beyond = layout.position_ids >= batch.attended[layout.row_indices]
            ids = ids.masked_fill(beyond, self.unattended_position)
        positions = {"position_ids": ids.unsqueeze(0)}
        dtype = _precision(model, batch.tokens.device)
        unpadded = not unpadded_unavailable(batch.tokens.device, dtype)
        forward = Pass(batch, layout, True, hashes, request.seed or 0, prefixes)
        forward.kernels = unpadded and not triton_unavailable()
        forward.last_only = not request.all_layers
        forward.stacked = unpadded and has_adapter(model) and refresh_stacked(model, dtype)
        if unpadded and batch.attended is None and batch.lists is None:
            forward.rows = grouped_rows(layout, forward.longest, prefixes)
        with (
            self.packing.running(forward),
            _embeddings_in_autocasts_precision(model),
        ):
            output = self.call(
                model, batch.tokens.unsqueeze(0), None, batch.segments.unsqueeze(0),
                output_hidden_states=request.all_layers, **(positions if self._takes_positions else {}),
            )  # fmt: skip
        for states in _states_of(output, request.all_layers):
            yield states.squeeze(0)

    def _padded_states(self, model: Any, request: Request, groups: list[RowGroup]) -> Iterator[Tensor]:
        """Yield each layer's states of all groups in the order of the batch's tokens, [tokens, dim]."""
        parts, indices = [], []
        for group in groups:
            rows, tokens = select_rows(request.batch, group)
            parts.append(self._group_states(model, replace(request, batch=rows, columns=request.batch.max_length)))
            indices.append(tokens)
        order = torch.cat(indices)
        inverse = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        for layer in zip(*parts, strict=True):
            yield torch.cat(layer).index_select(0, inverse)

    def _group_states(self, model: Any, request: Request) -> list[Tensor]:
        self.use(model, packed=False, weights=request.attention)
        batch, layout = request.batch, RaggedLayout.of(request.batch)
        hashes = None
        if request.seed is not None:
            hashes = torch.stack([layout.pad(site) for site in self.packing.hashes(layout, request.seed)])
        tokens = torch.where(layout.mask, layout.pad(batch.tokens), padding_id(model.config))
        more: dict[str, Any] = {"output_attentions": True} if request.attention else {}
        if self._takes_global and request.first_token_is_global:
            more["global_attention_mask"] = (
                (torch.arange(batch.max_length, device=tokens.device) == 0).long().expand_as(tokens)
            )
        with self.packing.running(Pass(batch, layout, False, hashes, request.seed or 0)):
            output = self.call(
                model, tokens, layout.key_mask.long(), layout.pad(batch.segments),
                output_hidden_states=request.all_layers, **more,
            )  # fmt: skip
        width = batch.max_length  # some families return more columns, up to a multiple of a block
        states = [layout.unpad(states[:, :width]) for states in _states_of(output, request.all_layers)]
        if request.attention:
            room = (0, request.columns - width)
            weights = [part.transpose(1, 2) for part in output.attentions or () if part is not None]
            states += [functional.pad(layout.unpad(part), room) for part in weights]
        return states


def _precision(model: Any, device: torch.device) -> torch.dtype:
    """Return the precision of the model's products on a device."""
    autocast = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if autocast else next(model.parameters()).dtype


@contextmanager
def _embeddings_in_autocasts_precision(model: Any) -> Iterator[None]:
    """Convert the word embeddings to autocast's precision on CUDA, as this package's own layers do.

    With embeddings in float32, the residual sums of pre-norm layers would be in float32. They would be slower and take
    twice the memory.
    """
    table = model.get_input_embeddings()
    if not (table.weight.is_cuda and torch.is_autocast_enabled("cuda")):
        yield
        return
    dtype = torch.get_autocast_dtype("cuda")
    hook = table.register_forward_hook(lambda module, inputs, output: output.to(dtype))  # noqa: ARG005
    try:
        yield
    finally:
        hook.remove()


def padding_id(config: Any) -> int:
    """Return a token id for padding, which masks hide: the configuration's, or its end-of-text token, or 0.

    An id outside the embedding table is passed over; GPT-2's default end-of-text token is outside of smaller tables.
    """
    config = config.get_text_config()
    rows = getattr(config, "vocab_size", None)
    for key in ("pad_token_id", "eos_token_id"):
        token = getattr(config, key, None)
        if isinstance(token, int) and token >= 0 and (rows is None or token < rows):
            return token
    return 0


def _states_of(output: Any, all_layers: bool) -> list[Tensor]:
    """Return the states of all layers, or only the last; for an encoder-decoder, those of its decoder."""
    if not all_layers:
        return [output.last_hidden_state]
    return list(output.decoder_hidden_states if "decoder_hidden_states" in output else output.hidden_states)
