"""Search a whole collection: by vectors (one or several per text) with exact scores at the end, or by BM25."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ranker.data.collate import Collator
from ranker.data.collection import Candidates, Collection
from ranker.errors import DataError
from ranker.interactions.maxsim import TextVectors, blocks, maxsim_all
from ranker.retrieval.bm25 import BM25
from ranker.retrieval.encode import Device, Encoded, encode_queries
from ranker.retrieval.index import VectorIndex

log = logging.getLogger(__name__)

SPARE = 32  # fetched beyond what is asked for, so that ties at the last place follow the tie rule
QUERIES = 256  # searched at a time
ENCODED = 8192  # queries whose vectors are held at a time
QUERY_VECTORS, DOC_VECTORS = 1024, 8192  # MaxSim compares so many at a time: 32 MiB


class Engine(Protocol):
    """Something that searches one collection's docs."""

    num_bytes: int  # of the index
    vector_bytes: int  # of the vectors that lie beside it, from which exact scores are computed

    def search(self, query_ids: Sequence[str], depth: int) -> Candidates:
        """The best docs of each query, ordered as trec_eval does: score descending, then doc id descending."""
        ...

    def score(self, query_id: str, doc_ids: Sequence[str]) -> dict[str, float]:
        """Exact scores of some docs, those that the engine can tell."""
        ...


@dataclass(frozen=True)
class LateOptions:
    """How docs of several vectors are found.

    Args:
        token_depth: Nearest doc vectors fetched for each query vector.
        candidates: Docs that are compared exactly, by all their vectors.
    """

    token_depth: int = 256
    candidates: int = 1000


class BM25Engine:
    """BM25 over the collection's docs; needs no vectors.

    Args:
        collection: Docs and queries.
        bm25: Its index.
    """

    def __init__(self, collection: Collection, bm25: BM25) -> None:
        self.queries, self._bm25, self.num_bytes, self.vector_bytes = collection.queries, bm25, bm25.num_bytes, 0

    def search(self, query_ids: Sequence[str], depth: int) -> Candidates:
        """The best docs of each query; docs without any of its words are none of them."""
        return self._bm25.search({query_id: self.queries[query_id] for query_id in query_ids}, depth)

    def score(self, query_id: str, doc_ids: Sequence[str]) -> dict[str, float]:
        """Scores of docs that share a word with the query."""
        found = self._bm25.search({query_id: self.queries[query_id]}, self._bm25.num_docs)
        scores = dict(zip(found[query_id], found.scores_of(query_id).tolist(), strict=True))
        return {doc_id: scores[doc_id] for doc_id in doc_ids if doc_id in scores}


