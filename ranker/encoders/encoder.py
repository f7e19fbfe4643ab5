"""The encoder: any Hugging Face encoder over ragged batches; BERT's relatives run without padding."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.activations import GELUActivation

from ranker.encoders.attention import (
    TAIL,
    RaggedLayout,
    library_attention,
    padded_attention,
    padded_average,
    short_attention,
    short_missing,
    triton_missing,
    unpadded_missing,
    with_tail,
)
from ranker.encoders.dropout import dropout_hashes, hashed_dropout
from ranker.encoders.execution import DEFAULT, Execution
from ranker.encoders.families import RAGGED_FAMILIES, max_positions, position_shift
from ranker.encoders.fused import (
    Parts,
    compile_missing,
    compiled_dropout,
    compiled_layer,
    kernel_average,
    layer_weights,
    plain_attend,
    plain_join,
    plain_widen,
    post_norm_layer,
)
from ranker.encoders.graphs import ROWS, SMALL, Graphs, rounding
from ranker.encoders.kernel_layer import Kernels, kernel_layer, triton_kernels
from ranker.encoders.lookup import FEW, embedded, position_embedding, segment_embedding
from ranker.errors import ConfigError
from ranker.interactions.pooling import pool
from ranker.types import TokenBatch

log = logging.getLogger(__name__)


@dataclass
class Work:
    """What the training passes of an encoder computed, in tokens.

    Args:
        computed_tokens: Tokens that the layers worked on, padding included.
        last_layer_tokens: Real tokens that went through the last layer's weights.
    """

    computed_tokens: int = 0
    last_layer_tokens: int = 0


class Encoder(nn.Module):
    """Turn ragged token batches into states, one vector per token.

    Families in `RAGGED_FAMILIES` run padding-free: every linear layer sees real tokens only. Others are padded at the
    door and run through their own transformers forward. Both give the same states. On CUDA in half precision attention
    is padding-free too, without attention dropout, and layers run through kernels of our own, or compiled where those
    don't serve.

    Args:
        model: The transformers model, without its pooler.
        tokenizer: Its fast tokenizer.
        execution: How to compute.

    Attributes:
        ragged: Whether batches run without padding: `execution.ragged`, and the family can.
        work: Tokens of the training passes since it was last reset, see `Work`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        execution: Execution = DEFAULT,
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.tokenizer = tokenizer
        self.execution = execution
        self.ragged = execution.ragged and model.config.model_type in RAGGED_FAMILIES
        self.work = Work()
        self._passes = Graphs()
        # of words that the table lacks torch's own lookup says so, our kernel does not
        words: Any = model.get_input_embeddings()
        self._known_words = len(tokenizer) <= len(words.weight)
        self.dropout_seed: int | None = None  # of the optimizer step; None: each forward draws one
        self._told: set[str] = set()

    @property
    def config(self) -> PretrainedConfig:
        """The transformers configuration."""
        return self.model.config

    @property
    def dim(self) -> int:
        """Size of a state."""
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        """Number of transformer layers."""
        return self.config.num_hidden_layers

    @property
    def max_tokens(self) -> int:
        """Longest sequence that the position table serves, special tokens included."""
        return max_positions(self.config)

    def forward(self, batch: TokenBatch) -> Tensor:
        """Return the last layer's states, [tokens, dim]."""
        return self._last(batch)[: batch.num_tokens].to(self.model.dtype)

    def pooled(self, batch: TokenBatch, how: str) -> Tensor:
        """Return one vector per row of the last layer's states (`pool`), [rows, dim].

        For `cls` the last layer computes no more than the first tokens' states where it can: 8 % of BERT-base less to
        do.
        """
        if how != "cls" or not self._firsts_alone(batch.tokens.device):
            return pool(self(batch), batch, how)
        return self._last(batch, firsts_only=True)[: batch.num_rows].to(self.model.dtype)

    def layers(self, batch: TokenBatch) -> Iterator[Tensor]:
        """Yield the states after the embeddings and after each layer, each [tokens, dim]; stop early to save the rest."""
        for states in self._layers(batch):
            yield states[: batch.num_tokens].to(self.model.dtype)

    def _last(self, batch: TokenBatch, firsts_only: bool = False) -> Tensor:
        """The last of `_layers`, where sizes are rounded perhaps by a CUDA graph."""
        if not (self._may_replay(batch) and self._unpadded(batch.tokens.device)):
            return _last_of(self._layers(batch, firsts_only))
        filled = with_tail(batch, rounding(batch.num_tokens), ROWS)
        self._count(batch, filled.num_tokens, firsts_only)
        replayed = None
        if self.execution.graphs is True or not (
            dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        ):
            dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
            replayed = self._passes(
                lambda own, seed: _last_of(self._ragged_layers(own, firsts_only, True, seed)),
                filled,
                self._seed if self._dropped else lambda: 0,
                self.model,
                (firsts_only, self._dropped, self.model.encoder.layer[0].output.dropout.p, dtype, self.execution),
            )
        if self._passes.why_off:
            self._tell(f"no more CUDA graphs, because {self._passes.why_off}")
        if replayed is None:
            return _last_of(self._ragged_layers(filled, firsts_only, True))
        self._tell("small training passes are replayed as CUDA graphs")
        return replayed

    def _layers(self, batch: TokenBatch, firsts_only: bool = False) -> Iterator[Tensor]:
        """The states as they come: perhaps in half precision, and with rows of filling; the last layer's perhaps of rows' first tokens only."""
        if self.ragged:
            unpadded = self._unpadded(batch.tokens.device)
            filled = with_tail(batch) if unpadded else batch
            self._count(batch, filled.num_tokens, firsts_only)
            yield from self._ragged_layers(filled, firsts_only, unpadded)
        else:
            self._count(batch, batch.num_rows * batch.max_length, firsts_only)
            self._tell(
                f"padded batches through transformers' own forward ({self.config.model_type}, ragged={self.ragged})"
            )
            yield from self._padded_layers(batch.tokens, batch.segments, RaggedLayout.of(batch))

    def _may_replay(self, batch: TokenBatch) -> bool:
        """Whether this is a pass that a graph might hold one day, if attention runs without padding: its sizes are rounded for that.

        It hangs on nothing that a training which is resumed or a step which is repeated would not know, since other
        sizes give other bits.
        """
        if self.execution.graphs is False or not (self.ragged and self.training) or batch.attended is not None:
            return False
        config = self.config
        if self.execution.graphs == "auto":
            weights = self.num_layers * (4 * self.dim**2 + 2 * self.dim * config.intermediate_size)
            if batch.num_tokens * weights > SMALL:
                return False
        return self.execution.attention != "library" and not short_missing(
            self.dim // config.num_attention_heads, batch.max_length
        )

    def end_training(self) -> None:
        """Let dropout be random again, and give the memory of CUDA graphs back."""
        self.dropout_seed, self._passes = None, Graphs()

    def _count(self, batch: TokenBatch, computed_tokens: int, firsts_only: bool) -> None:
        """Add a batch to `work` if it is trained on: a pass without a graph (GradCache's first one) repeats, and counts nothing."""
        if self.training and torch.is_grad_enabled():
            self.work.computed_tokens += computed_tokens
            self.work.last_layer_tokens += batch.num_rows if firsts_only else batch.num_tokens

    def _unpadded(self, device: torch.device) -> bool:
        """Whether attention runs without padding, too."""
        weight = self.model.embeddings.word_embeddings.weight
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight.dtype
        why = unpadded_missing(device, dtype)
        if why:
            self._tell(f"padded in attention, because {why}")
        return not why and self.max_tokens >= TAIL

    def _firsts_alone(self, device: torch.device) -> bool:
        """Whether the last layer can work for first tokens alone: without padding by our kernel only, else not with attention dropout.

        (Dropped weights would have to scale the values' bias, too.)
        """
        if not self.ragged:
            return False
        if self._unpadded(device):
            return self.execution.attention != "library" and not triton_missing()
        attention = self.model.encoder.layer[-1].attention.self
        return not (attention.training and attention.dropout.p > 0)

    def _ragged_layers(
        self, batch: TokenBatch, firsts_only: bool, unpadded: bool, seed: Tensor | None = None
    ) -> Iterator[Tensor]:
        if getattr(self.config, "type_vocab_size", 0) <= 1:
            batch = replace(batch, segments=torch.zeros_like(batch.segments))
        layout = RaggedLayout.of(batch)
        firsts = batch.cu_seqlens[:-1]
        places: Any = (layout, 0.0)
        run: Any = post_norm_layer
        heads = self.model.encoder.layer[0].attention.self.num_attention_heads
        parts: Any = Parts(plain_attend(padded_attention), padded_average, plain_widen(self._activation), plain_join)
        if unpadded:
            parts, run = self._kernels(batch.max_length, heads, batch.tokens.device)
            # the row of filling, too, so that there is never one row only, which compiled code would take for a
            # constant
            firsts = firsts.clamp(max=batch.num_tokens - 1)
            # few values, since a new one compiles the layers again; our kernels go by blocks
            shortest = 64 if parts.attend is plain_attend(library_attention) else 512
            longest = max(shortest, 1 << (batch.max_length - 1).bit_length())
            places = (batch.cu_seqlens, layout.cu_keys, layout.keys, longest, layout.blocks)
        hashes = self._dropout_hashes(layout, seed)
        states = self._embedded(batch.segments, layout, None if hashes is None else hashes[0], run, unpadded)
        yield states
        for number, layer in enumerate(self.model.encoder.layer):
            if not unpadded:
                attention = layer.attention.self
                places = (layout, attention.dropout.p if attention.training else 0.0)
            own = None if hashes is None else hashes[2 * number + 1 : 2 * number + 3]
            wanted = firsts if firsts_only and number == self.num_layers - 1 else None
            if own is not None and wanted is not None:
                own = own.index_select(1, wanted)
            drop, epsilon = layer.output.dropout.p, layer.output.LayerNorm.eps
            states = run(states, layer_weights(layer), heads, drop, own, epsilon, wanted, parts, places)
            yield states

    def _embedded(
        self, segments: Tensor, layout: RaggedLayout, hashes: Tensor | None, run: Callable[..., Tensor], unpadded: bool
    ) -> Tensor:
        """The states before the first layer, on the way without padding in the precision that all layers give."""
        embeddings, shift = self.model.embeddings, position_shift(self.config)
        words = embeddings.word_embeddings.weight
        dtype = torch.get_autocast_dtype("cuda") if unpadded and torch.is_autocast_enabled("cuda") else words.dtype
        if run is kernel_layer and self._known_words and embeddings.token_type_embeddings.num_embeddings <= FEW:
            states = embedded(embeddings, segments, layout, shift, hashes, self._dropped, dtype)
        else:
            states = embeddings.word_embeddings(layout.batch.tokens) + position_embedding(
                embeddings.position_embeddings, layout, shift
            )
            states = embeddings.LayerNorm(states + segment_embedding(embeddings.token_type_embeddings, segments))
            if hashes is not None:
                dropout = compiled_dropout if run is compiled_layer else hashed_dropout
                states = dropout(states, hashes, self._dropped)
        if hasattr(self.model, "embeddings_project"):  # ELECTRA
            states = self.model.embeddings_project(states)
        return states.to(dtype) if unpadded else states

    @property
    def _dropped(self) -> float:
        """The share of numbers that is dropped now; what the embeddings' mode and rate say, they say for all."""
        dropout = self.model.embeddings.dropout
        return dropout.p if dropout.training else 0.0

    def _seed(self) -> int:
        return int(torch.randint(2**62, ())) if self.dropout_seed is None else self.dropout_seed

    def _dropout_hashes(self, layout: RaggedLayout, seed: Tensor | None) -> Tensor | None:
        """What embeddings and both places of each layer drop by, int32 [1 + 2 * layers, tokens]; None where nothing is dropped."""
        if not self._dropped:
            return None
        names = layout.rows if layout.batch.names is None else layout.batch.names[layout.rows]
        return dropout_hashes(self._seed() if seed is None else seed, names, layout.positions, 1 + 2 * self.num_layers)

    @property
    def _activation(self) -> Callable[[Tensor], Tensor]:
        """Of the feed-forward part, the same in all layers."""
        return self.model.encoder.layer[0].intermediate.intermediate_act_fn

    def _kernels(
        self, max_length: int, heads: int, device: torch.device
    ) -> tuple[Parts | Kernels, Callable[..., Tensor]]:
        """What a layer is made of and the function that runs it, on CUDA in half precision."""
        execution = self.execution
        why_not = (
            "encoder.attention=library"
            if execution.attention == "library"
            else short_missing(self.dim // heads, max_length)
        )
        if why_not and execution.attention == "short":
            raise ConfigError(f"encoder.attention: expected auto or library, got 'short', but {why_not}")
        other = (
            ""
            if isinstance(self._activation, GELUActivation)
            else f"the activation is {self.config.hidden_act}, not gelu"
        )
        apart = "encoder.fused=false" if execution.fused is False else triton_missing() or why_not or other
        if execution.fused is True and (triton_missing() or other):
            raise ConfigError(f"encoder.fused: expected auto or false, got true, but {triton_missing() or other}")
        if not apart:
            self._tell("layers through kernels of our own; attention dropout is off in them")
            return triton_kernels(), kernel_layer
        name = f"torch's variable-length kernel, because {why_not}" if why_not else "the kernel for short rows"
        self._tell(f"{name}; attention dropout is off in it")
        self._tell(f"norms and activations without kernels of their own, because {apart}")
        uncompiled = "encoder.compile=false" if execution.compile is False else compile_missing(device)
        if uncompiled and execution.compile is True:
            raise ConfigError(f"encoder.compile: expected auto or false, got true, but {uncompiled}")
        self._tell(f"layers run {'eagerly, because ' + uncompiled if uncompiled else 'compiled'}")
        attend = plain_attend(library_attention if why_not else short_attention)
        parts = Parts(attend, kernel_average, plain_widen(self._activation), plain_join)
        return parts, post_norm_layer if uncompiled else compiled_layer

    def _tell(self, line: str) -> None:
        """Log a line about the path that is taken, once."""
        if line not in self._told:
            self._told.add(line)
            log.info("encoder: %s", line)

    def _padded_layers(self, tokens: Tensor, segments: Tensor, layout: RaggedLayout) -> Iterator[Tensor]:
        inputs = {
            "input_ids": _pad_with(layout, tokens, self.tokenizer.pad_token_id),
            "attention_mask": layout.key_mask.long(),
        }
        if getattr(self.config, "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = layout.pad(segments)
        for states in self.model(**inputs, output_hidden_states=True).hidden_states:
            yield layout.unpad(states)


def _last_of(states: Iterator[Tensor]) -> Tensor:
    return deque(states, maxlen=1).pop()  # keeps no earlier one alive


def _pad_with(layout: RaggedLayout, tokens: Tensor, pad_id: int) -> Tensor:
    return torch.where(layout.mask, layout.pad(tokens), pad_id)
