"""SPLADE: a weight for each word of the vocabulary, from the encoder's masked language model (Formal et al., 2021)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ranker.data.template import Template
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import DEFAULT, Execution
from ranker.encoders.fit import check_layout
from ranker.encoders.masked_lm import MaskedLMHead
from ranker.errors import ConfigError
from ranker.export import sparse_encoder
from ranker.interactions.maxsim import TextVectors
from ranker.interactions.term_pooling import ACTIVATIONS, POOLINGS, term_weights
from ranker.models._bi_encoder import check_choice, text_limit
from ranker.models._prompts import prefix_of, text_layouts
from ranker.models._terms import TermScorer, counted_tokens, inverse_document_frequencies, token_counts
from ranker.types import TokenBatch

QUERIES = ("tied", "separate", "idf", "learned")


class SPLADE(TermScorer):
    r"""Score a query and a doc by the inner product of their term weights, one for each word of the vocabulary.

    .. math:: s(q, d) = \sum_j w_j(q) w_j(d), \quad w_j(d) = \max_{i \in d} \log(1 + \mathrm{relu}(l_{ij}))

    where l are the logits of the encoder's masked language model. Sources: Formal et al., 2021 (arXiv:2107.05720 for
    sum; arXiv:2109.10086 for max and for queries without an encoder); Lassance and Clinchant, 2022 (separate encoders).

    Args:
        encoder: The encoder of docs, and with `queries=tied` of queries.
        pooling: Pooling over all tokens of a text, special tokens included: `max` or `sum`.
        activation: `relu`, or `log1p_relu` for one more logarithm.
        queries: How queries get their weights. `tied`: from the encoder of docs. `separate`: from a second encoder,
            which starts as a copy. `idf`: each token has its inverse document frequency in the training collection.
            `learned`: each token has a trained weight, which starts at the inverse document frequency.
        query_prompt: Text before each query, see `DPR`.
        doc_prompt: Text before each doc.
        in_batch_negatives: Whether the docs of a step's other queries are negatives in training; None: yes,
            unless the labels are a teacher's scores.
        symmetric: Whether each positive doc is also contrasted with the step's other queries.
        regularizer: Penalty on term weights in training. For this key and the next three see
            `ranker.training.sparse_module.Sparsity`.
        query_penalty: Factor of the penalty for queries.
        doc_penalty: Factor of the penalty for docs.
        penalty_warmup: Share of the training in which the factors grow.
    """

    reads = "texts"
    training_keys = (
        "in_batch_negatives", "symmetric", "regularizer", "query_penalty", "doc_penalty", "penalty_warmup",
    )  # fmt: skip
    vectors = "terms"
    similarity = "dot"

    def __init__(
        self,
        encoder: Encoder,
        pooling: str = "max",
        activation: str = "relu",
        queries: str = "tied",
        query_prompt: str = "",
        doc_prompt: str = "",
        in_batch_negatives: bool | None = None,
        symmetric: bool = False,
        regularizer: str = "flops",
        query_penalty: float = 3e-4,
        doc_penalty: float = 1e-4,
        penalty_warmup: float = 0.33,
    ) -> None:
        super().__init__()
        check_choice("model.pooling", pooling, POOLINGS)
        check_choice("model.activation", activation, ACTIVATIONS)
        check_choice("model.queries", queries, QUERIES)
        check_layout(encoder, 1)
        self.encoder, self.pooling, self.activation, self.queries = encoder, pooling, activation, queries
        self.query_prompt, self.doc_prompt = prefix_of(query_prompt, "query", ""), prefix_of(doc_prompt, "doc", "")
        if queries in ("idf", "learned") and self.query_prompt:
            raise ConfigError(f"model.query_prompt: expected none with queries={queries}, got {query_prompt!r}")
        self.in_batch_negatives, self.symmetric = in_batch_negatives, symmetric
        self.regularizer, self.query_penalty = regularizer, query_penalty
        self.doc_penalty, self.penalty_warmup = doc_penalty, penalty_warmup
        self.head = MaskedLMHead(encoder)
        self.doc_encoder: Encoder | None = None
        self.doc_head: MaskedLMHead | None = None
        if queries == "separate":
            self.doc_encoder, self.doc_head = copy.deepcopy((self.encoder, self.head))  # both share a matrix
        self.query_weights: nn.Parameter | None = None
        self._counted: Tensor
        if not self.encodes_queries:
            self.query_weights = nn.Parameter(torch.ones(self.dim), requires_grad=queries == "learned")
        self.register_buffer("_counted", counted_tokens(encoder, self.dim), persistent=False)
        self.text_limits: tuple[int, int] | None = None  # set by `load`

    @property
    def encodes_queries(self) -> bool:
        """Whether an encoder computes the weights of queries."""
        return self.queries in ("tied", "separate")

    @property
    def dim(self) -> int:
        """Size of a vector: the number of words."""
        return len(self.head.weight)

    def start_from_docs(self, frequencies: Tensor, num_docs: int) -> None:
        """Set the weights of query tokens to inverse document frequencies; do nothing if queries have an encoder.

        Args:
            frequencies: Number of docs with each token, int64 [words].
            num_docs: Number of docs.
        """
        if self.query_weights is not None:
            self.query_weights.data.copy_(inverse_document_frequencies(frequencies, num_docs))

    def layouts(self) -> tuple[Template, Template]:
        """Return the layouts of a query and of a doc: special tokens and prompt."""
        return text_layouts(self.encoder.tokenizer, self.query_prompt, self.doc_prompt)

    def settings(self) -> dict[str, Any]:
        """Return the options that change the vectors, besides weights and tokenizer; a hash of all is stored."""
        return {
            "scorer": "splade",
            "pooling": self.pooling,
            "activation": self.activation,
            "queries": self.queries,
            "layouts": repr(self.layouts()),
        }

    def encode_queries(self, batch: TokenBatch) -> TextVectors:
        """Return the term weights of queries, float32 [queries, words]."""
        if self.query_weights is not None:
            return TextVectors((token_counts(batch, self._counted) > 0) * self.query_weights)
        return self._encode(batch, self.encoder, self.head)

    def encode_docs(self, batch: TokenBatch) -> TextVectors:
        """Return the term weights of docs, float32 [docs, words]."""
        if self.doc_encoder is None or self.doc_head is None:
            return self._encode(batch, self.encoder, self.head)
        return self._encode(batch, self.doc_encoder, self.doc_head)

    def _encode(self, batch: TokenBatch, encoder: Encoder, head: MaskedLMHead) -> TextVectors:
        inputs = head(encoder(batch))
        return TextVectors(term_weights(inputs, head.weight, head.bias, batch, self.pooling, self.activation))

    def save(self, folder: Path, max_tokens: int, max_query_tokens: int | None = None) -> None:
        """Write a folder that sentence-transformers (5.4 on) loads as a SparseEncoder.

        Args:
            folder: Where to write.
            max_tokens: Longest doc, special tokens included.
            max_query_tokens: Longest query, special tokens included; None: `max_tokens`.
        """
        query = sparse_encoder.Side(self.encoder, self.head)
        doc = query
        if self.doc_encoder is not None and self.doc_head is not None:
            doc = sparse_encoder.Side(self.doc_encoder, self.doc_head)
        weights = self.query_weights
        model = sparse_encoder.SparseModel(
            query,
            doc,
            self.pooling,
            self.activation,
            self.query_prompt,
            self.doc_prompt,
            None if weights is None else weights.detach() * self._counted,
            frozen=self.queries == "idf",
        )
        sparse_encoder.write(folder, model, max_tokens, max_query_tokens)

    @classmethod
    def load(cls, folder: Path, execution: Execution = DEFAULT) -> SPLADE:
        """Load a folder in sentence-transformers' layout, or a masked language model of transformers.

        Raises:
            CheckpointError: The folder has a module or a setting that this model does not have.
        """
        model = sparse_encoder.read(folder, execution)
        queries = "tied" if model.tied else "separate"
        if model.query_weights is not None:
            queries = "idf" if model.frozen else "learned"
        scorer = cls(
            model.query.encoder,
            pooling=model.pooling,
            activation=model.activation,
            queries=queries if queries != "separate" else "tied",
            query_prompt=model.query_prompt,
            doc_prompt=model.doc_prompt,
        )
        scorer.head, scorer.queries = model.query.head, queries
        if queries == "separate":
            scorer.doc_encoder, scorer.doc_head = model.doc.encoder, model.doc.head
        if scorer.query_weights is not None and model.query_weights is not None:
            scorer.query_weights.data.copy_(model.query_weights)
        query, doc = scorer.layouts()
        scorer.text_limits = (
            text_limit(model.query.encoder, model.query.lengths, "query_length", query),
            text_limit(model.doc.encoder, model.doc.lengths, "document_length", doc),
        )
        return scorer
