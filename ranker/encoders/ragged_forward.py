"""The forward pass of models whose layers this package knows. Linear layers compute no padding within rows."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ranker.encoders.attention import short_unavailable
from ranker.encoders.distilbert_stack import DistilBertStack
from ranker.encoders.execution import Execution
from ranker.encoders.family import family_of
from ranker.encoders.graphs import MAX_SMALL_PASS, ROW_MULTIPLE, Graphs, rounding
from ranker.encoders.passes import Begin, ForwardPass, Output
from ranker.encoders.paths import attention_is_unpadded, can_skip_other_tokens, lists_have_kernels
from ranker.encoders.post_norm_stack import PostNormStack
from ranker.encoders.pre_norm_stack import PreNormStack
from ranker.encoders.ragged import RaggedLayout, pad_to_tiles
from ranker.encoders.stack import RaggedPass, Stack, draw_seed
from ranker.types import TokenBatch

log = logging.getLogger(__name__)
STACKS: Mapping[str, Stack] = {  # by the value of `Family.layers`
    "bert": PostNormStack(),
    "distilbert": DistilBertStack(),
    "modernbert": PreNormStack(),
}


class RaggedForward:
    """Run batches without padding. Small training passes on CUDA are replayed as CUDA graphs.

    Args:
        execution: Options.
        ids_in_table: Whether the word table has a row for every token id of the tokenizer. If False, torch's lookup
            replaces the embedding kernel, because only torch reports an id that is out of range.
    """

    def __init__(self, execution: Execution, ids_in_table: bool) -> None:
        self.execution = execution
        self.graphs = Graphs()
        self._ids_in_table = ids_in_table
        self._logged: set[str] = set()

    def __call__(
        self,
        model: Any,
        batch: TokenBatch,
        output: Output,
        training: bool,
        dropout_seed: int | None,
        begin: Begin | None = None,
        skipped: frozenset[int] = frozenset(),
    ) -> ForwardPass:
        """Run the model over a batch.

        Args:
            model: A transformers model of a family with `Family.layers`.
            batch: The batch.
            output: States to return.
            training: Whether the encoder is in training mode; only then passes are replayed.
            dropout_seed: Seed of the dropout masks; None: drawn from torch's generator if dropout is on.
            begin: The point from which the pass continues; None: it begins at the embeddings.
            skipped: Indices of the layers that this pass leaves out. A pass that may leave out layers is not replayed.
        """
        unpadded = attention_is_unpadded(model, batch.tokens.device, self._log_once)
        if batch.lists is not None and unpadded:
            unpadded = lists_have_kernels(model, self.execution, batch.max_length)
        one_layer = output is not Output.ALL_LAYERS
        replay = unpadded and training and one_layer and not skipped and self._may_replay(model, batch)
        if replay:
            batch = pad_to_tiles(batch, rounding(batch.num_tokens), ROW_MULTIPLE)
        elif unpadded:
            batch = pad_to_tiles(batch)
        if replay:
            states = self._replayed(model, batch, dropout_seed, output)
        else:
            states = self._states(model, batch, unpadded, dropout_seed, output, begin, skipped)
        return ForwardPass(states, batch.num_tokens)

    def can_skip_other_tokens(self, model: Any, batch: TokenBatch) -> bool:
        """Return whether `Output.FIRST_TOKENS` is available; see `paths.can_skip_other_tokens`."""
        if batch.lists is not None:  # kernels leave the other tokens out; elsewhere they are dropped after attention
            return True
        unpadded = attention_is_unpadded(model, batch.tokens.device, self._log_once)
        return can_skip_other_tokens(model, self.execution, unpadded, _stack_of(model).attention_dropout(model))

    def _may_replay(self, model: Any, batch: TokenBatch) -> bool:
        """Return whether a CUDA graph may ever replay this training pass; its sizes are then rounded up.

        The decision depends only on the batch, the model and the options. So a resumed or repeated step is padded to
        the same sizes and gives the same bits.
        """
        graphs, config = self.execution.graphs, model.config
        if graphs is False or batch.attended is not None or batch.lists is not None or self.execution.checkpointing:
            return False
        if graphs == "auto":
            weights = config.num_hidden_layers * _stack_of(model).weights_per_layer(config)
            if batch.num_tokens * weights > MAX_SMALL_PASS:
                return False
        return self.execution.attention != "library" and not short_unavailable(
            config.hidden_size // config.num_attention_heads, batch.max_length
        )

    def _replayed(self, model: Any, batch: TokenBatch, dropout_seed: int | None, output: Output) -> Iterator[Tensor]:
        """Yield the last layer's states from a CUDA graph, or from a plain pass if there is no graph (yet)."""
        rates = _stack_of(model).rates(model)
        seed = draw_seed(dropout_seed) if any(rates) else 0
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        replayed = self.graphs(
            lambda inputs, graph_seed: last(self._states(model, inputs, True, graph_seed, output)),
            batch,
            seed,
            model,
            (output, rates, dtype, self.execution),
        )
        if self.graphs.why_off:
            self._log_once(f"no more CUDA graphs are captured, because {self.graphs.why_off}")
        if replayed is not None:
            self._log_once("small training passes are replayed as CUDA graphs")
        yield last(self._states(model, batch, True, seed, output)) if replayed is None else replayed

    def _states(
        self,
        model: Any,
        batch: TokenBatch,
        unpadded: bool,
        seed: int | Tensor | None,
        output: Output,
        begin: Begin | None = None,
        skipped: frozenset[int] = frozenset(),
    ) -> Iterator[Tensor]:
        """Yield the states after the embeddings and after each layer."""
        yield from _stack_of(model).states(
            model,
            RaggedPass(
                RaggedLayout.of(batch),
                self.execution,
                output,
                unpadded,
                seed,
                self._ids_in_table,
                self._log_once,
                begin,
                skipped,
            ),
        )

    def _log_once(self, line: str) -> None:
        """Log a line about the chosen path, unless it was logged before."""
        if line not in self._logged:
            self._logged.add(line)
            log.info("encoder: %s", line)


def last(states: Iterator[Tensor]) -> Tensor:
    """Return the last states of an iterator without keeping earlier ones in memory."""
    return deque(states, maxlen=1).pop()


def _stack_of(model: Any) -> Stack:
    return STACKS[family_of(model.config).layers or ""]
