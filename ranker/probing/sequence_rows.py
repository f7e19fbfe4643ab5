"""The rows of `Sequences`: which texts each row has, its type, and how many tokens are kept."""

from __future__ import annotations

import numpy as np

from ranker.probing.offset_texts import OffsetTexts

QUERY, DOC, PAIR = 0, 1, 2  # types of rows: a query alone, a doc alone, a pair


def distinct_rows(pair_texts: np.ndarray, apart: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the different rows of some pairs.

    Args:
        pair_texts: Text of each pair's query and doc, int64 [pairs, 2]; -1: there is none.
        apart: Whether query and doc have separate rows.

    Returns:
        Query and doc of each row, int64 [rows, 2]; and the row of each pair's query and doc, int64 [pairs, 2].
    """
    if not apart:
        rows, inverse = np.unique(pair_texts, axis=0, return_inverse=True)
        return rows, np.stack([inverse.ravel(), inverse.ravel()], axis=1)
    # a text that is a query in one pair and a doc in another pair has two rows, which are truncated differently
    none = np.full(len(pair_texts), -1)
    sides = np.concatenate([np.stack([pair_texts[:, 0], none], 1), np.stack([none, pair_texts[:, 1]], 1)])
    real = sides.max(axis=1) >= 0
    rows, inverse = np.unique(sides[real], axis=0, return_inverse=True)
    row_of_side = np.full(len(sides), -1)
    row_of_side[real] = inverse.ravel()
    return rows, row_of_side.reshape(2, -1).T


def truncate(
    lengths: np.ndarray, row_types: np.ndarray, room: np.ndarray, max_query_tokens: int, max_doc_tokens: int
) -> np.ndarray:
    """Return the numbers of query and doc tokens after truncation, int64 [rows, 2]. A pair keeps a doc token or more.

    Args:
        lengths: Numbers of query and doc tokens before truncation, int64 [rows, 2].
        row_types: QUERY, DOC or PAIR, int64 [rows].
        room: Maximum number of tokens in each row besides special tokens, int64 [rows].
        max_query_tokens: Maximum tokens of a query.
        max_doc_tokens: Maximum tokens of a doc.
    """
    queries = np.minimum(lengths[:, 0], max_query_tokens)
    queries = np.minimum(queries, np.where(row_types == PAIR, room - 1, room))
    docs = np.minimum(np.minimum(lengths[:, 1], max_doc_tokens), room - queries)
    return np.stack([queries, docs], axis=1).astype(np.int64)


def types_of_rows(queries: np.ndarray, docs: np.ndarray) -> np.ndarray:
    """Return the type of each row, int64 [rows], from its query and its doc, int64 [rows]; -1: there is none."""
    return np.where(queries < 0, DOC, np.where(docs < 0, QUERY, PAIR))


def text_lengths(texts: OffsetTexts, rows: np.ndarray) -> np.ndarray:
    """Return the numbers of tokens of each row's query and doc, int64 [rows, 2]; 0 if the row has no such text."""
    return np.where(rows >= 0, texts.lengths[np.maximum(rows, 0)], 0)
