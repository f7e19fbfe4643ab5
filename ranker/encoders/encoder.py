"""The encoder turns ragged token batches into hidden states, for any Hugging Face encoder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from ranker.encoders.lower_layers import final_norm, with_lower_layers
from ranker.encoders.model_runner import ModelRunner
from ranker.encoders.passes import Begin, Output
from ranker.encoders.ragged_forward import last
from ranker.encoders.shared_prefix import SharedPrefixes
from ranker.errors import ConfigError
from ranker.interactions.pooling import pool
from ranker.types import TokenBatch


class Encoder(ModelRunner):
    """Turn ragged token batches into states: one vector for each token.

    `ModelRunner` defines the constructor, the attributes, and the ways to run a batch, called paths (with and without
    padding). A row's states do not depend on the other rows.
    """

    def forward(self, batch: TokenBatch) -> Tensor:
        """Return the last layer's states, [tokens, dim]."""
        return last(self._run(batch, Output.LAST_LAYER))[: batch.num_tokens].to(self.model.dtype)

    def pooled(self, batch: TokenBatch, pooling: str) -> Tensor:
        """Return one vector per row, [rows, dim]: the last layer's states, pooled (`pool`).

        For `cls`, the last layer computes only the first tokens' states if it can: 8 % fewer FLOPs for BERT-base.

        Args:
            batch: The batch.
            pooling: One of `ranker.interactions.pooling.POOLINGS`.
        """
        first_tokens = pooling == "cls" and self._forward is None
        if not (first_tokens and self._ragged_forward.can_skip_other_tokens(self.model, batch)):
            return pool(self(batch), batch, pooling)
        return last(self._run(batch, Output.FIRST_TOKENS))[: batch.num_rows].to(self.model.dtype)

    def first_tokens_of(self, batch: TokenBatch, layer: int) -> Tensor | None:
        """Return the state of each row's first token after a layer, [rows, dim]; no higher layer is computed.

        Args:
            batch: The batch.
            layer: Number of layers to run, from 1.

        Returns:
            The states, or None if the encoder can't compute first tokens alone after this layer.
        """
        if not (self.resumes and self._ragged_forward.can_skip_other_tokens(self.model, batch)):
            return None
        above = frozenset(range(layer, self.num_layers))
        return last(self._run(batch, Output.FIRST_TOKENS, skipped=above))[: batch.num_rows].to(self.model.dtype)

    def last_of_groups(self, batch: TokenBatch, sizes: Sequence[int]) -> Tensor:
        """Return the last layer's state of each row's last token, [rows, dim]; compute a group's common prefix once.

        In training, the dropout masks of a prefix are those of the first row of its group.

        Args:
            batch: The batch.
            sizes: Number of rows of each group, in the order of the rows.
        """
        prefixes = SharedPrefixes.of(batch, sizes, across=not self.training)
        return last(self._run(prefixes.batch, Output.LAST_LAYER, prefixes))[prefixes.last].to(self.model.dtype)

    @property
    def resumes(self) -> bool:
        """Whether `layers` can continue from given states."""
        return self.path == "bert"

    def layers(self, batch: TokenBatch, begin: Begin | None = None) -> Iterator[Tensor]:
        """Yield the states after the embeddings and after each layer, each [tokens, dim].

        A layer runs when its states are read. If the caller stops reading, the remaining layers do not run (except in
        transformers' own forward pass).

        Args:
            batch: The batch.
            begin: A layer, and states after it. These states are yielded first, in place of the embeddings. Only
                possible if `resumes` is true.
        """
        for states in self._run(batch, Output.ALL_LAYERS, begin=begin):
            yield states[: batch.num_tokens].to(self.model.dtype)

    def states_after(self, batch: TokenBatch, layers: Collection[int]) -> list[Tensor]:
        """Return the states after the first n layers for each n in `layers`, [tokens, dim] each, the smallest n first.

        The states for n are those that `lower(n)` would return.

        Args:
            batch: The batch.
            layers: Values of n, from 0 (the embeddings) to `num_layers`.
        """
        found, norm = [], final_norm(self.model, self.num_layers)
        for number, states in enumerate(self.layers(batch)):
            if number in layers:
                found.append(states if norm is None or number == self.num_layers else norm(states).to(states.dtype))
        return found

    def lower(self, layers: int) -> Encoder:
        """Return an encoder of the lower layers, which shares the weights of this encoder.

        Args:
            layers: Number of layers to keep.

        Raises:
            ConfigError: The encoder has fewer layers, or its layers are not in one list.
        """
        lower: Encoder = with_lower_layers(self, layers)
        lower._traits = replace(self._traits, num_layers=layers)
        return lower

    def layers_and_attention(self, batch: TokenBatch) -> tuple[list[Tensor], list[Tensor]]:
        """Return the states after the embeddings and after each layer, and each layer's attention weights.

        Args:
            batch: The batch.

        Returns:
            States [tokens, dim], and attention weights [tokens, heads, longest row], which are 0 for keys outside of
            the token's row.

        Raises:
            ConfigError: The encoder runs without padding and does not compute attention weights, or its family does not
                return them.
        """
        if self.ragged:
            raise ConfigError("encoder.ragged: expected false to read attention weights, got true")
        found = list(self._run(batch, Output.ATTENTION))
        count = self.num_layers
        if len(found) != 2 * count + 1:
            raise ConfigError(
                f"distill.attention: expected a family whose layers all return attention, got {self.config.model_type}"
            )
        return [states.to(self.model.dtype) for states in found[: count + 1]], found[count + 1 :]
