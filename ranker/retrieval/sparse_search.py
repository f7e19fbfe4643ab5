"""Search by term weights: an inverted index over stored docs; queries are encoded, or only tokenized."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from ranker.data.collate import Collator
from ranker.data.collection import Candidates
from ranker.errors import DataError
from ranker.models.interface import BiEncoder
from ranker.retrieval.encode import Device, encode_queries
from ranker.retrieval.impact_store import ImpactStore
from ranker.retrieval.stages import Stages

log = logging.getLogger(__name__)

QUERIES = 256  # queries whose weights of all words are in memory at a time
COUNTED = 1000  # queries whose terms are counted for the report
COMPARED = 100  # queries whose results are compared with those of an exact search

Terms = tuple[np.ndarray, np.ndarray]  # ascending words, int64 [terms], and their weights, float32 [terms]


class Reranking:
    """Ranks given candidates by a sparse engine's stored term weights, instead of the whole collection.

    Args:
        engine: The engine.
        candidates: The candidates.
    """

    def __init__(self, engine: SparseEngine, candidates: Candidates) -> None:
        self._engine, self._candidates = engine, candidates
        self.num_bytes, self.vector_bytes = engine.num_bytes, engine.vector_bytes
        self.score, self.figures, self.stages = engine.score, engine.figures, engine.stages

    def search(self, query_ids: Sequence[str], depth: int) -> Candidates:
        """Return the best candidates of each query; a query without candidates gets none."""
        with self.stages("encode"):
            encoded = self._engine.encode(query_ids)
        ranked = []
        for query_id, terms in zip(query_ids, encoded, strict=True):
            ids = self._candidates.get(query_id, [])
            best = sorted(self._engine.scores_of(terms, ids).items(), key=lambda item: item[::-1], reverse=True)[:depth]
            ranked.append((query_id, [doc_id for doc_id, _ in best], [score for _, score in best]))
        return Candidates.from_lists(ranked)


class SparseEngine:
    """A sparse ranker over stored term weights of docs.

    Args:
        scorer: The ranker.
        collator: Holds the queries' token store.
        store: The docs' weights.
        index: The index over the weights, with `num_bytes` and `scores`, or `rows` if it is not `exact`.
        device: The device on which queries are encoded.
    """

    def __init__(self, scorer: BiEncoder, collator: Collator, store: ImpactStore, index: Any, device: Device) -> None:
        self.scorer, self.collator, self.store, self.index, self.device = scorer, collator, store, index, device
        self.num_bytes, self.vector_bytes = index.num_bytes, store.num_bytes
        self.stages = Stages()
        self._searched: tuple[list[str], list[Terms]] = ([], [])  # the last queries that were searched together
        self._rows_by_id = np.argsort(store.doc_ids, kind="stable")
        self._sorted_ids = store.doc_ids[self._rows_by_id]
        self._id_ranks = np.empty(len(store.doc_ids), dtype=np.int64)
        self._id_ranks[self._rows_by_id] = np.arange(len(store.doc_ids))

    def encode(self, query_ids: Sequence[str]) -> list[Terms]:
        """Return the terms of queries; a ranker without an encoder of queries only counts tokens."""
        rows, found = self.collator.queries.rows(list(query_ids)), []
        for first in range(0, len(rows), QUERIES):
            some = encode_queries(self.scorer, self.collator, rows[first : first + QUERIES], self.device)
            for weights in some.values.numpy():
                words = np.flatnonzero(weights)
                found.append((words, weights[words]))
        return found

    def search(self, query_ids: Sequence[str], depth: int) -> Candidates:
        """Return the best docs of each query, among docs with a score above 0; ties by descending doc id."""
        with self.stages("encode"):
            terms = self.encode(query_ids)
        if len(query_ids) > 1:  # a single query only measures the latency
            self._searched = list(query_ids[:COUNTED]), terms[:COUNTED]
        best = [self._best(*some, depth) for some in terms]
        offsets = np.concatenate([[0], np.cumsum([len(rows) for rows, _ in best])]).astype(np.int64)
        rows = np.concatenate([np.zeros(0, dtype=np.int64), *(rows for rows, _ in best)])
        scores = np.concatenate([np.zeros(0, dtype=np.float32), *(scores for _, scores in best)])
        return Candidates(list(query_ids), offsets, self.store.doc_ids[rows], scores)

    def _best(self, words: np.ndarray, weights: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        if self.index.exact:
            with self.stages("exact"):
                scores = self.index.scores(words, weights)
            rows = np.flatnonzero(scores > 0)
            scores = scores[rows]
        else:
            with self.stages("candidates"):
                rows = self.index.rows(words, weights, depth)
            with self.stages("exact"):
                scores = self._exact((words, weights), rows)
        if len(rows) > depth:
            # keep all docs that tie with the one at rank `depth`; the sort below cuts them by doc id
            kept = scores >= np.partition(scores, -depth)[-depth]
            rows, scores = rows[kept], scores[kept]
        order = np.lexsort((self._id_ranks[rows], scores))[::-1][:depth]
        return rows[order], scores[order]

    def _exact(self, terms: Terms, rows: np.ndarray) -> np.ndarray:
        """Return the scores of docs by their rows, int64 [docs], from stored weights, float32 [docs]."""
        query = np.zeros(self.store.description.dim)
        query[terms[0]] = terms[1]
        return (self.store.matrix[rows] @ query).astype(np.float32)

    def score(self, query_id: str, doc_ids: Sequence[str]) -> dict[str, float]:
        """Return the scores of those docs that are in the collection, from their stored weights."""
        return self.scores_of(self.encode([query_id])[0], doc_ids)

    def scores_of(self, terms: Terms, doc_ids: Sequence[str]) -> dict[str, float]:
        """Return the scores of a query's terms with those docs that are in the collection."""
        ids = np.array([doc_id.encode() for doc_id in doc_ids], dtype=np.bytes_)
        slots = np.minimum(np.searchsorted(self._sorted_ids, ids), max(0, len(self._sorted_ids) - 1))
        known = self._sorted_ids[slots] == ids if len(self._sorted_ids) else np.zeros(len(ids), dtype=bool)
        scores = self._exact(terms, self._rows_by_id[slots[known]])
        known_ids = (doc_id for doc_id, is_known in zip(doc_ids, known, strict=True) if is_known)
        return dict(zip(known_ids, scores.tolist(), strict=True))

    def figures(self, query_ids: Sequence[str]) -> dict[str, float]:
        r"""Return mean numbers of terms and `flops`, the expected number of products of a query and a doc.

        .. math:: \mathrm{FLOPS} = \sum_j p_j^{(q)} p_j^{(d)}

        p is the share of queries and of docs that have term j (Formal et al., 2021, arXiv:2107.05720). For an
        approximate index, also `recall@10`: the share of the exact ten best docs that it finds, over the first queries.
        """
        counted_ids = list(query_ids[:COUNTED])
        terms = self._searched[1] if self._searched[0] == counted_ids else self.encode(counted_ids)
        num_docs, words = self.store.num_docs, self.store.description.dim
        counted = np.concatenate([np.zeros(0, dtype=np.int64), *(some for some, _ in terms)])
        of_queries = np.bincount(counted, minlength=words) / max(1, len(terms))
        of_docs = np.bincount(self.store.matrix.indices, minlength=words) / max(1, num_docs)
        figures = {
            "query_terms": float(of_queries.sum()),
            "doc_terms": float(of_docs.sum()),
            "flops": float(of_queries @ of_docs),
        }
        return figures if self.index.exact else {**figures, "recall@10": self._recall(terms[:COMPARED])}

    def _recall(self, queries: Sequence[Terms], depth: int = 10) -> float:
        """Return the mean share of the exact best docs that the index finds."""
        every = np.arange(self.store.num_docs)
        shares = []
        for terms in queries:
            best = np.sort(self._exact(terms, every))[::-1][:depth]
            best = best[best > 0]
            if len(best):
                shares.append(float((self._best(*terms, depth)[1] >= best[-1]).sum() / len(best)))
        return float(np.mean(shares)) if shares else 1.0

    def explain(self, query_id: str, doc_id: str) -> list[tuple[str, float, float]]:
        """Return the terms that a query and a doc share, with their weights in both, largest product first.

        Raises:
            DataError: The collection has no such query or doc.
        """
        row = np.flatnonzero(self.store.doc_ids == doc_id.encode())
        if query_id not in self.collator.queries.ids().astype(str).tolist() or not len(row):
            missing = f"doc {doc_id!r}" if not len(row) else f"query {query_id!r}"
            raise DataError(f"explain: expected a query id and a doc id that one set contains; not found: {missing}")
        words, weights = self.encode([query_id])[0]
        of_doc = np.asarray(self.store.matrix[row[0], words].todense()).ravel()
        names = self.scorer.encoder.tokenizer.convert_ids_to_tokens(words.tolist())
        shared = [
            (name, float(of_query), float(impact))
            for name, of_query, impact in zip(names, weights, of_doc, strict=True)
            if impact > 0
        ]
        return sorted(shared, key=lambda term: -term[1] * term[2])
