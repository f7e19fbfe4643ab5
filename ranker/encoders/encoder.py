"""The encoder: ragged token batches to hidden states, for any Hugging Face encoder."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from ranker.encoders.dropout import HashedDropout
from ranker.encoders.execution import DEFAULT, Execution
from ranker.encoders.family import family_of, first_position, max_positions
from ranker.encoders.graphs import Graphs
from ranker.encoders.lora import has_adapter
from ranker.encoders.passes import Output
from ranker.encoders.ragged_forward import RaggedForward, last
from ranker.encoders.shared_prefix import SharedPrefixes
from ranker.encoders.traits import Traits, common_tokens, measure, one_row, reads_segments
from ranker.encoders.transformers_forward import NEAR, Request, TransformersForward
from ranker.interactions.pooling import pool
from ranker.types import TokenBatch

log = logging.getLogger(__name__)


@dataclass
class TokenCounts:
    """What the training passes of an encoder computed, in tokens.

    Args:
        computed_tokens: Tokens that the layers worked on, padding included.
        last_layer_tokens: Real tokens that went through the last layer's weights.
    """

    computed_tokens: int = 0
    last_layer_tokens: int = 0


CACHE_LINE = 64  # bytes; torch's own tensors begin at a multiple of it


class Encoder(nn.Module):
    """Turn ragged token batches into states, one vector per token.

    Every family runs on the fastest path on which a row has the same states as alone (`path`):

    - `bert`, `modernbert`: families with these layers (`Family.layers`) without padding, by layers of this package
      (`ragged_forward`);
    - `packed`: transformers' own forward on one row that holds all texts, without padding;
    - `padded`: transformers' own forward on groups of rows of near lengths, each padded to its longest row;
    - `by_length`: the same on groups of equal length, for families whose states depend on padding.

    The first two are facts about families (`Family.layers`); the others are measured (`traits`). On CUDA in half
    precision, attention also runs without padding; it then applies no attention dropout.

    Args:
        model: The transformers model, without its pooler.
        tokenizer: Its fast tokenizer.
        execution: Options of execution.

    Attributes:
        path: See above.
        token_counts: Tokens of the training passes since it was last reset, see `TokenCounts`.
        source: Folder or hub id that the weights are from; None: they are random, or not from `load_encoder`.
        adapter: Folder of an adapter that was added to these weights; None: none was.
        dropout_seed: Seed of the dropout masks, set for each optimizer step; None: each forward pass draws one.

    Raises:
        CheckpointError: The model does not run on a row by itself.
        ConfigError: An option requires what the family does not have.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        execution: Execution = DEFAULT,
    ) -> None:
        super().__init__()
        _align(model)
        self.model: Any = model
        self.tokenizer = tokenizer
        self.execution = execution
        self.token_counts = TokenCounts()
        self.source: str | None = None
        self.adapter: str | None = None
        self._first_token_is_global = False
        self.dropout_seed: int | None = None
        words: Any = model.get_input_embeddings()
        self._ragged_forward = RaggedForward(execution, ids_in_table=len(tokenizer) <= len(words.weight))
        self._logged_path = False
        family = family_of(model.config)
        if execution.ragged and family.layers is not None and not has_adapter(model):
            config = model.config
            self._traits = Traits(family.layers, first_position(config), config.hidden_size, config.num_hidden_layers)
            self._forward = None
        else:
            ids = common_tokens(tokenizer, len(words.weight))
            self._forward = TransformersForward(model, reads_segments(model.config, tokenizer))
            self._traits = measure(model, self._forward, ids, execution.ragged, family)
            self._forward.find_dropout(model, one_row(ids, words.weight.device), self.path == "packed")
            if execution.checkpointing:
                self._forward.checkpoint_activations(model, self._traits.num_layers)

    @property
    def path(self) -> str:
        """How batches run: `bert`, `modernbert`, `packed`, `padded` or `by_length`."""
        return self._traits.path

    @property
    def ragged(self) -> bool:
        """Whether batches run without padding."""
        return self.path not in ("padded", "by_length")

    @property
    def reads_segments(self) -> bool:
        """Whether states depend on segment ids."""
        return getattr(self.config, "type_vocab_size", 0) > 1 if self._forward is None else self._forward.reads_segments

    @property
    def config(self) -> PretrainedConfig:
        """The transformers configuration."""
        return self.model.config

    @property
    def dim(self) -> int:
        """Size of a state."""
        return self._traits.dim

    @property
    def num_layers(self) -> int:
        """Number of transformer layers."""
        return self._traits.num_layers

    @property
    def max_tokens(self) -> int:
        """Longest sequence that the position table has room for, special tokens included."""
        return max_positions(self.config, self.model)

    def make_first_token_global(self) -> None:
        """Let first tokens read all tokens, and all tokens read them, where others see a window (Longformer)."""
        self._first_token_is_global = True
        for name, weight in self.model.named_parameters():
            if "_global." in name:
                weight.requires_grad_(True)

    def forward(self, batch: TokenBatch) -> Tensor:
        """Return the last layer's states, [tokens, dim]."""
        return last(self._run(batch, Output.LAST_LAYER))[: batch.num_tokens].to(self.model.dtype)

    def pooled(self, batch: TokenBatch, pooling: str) -> Tensor:
        """Return one vector per row, [rows, dim]: the last layer's states, pooled (`pool`).

        For `cls` the last layer computes the first tokens' states alone where it can: 8 % fewer FLOPs for BERT-base.

        Args:
            batch: The batch.
            pooling: One of `ranker.interactions.pooling.POOLINGS`.
        """
        first_tokens = pooling == "cls" and self._forward is None
        if not (first_tokens and self._ragged_forward.can_skip_other_tokens(self.model, batch)):
            return pool(self(batch), batch, pooling)
        return last(self._run(batch, Output.FIRST_TOKENS))[: batch.num_rows].to(self.model.dtype)

    def last_of_groups(self, batch: TokenBatch, sizes: Sequence[int]) -> Tensor:
        """Return the last layer's state of each row's last token, [rows, dim]; rows share the prefixes that they have.

        In training, dropout masks of a prefix are those of the first row of its group.

        Args:
            batch: The batch.
            sizes: Number of rows of each group, in the order of the rows.
        """
        prefixes = SharedPrefixes.of(batch, sizes, across=not self.training)
        return last(self._run(prefixes.batch, Output.LAST_LAYER, prefixes))[prefixes.last].to(self.model.dtype)

    def layers(self, batch: TokenBatch) -> Iterator[Tensor]:
        """Yield the states after the embeddings and after each layer, each [tokens, dim].

        Layers run when they are read: stop early to skip the rest (not in transformers' own forward).
        """
        for states in self._run(batch, Output.ALL_LAYERS):
            yield states[: batch.num_tokens].to(self.model.dtype)

    def end_training(self) -> None:
        """Draw dropout seeds at random again, and free the memory of CUDA graphs."""
        self.dropout_seed, self._ragged_forward.graphs = None, Graphs()

    def _run(self, batch: TokenBatch, output: Output, prefixes: SharedPrefixes | None = None) -> Iterator[Tensor]:
        """Yield the states of a forward pass, see `ForwardPass`, and add a training pass to `token_counts`."""
        self._log_path()
        if self._forward is None:
            forward = self._ragged_forward(self.model, batch, output, self.training, self.dropout_seed)
        else:
            every = output is Output.ALL_LAYERS
            request = Request(batch, every, self._mask_seed(), self._first_token_is_global, prefixes)
            if self.path == "packed":
                forward = self._forward.packed(self.model, request, self.execution.compile)
            else:
                forward = self._forward.padded(self.model, request, 1.0 if self.path == "by_length" else NEAR)
        # a pass without gradients, as GradCache's first one, is repeated later and counted then
        if self.training and torch.is_grad_enabled():
            self.token_counts.computed_tokens += forward.computed_tokens
            self.token_counts.last_layer_tokens += batch.num_rows if output is Output.FIRST_TOKENS else batch.num_tokens
        yield from forward.states

    def _mask_seed(self) -> int | None:
        """Return the seed of this pass's dropout masks; None if no dropout is on."""
        dropouts = (module for module in self.model.modules() if isinstance(module, HashedDropout))
        if not any(module.p for module in dropouts if module.training):
            return None
        return int(torch.randint(2**62, ())) if self.dropout_seed is None else self.dropout_seed

    def _log_path(self) -> None:
        if not self._logged_path:
            self._logged_path = True
            if self._forward is not None:
                log.info("encoder: %s", self._traits.described(self.config.model_type))


def _align(model: nn.Module) -> None:
    """Copy weights on the CPU that start inside of a cache line, so that the same weights give the same bits.

    Weights of a file are read in place, wherever they begin in it. Matrix products of some processors add up in an
    order that depends on the address.
    """
    for weight in [*model.parameters(), *model.buffers()]:
        if weight.device.type == "cpu" and weight.data_ptr() % CACHE_LINE:
            weight.data = weight.data.clone()
