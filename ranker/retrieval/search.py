"""Search engines: their interface, BM25, and the time of a query."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ranker.data.collection import Candidates, Collection
from ranker.errors import DataError
from ranker.retrieval.bm25 import BM25
from ranker.retrieval.stages import Stages


class Engine(Protocol):
    """Searches the docs of one collection.

    Attributes:
        num_bytes: Size of the index.
        vector_bytes: Size of the stored vectors from which exact scores are computed; 0 without vectors.
    """

    num_bytes: int
    vector_bytes: int

    def search(self, query_ids: Sequence[str], depth: int) -> Candidates:
        """Return the best docs of each query, in trec_eval's order: by score, then by doc id, both descending."""
        ...

    def score(self, query_id: str, doc_ids: Sequence[str]) -> dict[str, float]:
        """Return exact scores by doc id; docs that the engine can't score are left out."""
        ...


class BM25Engine:
    """BM25 over the docs of a collection, without vectors.

    Args:
        collection: The collection; its queries are searched.
        bm25: The index over its docs.
    """

    def __init__(self, collection: Collection, bm25: BM25) -> None:
        self.queries, self._bm25, self.num_bytes, self.vector_bytes = collection.queries, bm25, bm25.num_bytes, 0

    def search(self, query_ids: Sequence[str], depth: int) -> Candidates:
        """Return the best docs of each query, among docs that share a word with the query."""
        return self._bm25.search({query_id: self.queries[query_id] for query_id in query_ids}, depth)

    def score(self, query_id: str, doc_ids: Sequence[str]) -> dict[str, float]:
        """Return the scores of those docs that share a word with the query."""
        ranking = self._bm25.search({query_id: self.queries[query_id]}, self._bm25.num_docs)
        scores = dict(zip(ranking[query_id], ranking.scores_of(query_id).tolist(), strict=True))
        return {doc_id: scores[doc_id] for doc_id in doc_ids if doc_id in scores}

    def explain(self, query_id: str, doc_id: str) -> list[tuple[str, float, float]]:
        """Return the words that a query and a doc share, see `BM25.explain`.

        Raises:
            DataError: The collection has no such query or doc.
        """
        if query_id not in self.queries:
            raise DataError(
                f"explain: expected a query id and a doc id that one set contains; not found: query {query_id!r}"
            )
        return self._bm25.explain(self.queries[query_id], doc_id)


def latencies(engine: Engine, query_ids: Sequence[str], depth: int, count: int) -> dict[str, np.ndarray]:
    """Search `count` queries one at a time, after two to warm up; return milliseconds of each part, [queries].

    The part `search` is the whole. The others are those of the engine's `stages`, where it has them: `encode`, the
    search for `candidates`, their `exact` scores.

    Args:
        engine: The engine.
        query_ids: The queries.
        depth: Docs per query.
        count: How many of the queries.
    """
    stages: Stages = getattr(engine, "stages", Stages())
    for query_id in query_ids[:2]:
        engine.search([query_id], depth)
    stages.take()
    measured = []
    for query_id in query_ids[:count]:
        started = time.perf_counter()
        engine.search([query_id], depth)
        measured.append({"search": time.perf_counter() - started, **stages.take()})
    names = dict.fromkeys(name for parts in measured for name in parts)
    return {name: np.array([1000 * parts.get(name, 0.0) for parts in measured]) for name in names}
