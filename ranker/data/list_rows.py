"""Rows with a query and several of its docs: compute their numbers of tokens, and build these rows.

A scorer with `reads = "lists"` gets queries and docs as separate texts without special tokens. It builds its rows on
the device, because at inference the docs of a row may depend on the scores of other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ranker.data.ragged import ranges, row_offsets
from ranker.types import RankBatch, TokenBatch


class ListRows(Protocol):
    """Describes the rows that a scorer builds from a query and its docs."""

    def tokens(self, query_lengths: np.ndarray, doc_lengths: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return for each list the number of tokens of all its rows, int64 [lists].

        Args:
            query_lengths: Number of tokens of each query, int64 [lists].
            doc_lengths: Number of tokens of each doc, int64 [lists, docs].
            mask: True if a list has a doc in this cell, bool [lists, docs].
        """
        ...


@dataclass(frozen=True)
class JoinedRows:
    """One row per list, with the query and all docs.

    Args:
        queries: How often a row contains the query.
        per_row: Number of further tokens of a row, without the texts and `per_doc`.
        per_doc: Number of additional tokens for each doc.
    """

    queries: int
    per_row: int
    per_doc: int

    def tokens(self, query_lengths: np.ndarray, doc_lengths: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """See `ListRows`."""
        docs: np.ndarray = ((doc_lengths + self.per_doc) * mask).sum(axis=1)
        return docs + self.queries * query_lengths + self.per_row


@dataclass(frozen=True)
class DocPairRows:
    """A row for each ordered pair of docs among the first `top` docs of a list.

    Args:
        per_row: Number of further tokens of a row, without query and docs.
        top: Number of docs of a list that are compared with each other.
    """

    per_row: int
    top: int

    def tokens(self, query_lengths: np.ndarray, doc_lengths: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """See `ListRows`."""
        compared = mask & (mask.cumsum(axis=1) <= self.top)
        docs = compared.sum(axis=1)
        sums: np.ndarray = (doc_lengths * compared).sum(axis=1)
        return 2 * (docs - 1) * sums + docs * (docs - 1) * (query_lengths + self.per_row)


@dataclass(frozen=True)
class ListTexts:
    """The texts of a batch of lists in one array of tokens, with the start and length of each text.

    Args:
        tokens: Tokens of all queries, then of all docs, then of the literals (see `of`), int64 [tokens], on the device.
        query_starts: Index of each query's first token, int64 [lists].
        query_lengths: Number of tokens of each query, int64 [lists].
        doc_starts: Index of each doc's first token, int64 [docs].
        doc_lengths: Number of tokens of each doc, int64 [docs].
        counts: Number of docs of each list, int64 [lists].
        literal_starts: Index of the first token of each literal, int64 [literals].
        literal_lengths: Number of tokens of each literal, int64 [literals].
    """

    tokens: Tensor
    query_starts: np.ndarray
    query_lengths: np.ndarray
    doc_starts: np.ndarray
    doc_lengths: np.ndarray
    counts: np.ndarray
    literal_starts: np.ndarray
    literal_lengths: np.ndarray

    @classmethod
    def of(cls, batch: RankBatch, literals: list[tuple[int, ...]]) -> ListTexts:
        """Collect the texts of a batch. The CPU waits for a copy of their lengths from the GPU.

        Args:
            batch: A batch with `queries` and `docs`.
            literals: Fixed sequences of token ids that rows contain besides the texts, such as special tokens.
        """
        queries, docs = batch.queries, batch.docs
        assert queries is not None and docs is not None
        lengths = [len(literal) for literal in literals]
        ids = torch.tensor([token for literal in literals for token in literal], dtype=torch.int64)
        tokens = torch.cat([queries.tokens, docs.tokens, ids.to(queries.tokens.device)])
        sizes = torch.cat([queries.cu_seqlens, docs.cu_seqlens, batch.doc_mask.sum(1).int()]).cpu().numpy()
        sizes = sizes.astype(np.int64)
        of_queries, of_docs, counts = np.split(sizes, np.cumsum([queries.num_rows + 1, docs.num_rows + 1]))
        first_doc, first_literal = queries.num_tokens, queries.num_tokens + docs.num_tokens
        return cls(
            tokens, of_queries[:-1], np.diff(of_queries), first_doc + of_docs[:-1], np.diff(of_docs), counts,
            first_literal + row_offsets(lengths)[:-1], np.array(lengths),
        )  # fmt: skip

    def first_docs(self) -> np.ndarray:
        """Return the index of each list's first doc among all docs of the batch, int64 [lists]."""
        return row_offsets(self.counts)[:-1]


@dataclass(frozen=True)
class Pieces:
    """Rows that are sequences of pieces. A piece is a slice of the array of tokens. Pieces are in order, row by row.

    Args:
        starts: Index of each piece's first token in the array, int64 [pieces].
        lengths: Number of tokens of each piece, int64 [pieces].
        segments: Segment id of each piece, int64 [pieces].
        counts: Number of pieces of each row, int64 [rows].
    """

    starts: np.ndarray
    lengths: np.ndarray
    segments: np.ndarray
    counts: np.ndarray

    @property
    def row_lengths(self) -> np.ndarray:
        """Number of tokens of each row, int64 [rows]."""
        before = row_offsets(self.lengths)
        return np.diff(before[row_offsets(self.counts)])

    def ends(self) -> np.ndarray:
        """Return the index of each piece's last token in the batch of rows, int64 [pieces]."""
        return row_offsets(self.lengths)[1:] - 1

    def joined(self, tokens: Tensor, row_ids: np.ndarray | None = None) -> TokenBatch:
        """Return the rows as a batch.

        Args:
            tokens: The array of tokens.
            row_ids: See `TokenBatch`, int64 [rows].
        """
        device, lengths = tokens.device, self.row_lengths
        chosen = torch.from_numpy(ranges(self.starts, self.lengths)).to(device)
        return TokenBatch(
            tokens.index_select(0, chosen),
            torch.from_numpy(np.repeat(self.segments, self.lengths)).to(device),
            torch.from_numpy(row_offsets(lengths).astype(np.int32)).to(device),
            int(lengths.max()),
            row_ids=None if row_ids is None else torch.from_numpy(row_ids).to(device),
        )
