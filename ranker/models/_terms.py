"""Shared code of models with term weights: which tokens are words, vectors of word counts, and scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ranker.data.template import Template
from ranker.encoders.encoder import Encoder
from ranker.interactions.grid import to_grid
from ranker.interactions.maxsim import TextVectors
from ranker.types import RankBatch, TokenBatch


def counted_tokens(encoder: Encoder, words: int) -> Tensor:
    """Return which token ids are words, bool [words]: all ids except special tokens.

    Args:
        encoder: The encoder, whose tokenizer names the special tokens.
        words: Size of a vector.
    """
    counted = torch.ones(words, dtype=torch.bool)
    tokenizer = encoder.tokenizer
    special = {*tokenizer.all_special_ids, *(token for part in Template.of(tokenizer, 1).specials for token in part)}
    counted[[token for token in special if token < words]] = False
    return counted


def row_of_each_token(batch: TokenBatch) -> Tensor:
    """Return the row of each token, int64 [tokens]."""
    rows = torch.arange(batch.num_rows, device=batch.tokens.device)
    return torch.repeat_interleave(rows, batch.cu_seqlens.diff().long(), output_size=batch.num_tokens)


def token_counts(batch: TokenBatch, counted: Tensor) -> Tensor:
    """Return how often each word occurs in each row, int64 [rows, words].

    Args:
        batch: The texts.
        counted: Which token ids are words, bool [words].
    """
    cells = row_of_each_token(batch) * len(counted) + batch.tokens
    counts = counted[batch.tokens].long()
    grid = torch.zeros(batch.num_rows * len(counted), dtype=torch.int64, device=batch.tokens.device)
    return grid.index_add_(0, cells, counts).view(batch.num_rows, -1)


def inverse_document_frequencies(frequencies: Tensor, num_docs: int) -> Tensor:
    r"""Return the weight of each word, float32 [words], as Lucene's BM25 does.

    .. math:: \log\left(1 + \frac{N - n_t + 0.5}{n_t + 0.5}\right)

    Args:
        frequencies: Number of docs with each word, int64 [words].
        num_docs: Number of docs.
    """
    counts = frequencies.double()
    return torch.log1p((num_docs - counts + 0.5) / (counts + 0.5)).float()


class TermScorer(nn.Module):
    """A bi-encoder whose vectors are term weights; a score is the inner product of two vectors, in float32."""

    encode_queries: Callable[[TokenBatch], TextVectors]
    encode_docs: Callable[[TokenBatch], TextVectors]

    def doc_vector_counts(self, batch: TokenBatch) -> Tensor:
        """Return 1 for each doc, int64 [docs]."""
        return torch.ones(batch.num_rows, dtype=torch.int64, device=batch.tokens.device)

    def score_block(self, queries: TextVectors, docs: TextVectors) -> Tensor:
        """Score every query with every doc, [queries, docs]."""
        with torch.autocast(queries.values.device.type, enabled=False):
            return queries.values @ docs.values.T

    def scoring_parameters(self) -> list[nn.Parameter]:
        """Return an empty list: `score_block` reads no trained parameters."""
        return []

    def divisor(self) -> float:
        """Return 1: inner products are not divided by a temperature."""
        return 1.0

    def forward(self, batch: RankBatch) -> Tensor:
        """Return scores [batch, docs] of each query with the docs of its group; 0 in cells without a doc."""
        assert batch.queries is not None and batch.docs is not None
        docs = self.encode_docs(batch.docs)  # docs are encoded before queries, as in ContrastiveModule
        queries = self.encode_queries(batch.queries)
        owners = batch.doc_mask.nonzero_static(size=batch.docs.num_rows)[:, 0]
        with torch.autocast(docs.values.device.type, enabled=False):
            scores = (queries.values.index_select(0, owners) * docs.values).sum(1)
        return to_grid(scores, batch.doc_mask)
