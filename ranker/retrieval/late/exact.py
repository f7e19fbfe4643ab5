"""Exact MaxSim of one query with chosen docs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ranker.interactions.maxsim import TextVectors


def query_vectors(queries: TextVectors) -> list[np.ndarray]:
    """Return the vectors of each query, float32 [tokens, dim]; the vectors must be in main memory."""
    assert queries.counts is not None
    return [part.numpy() for part in queries.values.split(queries.counts.tolist())]


def exact_scores(query: np.ndarray, rows: np.ndarray, vectors: Callable[[int], np.ndarray]) -> np.ndarray:
    """Return MaxSim with docs, float32 [docs].

    Each doc has its own matrix product, so that its score does not depend on the other docs.

    Args:
        query: Vectors of the query, float32 [tokens, dim].
        rows: Rows of the docs in the index, int64 [docs].
        vectors: Function from a row to the vectors of that doc, [vectors, dim], at least one.
    """
    columns, scores = np.ascontiguousarray(query.T), np.empty(len(rows), dtype=np.float32)
    for place, row in enumerate(rows.tolist()):
        scores[place] = (vectors(row).astype(np.float32, copy=False) @ columns).max(axis=0).sum()
    return scores
