"""What models of term weights share: which tokens of a text count, and vectors of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ranker.data.template import Template
from ranker.encoders.encoder import Encoder
from ranker.types import TokenBatch


def counted_tokens(encoder: Encoder, words: int) -> Tensor:
    """Return which token ids are words of texts, bool [words]; special tokens are not.

    Args:
        encoder: Its tokenizer names the special tokens.
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
