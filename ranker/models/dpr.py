"""DPR: a vector per query and per doc, compared by dot product or cosine (Karpukhin et al., 2020, arXiv:2004.04906)."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ranker.data.template import Template
from ranker.encoders.causality import auto_pooling
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import DEFAULT, Execution
from ranker.encoders.fit import check_layout
from ranker.errors import ConfigError
from ranker.export import sentence_transformers
from ranker.interactions.maxsim import TextVectors, full_precision
from ranker.interactions.pooling import POOLINGS, pool
from ranker.models._bi_encoder import (
    ACTIVATIONS,
    check_choice,
    first_numbers,
    new_projection,
    text_limit,
    vector_size,
)
from ranker.models._prompts import check_instruction, prefix_of, prompt_tokens, text_layouts
from ranker.models._vectors import VectorScorer
from ranker.types import TokenBatch

log = logging.getLogger(__name__)


class DPR(VectorScorer):
    r"""Score a query and a doc by the similarity of their vectors.

    .. math:: s(q, d) = \mathrm{sim}(E_q(q), E_d(d)) / \tau

    Args:
        encoder: The encoder of queries, and of docs if `tied`. Otherwise docs have a second encoder, a copy at the
            start.
        pooling: How states become a vector: `cls`, `mean`, `max`, `last` or `weightedmean` (see `pool`), or `auto`
            (see `auto_pooling`).
        tied: Whether queries and docs share all weights.
        similarity: `cosine` or `dot`.
        temperature: Divisor of the similarities; must be positive.
        learn_temperature: Whether the temperature is trained (never below 0.01).
        projection: Size of a linear layer after pooling; None: no such layer.
        activation: Activation after the projection, a key of `ACTIVATIONS`.
        query_prompt: Text before each query, or a template that ends with `{query}`, such as
            `Instruct: {instruction}\nQuery: {query}` (E5, RepLLaMA). Prompt and query are tokenized together. The
            tokenizer's special tokens in the prompt are kept as special tokens.
        doc_prompt: Text before each doc, or a template that ends with `{doc}`; as for queries.
        instruction: Text for `{instruction}` in the prompts.
        in_batch_negatives: Whether the docs of a step's other queries are negatives in training; None: yes,
            unless the labels are a teacher's scores.
        symmetric: Whether each positive doc is also contrasted with the step's other queries.
        matryoshka_dims: Sizes d: training makes the first d dimensions of a vector usable alone. For this key and the
            next three see `ranker.training.matryoshka`.
        matryoshka_layers: Lower layers: training makes their states usable as vectors, too.
        matryoshka_layers_per_step: Number of these layers that each step draws.
        matryoshka_alignment: Weight of the divergence between the vectors after these layers and after the last layer.

    Attributes:
        pools_prompt: Whether the tokens of a prompt are pooled with those of the text; False only for some loaded
            models.
    """

    reads = "texts"
    training_keys = (
        "in_batch_negatives", "symmetric", "matryoshka_dims", "matryoshka_layers", "matryoshka_layers_per_step",
        "matryoshka_alignment",
    )  # fmt: skip
    vectors = "one"
    takes_windows = True

    def __init__(
        self,
        encoder: Encoder,
        pooling: str = "mean",
        tied: bool = True,
        similarity: str = "cosine",
        temperature: float = 0.05,
        learn_temperature: bool = False,
        projection: int | None = None,
        activation: str = "identity",
        query_prompt: str = "",
        doc_prompt: str = "",
        instruction: str = "",
        in_batch_negatives: bool | None = None,
        symmetric: bool = False,
        matryoshka_dims: list[int] | None = None,
        matryoshka_layers: list[int] | None = None,
        matryoshka_layers_per_step: int = 1,
        matryoshka_alignment: float = 1.0,
    ) -> None:
        check_choice("model.pooling", pooling, (*POOLINGS, "auto"))
        check_choice("model.activation", activation, ACTIVATIONS)
        super().__init__(similarity, temperature, learn_temperature)
        if pooling == "auto":
            pooling = auto_pooling(encoder)
            log.info("model.pooling=auto: %s", pooling)
        check_layout(encoder, 1, pooling)
        self.encoder, self.pooling = encoder, pooling
        check_instruction(instruction, query_prompt, doc_prompt)
        self.query_prompt = prefix_of(query_prompt, "query", instruction)
        self.doc_prompt = prefix_of(doc_prompt, "doc", instruction)
        self.in_batch_negatives, self.symmetric = in_batch_negatives, symmetric
        self.matryoshka_dims, self.matryoshka_layers = matryoshka_dims, matryoshka_layers
        self.matryoshka_layers_per_step = matryoshka_layers_per_step
        self.matryoshka_alignment = matryoshka_alignment
        self.projection = (
            new_projection(encoder, projection, bias=True, activation=activation) if projection is not None else None
        )
        self.doc_encoder = None if tied else copy.deepcopy(encoder)
        self.doc_projection = None if tied else copy.deepcopy(self.projection)
        # `load` sets both
        self.text_limits: tuple[int, int] | None = None
        self.pools_prompt = True

    @property
    def tied(self) -> bool:
        """Whether queries and docs share all weights."""
        return self.doc_encoder is None

    @property
    def dim(self) -> int:
        """Size of a vector."""
        return vector_size(self.encoder, self.projection)

    def layouts(self) -> tuple[Template, Template]:
        """Return the layouts of a query and of a doc: special tokens and prompt."""
        return text_layouts(self.encoder.tokenizer, self.query_prompt, self.doc_prompt)

    def prompted_layouts(self, query_prompt: str, doc_prompt: str, instruction: str) -> tuple[Template, Template]:
        """Return the layouts of a query and of a doc with other prompts; for the arguments see the class."""
        check_instruction(instruction, query_prompt, doc_prompt)
        prompts = prefix_of(query_prompt, "query", instruction), prefix_of(doc_prompt, "doc", instruction)
        return text_layouts(self.encoder.tokenizer, *prompts)

    def settings(self) -> dict[str, Any]:
        """Return the options that change the vectors, besides weights and tokenizer.

        Stored vectors have a hash of these options, the weights and the tokenizer.
        """
        return {
            "scorer": "dpr",
            "pooling": self.pooling,
            "similarity": self.similarity,
            "projections": repr((self.projection, self.doc_projection)),
            "pools_prompt": self.pools_prompt,
            "tied": self.tied,
            "layouts": repr(self.layouts()),
        }

    def encode_queries(self, batch: TokenBatch) -> TextVectors:
        """Return one vector per query, float32 [queries, dim]."""
        return self._encode(batch, self.encoder, self.projection, self.query_prompt)

    def encode_docs(self, batch: TokenBatch) -> TextVectors:
        """Return one vector per doc, float32 [docs, dim]."""
        if self.doc_encoder is None:
            return self._encode(batch, self.encoder, self.projection, self.doc_prompt)
        return self._encode(batch, self.doc_encoder, self.doc_projection, self.doc_prompt)

    def _encode(
        self, batch: TokenBatch, encoder: Encoder, projection: nn.Sequential | None, prompt: str
    ) -> TextVectors:
        pooled = self._pooled(batch, encoder, prompt)
        return TextVectors(self.compared(full_precision(pooled if projection is None else projection(pooled))))

    def _pooled(self, batch: TokenBatch, encoder: Encoder, prompt: str) -> Tensor:
        """Return the pooled states of the last layer, [texts, size of a state]."""
        if self.pools_prompt or not prompt:
            return encoder.pooled(batch, self.pooling)
        return self._pool(encoder(batch), batch, prompt)

    def _pool(self, states: Tensor, batch: TokenBatch, prompt: str) -> Tensor:
        skipped = 0 if self.pools_prompt or not prompt else prompt_tokens(self.encoder.tokenizer, prompt)
        return pool(states, batch, self.pooling, skipped=skipped)

    def vectors_after(self, batch: TokenBatch, layers: Sequence[int], docs: bool) -> Tensor:
        """Return the vector of each text after each given layer, before `compared`, float32 [texts, layers, dim].

        Args:
            batch: Either queries or docs.
            layers: Numbers of layers, ascending.
            docs: Whether the texts are docs.
        """
        separate = docs and self.doc_encoder is not None
        encoder, projection = (self.doc_encoder, self.doc_projection) if separate else (self.encoder, self.projection)
        assert encoder is not None
        prompt = self.doc_prompt if docs else self.query_prompt
        if list(layers) == [encoder.num_layers]:
            pooled = [self._pooled(batch, encoder, prompt)]
        else:
            pooled = [self._pool(states, batch, prompt) for states in encoder.states_after(batch, layers)]
        return torch.stack([full_precision(part if projection is None else projection(part)) for part in pooled], 1)

    def smaller(self, layers: int, dim: int) -> DPR:
        """Return a scorer with the lower layers and the first numbers of each vector; both scorers share their weights.

        Args:
            layers: Number of layers to keep.
            dim: Size of a vector. An existing projection is cut to this size; without a projection, one that keeps the
                first numbers is added.

        Raises:
            ConfigError: The model has fewer layers or smaller vectors, or its layers are not in one list.
        """
        if not 1 <= dim <= self.dim:
            raise ConfigError(f"dims: expected 1 to {self.dim}, the size of the model's vectors, got {dim}")
        parts = {id(weight): weight for weight in [*self.parameters(), *self.buffers()]}
        small = copy.deepcopy(self, parts)
        small.encoder = self.encoder.lower(layers)
        small.doc_encoder = None if self.doc_encoder is None else self.doc_encoder.lower(layers)
        if dim < self.dim:
            small.projection = first_numbers(self.encoder, self.projection, dim)
            if self.doc_encoder is not None:
                small.doc_projection = first_numbers(self.doc_encoder, self.doc_projection, dim)
        return small

    @property
    def vector_dim(self) -> int:
        """Size of a doc's vector."""
        return self.dim

    def save(self, folder: Path, max_tokens: int, max_query_tokens: int | None = None) -> None:
        """Write a folder that sentence-transformers loads, see `ranker.export.sentence_transformers.write`.

        Args:
            folder: Where to write.
            max_tokens: Longest doc, special tokens included.
            max_query_tokens: Longest query, special tokens included; None: `max_tokens`.
        """
        query = sentence_transformers.Side(self.encoder, self.projection)
        doc = query if self.doc_encoder is None else sentence_transformers.Side(self.doc_encoder, self.doc_projection)
        learned = self.log_temperature
        model = sentence_transformers.SingleVectorModel(
            query,
            doc,
            self.pooling,
            self.similarity,
            self.query_prompt,
            self.doc_prompt,
            temperature=self.fixed_temperature if learned is None else float(learned.detach()),
            learned=learned is not None,
            pools_prompt=self.pools_prompt,
        )
        sentence_transformers.write(folder, model, max_tokens, max_query_tokens)

    @classmethod
    def load(cls, folder: Path, execution: Execution = DEFAULT) -> DPR:
        """Load a folder in sentence-transformers' layout, written by `save` or by that library.

        Without `scorer.json` the temperature is 1.

        Raises:
            CheckpointError: The folder has a module or a setting that this model does not have.
        """
        model = sentence_transformers.read(folder, execution)
        scorer = cls(
            model.query.encoder,
            pooling=model.pooling,
            similarity=model.similarity,
            query_prompt=model.query_prompt,
            doc_prompt=model.doc_prompt,
            temperature=1.0 if model.learned else model.temperature,
            learn_temperature=model.learned,
        )
        scorer.projection, scorer.pools_prompt = model.query.projection, model.pools_prompt
        if not model.tied:
            scorer.doc_encoder, scorer.doc_projection = model.doc.encoder, model.doc.projection
        if scorer.log_temperature is not None:
            scorer.log_temperature.data.fill_(model.temperature)
        query, doc = scorer.layouts()
        scorer.text_limits = (
            text_limit(model.query.encoder, model.query.lengths, "query_length", query),
            text_limit(model.doc.encoder, model.doc.lengths, "document_length", doc),
        )
        return scorer