class VectorEngine:
    """A bi-encoder over a folder of vectors.

    Args:
        scorer: The bi-encoder.
        collator: Holds the queries' token store.
        encoded: The docs' vectors.
        index: Over them.
        where: Device.
        late: For docs of several vectors.
    """

    def __init__(
        self, scorer: Any, collator: Collator, encoded: Encoded, index: VectorIndex, where: Device, late: LateOptions | None = None
    ) -> None:  # fmt: skip
        self.scorer, self.collator, self.encoded, self.index, self.where = scorer, collator, encoded, index, where
        self.late = late or LateOptions()
        self._told = False
        self.num_bytes, self.vector_bytes = index.num_bytes, encoded.num_bytes
        order = np.argsort(encoded.doc_ids, kind="stable")
        self._by_id, self._sorted_ids = order, encoded.doc_ids[order]
        with torch.inference_mode():
            self._divisor = float(scorer.divisor()) if hasattr(scorer, "divisor") else 1.0

    def search(self, query_ids: Sequence[str], depth: int) -> Candidates:
        """The best docs of each query; all docs where there are fewer than `depth`."""
        places = self.collator.queries.rows(list(query_ids))
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for first in range(0, len(query_ids), ENCODED):
            vectors = encode_queries(self.scorer, self.collator, places[first : first + ENCODED], self.where)
            for start in range(0, vectors.num_texts, QUERIES):
                some = vectors.take(torch.arange(start, min(start + QUERIES, vectors.num_texts)))
                found += (
                    self._late(some, depth)
                    if self.encoded.description.several
                    else self._single(some.values.numpy(), depth)
                )
        offsets = np.concatenate([[0], np.cumsum([len(rows) for rows, _ in found])]).astype(np.int64)
        rows = np.concatenate([rows for rows, _ in found] or [np.zeros(0, dtype=np.int64)])
        scores = np.concatenate([scores for _, scores in found] or [np.zeros(0, dtype=np.float32)])
        bad = np.flatnonzero(~np.isfinite(scores))
        if len(bad):
            query_id = query_ids[int(np.searchsorted(offsets, bad[0], side="right")) - 1]
            doc_id = self.encoded.doc_ids[rows[bad[0]]].decode()
            raise _not_finite(len(bad), len(scores), float(scores[bad[0]]), query_id, doc_id)
        return Candidates(list(query_ids), offsets, self.encoded.doc_ids[rows], scores)

    def score(self, query_id: str, doc_ids: Sequence[str]) -> dict[str, float]:
        """Exact scores of docs of the collection."""
        ids = np.array([doc_id.encode() for doc_id in doc_ids], dtype=np.bytes_)
        places = np.minimum(np.searchsorted(self._sorted_ids, ids), max(0, len(self._sorted_ids) - 1))
        known = self._sorted_ids[places] == ids if len(self._sorted_ids) else np.zeros(len(ids), dtype=bool)
        rows = self._by_id[places[known]]
        query = encode_queries(self.scorer, self.collator, self.collator.queries.rows([query_id]), self.where)
        scores = self._exact(query, rows)
        bad = np.flatnonzero(~np.isfinite(scores))
        if len(bad):
            raise _not_finite(
                len(bad), len(scores), float(scores[bad[0]]), query_id, self.encoded.doc_ids[rows[bad[0]]].decode()
            )
        return dict(
            zip((doc_id for doc_id, there in zip(doc_ids, known, strict=True) if there), scores.tolist(), strict=True)
        )

    def _single(self, queries: np.ndarray, depth: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """One vector a doc."""
        found: list[tuple[np.ndarray, np.ndarray]] = [
            (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32))
        ] * len(queries)
        pending, fetched = np.arange(len(queries)), depth * self.index.kind.rescore + SPARE
        while len(pending):
            scores, places = self.index.search(queries[pending], fetched)
            tied = []
            for query, row_scores, row_places in zip(pending.tolist(), scores, places, strict=True):
                rows = row_places[row_places >= 0]
                found[query] = self._best(
                    rows, self._exact(TextVectors(torch.from_numpy(queries[query : query + 1])), rows), depth
                )
                # more docs than were fetched may tie with the last place: fetch more, so that the cut follows the tie
                # rule
                if (
                    self.index.kind.exact
                    and depth < len(rows) < self.index.num_vectors
                    and row_scores[-1] >= row_scores[depth - 1] - 1e-5
                ):
                    tied.append(query)
            pending, fetched = np.array(tied, dtype=np.int64), fetched * 8
        return found

    def _late(self, queries: TextVectors, depth: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Several vectors a doc: docs near any query vector are candidates, the most promising are compared by all their vectors."""
        assert queries.counts is not None
        wanted = max(depth, self.late.candidates)
        if wanted >= self.encoded.num_docs:
            every_doc = np.arange(self.encoded.num_docs)
            return [self._best(every_doc, scores, depth) for scores in self._maxsim(queries, every_doc)]
        scores, places = self.index.search(queries.values.numpy(), self.late.token_depth * self.index.kind.rescore)
        found = []
        ends = queries.counts.cumsum(0).tolist()
        for query, (end, count) in enumerate(zip(ends, queries.counts.tolist(), strict=True)):
            rows = self._promising(scores[end - count : end], places[end - count : end], wanted)
            found.append(self._best(rows, self._exact(queries.take(torch.tensor([query])), rows), depth))
        counts = [len(rows) for rows, _ in found]
        if min(counts) < depth and not self._told:
            self._told = True
            log.warning(
                "search: %d of %d queries got fewer than %d docs, the fewest %d; raise late.token_depth",
                sum(count < depth for count in counts),
                len(counts),
                depth,
                min(counts),
            )
        return found

    def _promising(self, scores: np.ndarray, places: np.ndarray, wanted: int) -> np.ndarray:
        """Docs with the best sums, over query vectors, of the best fetched similarity; where a doc has none, the worst fetched one counts."""
        real = places >= 0
        rows = np.searchsorted(self.encoded.ends, np.where(real, places, 0), side="right")
        vector = np.broadcast_to(np.arange(len(scores))[:, None], rows.shape)[real]
        docs, doc_of = np.unique(rows[real], return_inverse=True)
        worst = np.where(real, scores, np.inf).min(axis=1)
        worst = np.where(np.isfinite(worst), worst, 0.0)
        best = np.repeat(worst[:, None], len(docs), axis=1)
        np.maximum.at(best, (vector, doc_of), scores[real])
        sums = best.sum(axis=0)
        return docs if len(docs) <= wanted else docs[np.argpartition(-sums, wanted - 1)[:wanted]]

    def _exact(self, query: TextVectors, rows: np.ndarray) -> np.ndarray:
        """Scores of docs from their stored vectors, the same whatever they were found with, float32 [docs]."""
        if not self.encoded.description.several:
            # in double precision, so that equal docs tie and the order of summation decides nothing
            products = self.encoded.take(rows).values.numpy().astype(np.float64) @ query.values[0].numpy().astype(
                np.float64
            )
            return (products / self._divisor).astype(np.float32)
        return self._maxsim(query, rows)[0]

    def _maxsim(self, queries: TextVectors, rows: np.ndarray) -> np.ndarray:
        """Every query with every one of the docs, float32 [queries, docs]; docs are read once, some at a time."""
        out = np.empty((queries.num_texts, len(rows)), dtype=np.float32)
        on_device, everyone = queries.to(self.where.device), torch.arange(queries.num_texts, device=self.where.device)
        step = max(1, DOC_VECTORS // max(1, int(self.encoded.counts[rows].max(initial=1))))
        for start in range(0, len(rows), step):
            with torch.inference_mode():
                docs = self.encoded.take(rows[start : start + step]).to(self.where.device)
                parts = [maxsim_all(on_device.take(some), docs) for some in blocks(everyone, on_device, QUERY_VECTORS)]
                out[:, start : start + step] = torch.cat(parts).cpu().numpy()
        return out

    def _best(self, rows: np.ndarray, scores: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        order = np.lexsort((self.encoded.doc_ids[rows], scores))[::-1][:depth]
        return rows[order], scores[order]


def _not_finite(count: int, total: int, score: float, query_id: str, doc_id: str) -> DataError:
    return DataError(
        f"search: expected finite scores, got {count} of {total} that are not, the first {score} for query {query_id!r} and doc {doc_id!r}; "
        "look at the checkpoint's weights, and at the vectors"
    )


def latencies(engine: Engine, query_ids: Sequence[str], depth: int, count: int) -> np.ndarray:
    """Milliseconds that each of some queries takes by itself, encoding included; two are searched before, to warm up."""
    chosen = list(query_ids)[:count]
    for query_id in chosen[:2]:
        engine.search([query_id], depth)
    spent = []
    for query_id in chosen:
        started = time.perf_counter()
        engine.search([query_id], depth)
        spent.append(1000 * (time.perf_counter() - started))
    return np.array(spent)
