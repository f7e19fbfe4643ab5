"""The token sequences that an encoder reads, and the mapping from spans of characters to tokens.

As for a ranker, `Template` lays out rows, and rows are truncated by the rule of `Collator`. But `Collator` itself is
not used, for three reasons:

- `Collator` reads stored tokens, which have no character offsets.
- `Collator` makes a row for each candidate, but here each different text or pair has one row.
- All rows of `Collator` have the same layout, but here tasks without queries add single docs to the pairs of a
  cross-encoder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ranker.data.template import Template
from ranker.data.token_store import TokenStore
from ranker.errors import ConfigError
from ranker.probing.examples import Span
from ranker.probing.offset_texts import OffsetTexts
from ranker.probing.sequence_rows import PAIR, distinct_rows, text_lengths, truncate, types_of_rows
from ranker.types import TokenBatch

READS = ("pairs", "texts")


@dataclass(frozen=True)
class Sequences:
    """The token sequences of (query, doc) pairs for an encoder: rows that are sorted by layout and length.

    A cross-encoder reads both texts of a pair in one row (`pairs`). A bi-encoder reads each different text in a row of
    its own (`texts`). If the query of a pair is empty, the row has the doc alone. The *token axis* is the axis of the
    tokens of all rows, one row after another, with special tokens.

    Args:
        texts: The different texts.
        queries: Index of each row's query in `texts`, int64 [rows]; -1: the row has no query.
        docs: Index of each row's doc in `texts`, int64 [rows]; -1: the row has no doc.
        num_kept: Number of tokens of query and doc after truncation, without special tokens, int64 [rows, 2].
        starts: First token of each row on the token axis, int64 [rows + 1].
        pair_rows: Row of each pair's query and row of its doc, int64 [pairs, 2]; -1: there is none.
        pair: Layout of a pair.
        query: Layout of a query alone.
        doc: Layout of a doc alone.
    """

    texts: OffsetTexts
    queries: np.ndarray
    docs: np.ndarray
    num_kept: np.ndarray
    starts: np.ndarray
    pair_rows: np.ndarray
    pair: Template
    query: Template
    doc: Template

    @classmethod
    def of(
        cls,
        pairs: Sequence[tuple[str, str]],
        tokenizer: Any,
        reads: str,
        positions: int,
        max_query_tokens: int,
        max_doc_tokens: int,
        layouts: tuple[Template, Template] | None = None,
    ) -> Sequences:
        """Tokenize, truncate and lay out pairs.

        Args:
            pairs: (query, doc) texts.
            tokenizer: A fast tokenizer.
            reads: `pairs` or `texts`.
            positions: Maximum tokens of a row, special tokens included.
            max_query_tokens: Maximum tokens of a query, special tokens not included.
            max_doc_tokens: Maximum tokens of a doc. In a pair, the doc is also cut to the room that the query leaves.
            layouts: The ranker's layouts of a query alone and of a doc alone; None: the tokenizer's.

        Raises:
            ConfigError: `reads` is unknown, there are too few positions for a pair, or the tokenizer is not a fast one.
        """
        if reads not in READS:
            raise ConfigError(f"reads: expected one of {', '.join(READS)}; got {reads!r}")
        text_index = {text: i for i, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
        texts = OffsetTexts(tokenizer, list(text_index))
        pair, single = Template.of(tokenizer, 2), Template.of(tokenizer, 1)
        templates = (*(layouts or (single, single)), pair)  # in the order of the row types
        if positions < pair.num_special + 2:
            raise ConfigError(
                f"encoder: expected room for at least {pair.num_special + 2} tokens, got {positions} positions"
            )
        pair_texts = np.array(
            [[text_index[query] if query else -1, text_index[doc]] for query, doc in pairs], dtype=np.int64
        )
        rows, pair_rows = distinct_rows(pair_texts, apart=reads == "texts")
        row_types = types_of_rows(rows[:, 0], rows[:, 1])
        room = np.array([min(positions, layout.max_tokens or positions) - layout.num_special for layout in templates])
        num_kept = truncate(text_lengths(texts, rows), row_types, room[row_types], max_query_tokens, max_doc_tokens)
        by_template = np.stack([layout.row_lengths(num_kept.sum(axis=1)) for layout in templates])
        lengths = by_template[row_types, np.arange(len(rows))]
        order = np.lexsort((lengths, row_types))  # sorted, so that a batch has one layout and rows of similar length
        starts = np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int64)
        pair_rows = np.where(pair_texts >= 0, np.argsort(order)[pair_rows], -1)
        return cls(
            texts, rows[order, 0], rows[order, 1], num_kept[order], starts, pair_rows, pair, templates[0], templates[1]
        )

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.queries)

    @property
    def num_tokens(self) -> int:
        """Length of the token axis."""
        return int(self.starts[-1])

    @property
    def fingerprint(self) -> str:
        """Return a hash of all token ids and of their layout."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.texts.tokens, self.texts.offsets, self.queries, self.docs, self.num_kept):
            digest.update(np.ascontiguousarray(array).tobytes())
        digest.update(repr((self.pair, self.query, self.doc)).encode())
        return digest.hexdigest()

    def chunks(self, max_tokens: int) -> list[tuple[int, int]]:
        """Split the rows into batches; all rows of a batch have one layout.

        Args:
            max_tokens: Maximum tokens of a batch, padding included; a longer row is a batch of its own.

        Returns:
            First row of each batch, and one past its last row.
        """
        lengths, row_types = np.diff(self.starts), self.row_types
        batches, first = [], 0
        for row in range(1, self.num_rows):
            if (row + 1 - first) * lengths[row] > max_tokens or row_types[row] != row_types[first]:
                batches.append((first, row))
                first = row
        return [*batches, (first, self.num_rows)] if self.num_rows else []

    def batch(self, first: int, last: int) -> TokenBatch:
        """Lay out the rows `first` to `last` (exclusive), which have one layout, in the order of the token axis."""
        return self.take(np.arange(first, last))

    def take(self, rows: np.ndarray) -> TokenBatch:
        """Lay out some rows, which have one layout, in the given order."""
        store = cast(TokenStore, self.texts)  # lay_out reads only `tokens` and `offsets`
        sides = [(store, self.queries[rows], self.num_kept[rows, 0]), (store, self.docs[rows], self.num_kept[rows, 1])]
        row_type = self.row_type(int(rows[0]))
        if row_type == PAIR:
            return self.pair.lay_out(sides)
        return (self.query, self.doc)[row_type].lay_out([sides[row_type]])

    @property
    def row_types(self) -> np.ndarray:
        """Return the type of each row, QUERY, DOC or PAIR, int64 [rows]."""
        return types_of_rows(self.queries, self.docs)

    def row_type(self, row: int) -> int:
        """Return the type of a row: QUERY, DOC or PAIR."""
        return int(types_of_rows(self.queries[row : row + 1], self.docs[row : row + 1])[0])

    def tokens_of(self, pair: int, span: Span) -> tuple[int, int] | None:
        """Return the start and end (exclusive) of a span on the token axis.

        Args:
            pair: Index of the pair.
            span: Characters of the pair's query or doc.

        Returns:
            The two positions; None if truncation has cut a token of the span, or if the span has no token.
        """
        side = 0 if span.side == "query" else 1
        row = self.pair_rows[pair, side]
        if row < 0:
            return None
        row_type = self.row_type(row)
        layout = (self.query, self.doc, self.pair)[row_type]
        before = len(layout.specials[0])
        if row_type == PAIR and side == 1:
            before += int(self.num_kept[row, 0]) + len(layout.specials[1])
        num_kept = int(self.num_kept[row, side])
        if span.start is None or span.end is None:
            first, last = 0, num_kept
        else:
            text = int((self.queries, self.docs)[side][row])
            first, last = self.texts.tokens_of(text, span.start, span.end)
        if first >= last or last > num_kept:
            return None
        start = int(self.starts[row]) + before
        return start + first, start + last


def span_mask(spans: Sequence[np.ndarray], num_tokens: int) -> np.ndarray:
    """Return which tokens of the token axis are in a span, bool [num_tokens].

    Args:
        spans: Start and end (exclusive) of each span on the token axis, arrays of int64 [..., 2].
        num_tokens: Length of the token axis.
    """
    changes = np.zeros(num_tokens + 1, dtype=np.int64)
    for bounds in spans:
        np.add.at(changes, bounds[..., 0].ravel(), 1)
        np.add.at(changes, bounds[..., 1].ravel(), -1)
    return changes.cumsum()[:-1] > 0
