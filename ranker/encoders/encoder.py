"""The encoder: ragged token batches to hidden states, for any Hugging Face encoder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from ranker.encoders.execution import DEFAULT, Execution
from ranker.encoders.family import family_of, max_positions
from ranker.encoders.graphs import Graphs
from ranker.encoders.padded import padded_forward
from ranker.encoders.passes import Output
from ranker.encoders.ragged_forward import RaggedForward, last
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

    Families whose layers this package knows (`Family.layers`) run without padding: every linear layer sees real tokens
    only (`ragged_forward`). Others are padded and run through transformers' own forward (`padded`). Both give the same
    states. On CUDA in half precision, attention also runs without padding; it then applies no attention dropout. Layers
    run through this package's kernels, or as compiled functions where the kernels cannot run (`paths`).

    Args:
        model: The transformers model, without its pooler.
        tokenizer: Its fast tokenizer.
        execution: How to compute.

    Attributes:
        ragged: Whether batches run without padding: `execution.ragged`, if the family can.
        work: Tokens of the training passes since it was last reset, see `Work`.
        dropout_seed: Seed of the dropout masks, set for each optimizer step; None: each forward pass draws one.
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
        self.ragged = execution.ragged and family_of(model.config).layers is not None
        self.work = Work()
        self.dropout_seed: int | None = None
        words: Any = model.get_input_embeddings()
        self._ragged_forward = RaggedForward(execution, ids_in_table=len(tokenizer) <= len(words.weight))
        self._logged_padded = False

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
        """Longest sequence that the position table has room for, special tokens included."""
        return max_positions(self.config, self.model)

    def forward(self, batch: TokenBatch) -> Tensor:
        """Return the last layer's states, [tokens, dim]."""
        return last(self._run(batch, Output.LAST_LAYER))[: batch.num_tokens].to(self.model.dtype)

    def pooled(self, batch: TokenBatch, pooling: str) -> Tensor:
        """Return one vector per row, [rows, dim]: the last layer's states, pooled (`pool`).

        For `cls` the last layer computes the first tokens' states alone where it can: 8 % fewer FLOPs for BERT-base.

        Args:
            batch: The batch.
            pooling: `cls`, `mean` or `max`.
        """
        first_tokens = pooling == "cls" and self.ragged
        if not (first_tokens and self._ragged_forward.can_skip_other_tokens(self.model, batch.tokens.device)):
            return pool(self(batch), batch, pooling)
        return last(self._run(batch, Output.FIRST_TOKENS))[: batch.num_rows].to(self.model.dtype)

    def layers(self, batch: TokenBatch) -> Iterator[Tensor]:
        """Yield the states after the embeddings and after each layer, each [tokens, dim].

        Layers run when they are read: stop early to skip the rest.
        """
        for states in self._run(batch, Output.ALL_LAYERS):
            yield states[: batch.num_tokens].to(self.model.dtype)

    def end_training(self) -> None:
        """Draw dropout seeds at random again, and free the memory of CUDA graphs."""
        self.dropout_seed, self._ragged_forward.graphs = None, Graphs()

    def _run(self, batch: TokenBatch, output: Output) -> Iterator[Tensor]:
        """Yield the states of a forward pass, see `ForwardPass`, and add a training pass to `work`."""
        if self.ragged:
            forward = self._ragged_forward(self.model, batch, output, self.training, self.dropout_seed)
        else:
            self._log_padded()
            forward = padded_forward(self.model, batch, self.tokenizer.pad_token_id)
        # a pass without gradients, as GradCache's first one, is repeated later and counted then
        if self.training and torch.is_grad_enabled():
            self.work.computed_tokens += forward.computed_tokens
            self.work.last_layer_tokens += batch.num_rows if output is Output.FIRST_TOKENS else batch.num_tokens
        yield from forward.states

    def _log_padded(self) -> None:
        if not self._logged_padded:
            self._logged_padded = True
            model_type = self.config.model_type
            log.info("encoder: padded batches through transformers' own forward (%s, ragged=false)", model_type)
