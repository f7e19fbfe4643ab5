"""Search of a collection by vectors, one or several per text, with exact final scores."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ranker.data.collate import Collator
from ranker.data.collection import Candidates
from ranker.errors import DataError
from ranker.interactions.maxsim import TextVectors, blocks, maxsim_all
from ranker.models.interface import BiEncoder
from ranker.retrieval.encode import Device, encode_queries
from ranker.retrieval.stages import Stages
from ranker.retrieval.vector_store import VectorStore

log = logging.getLogger(__name__)

SPARE = 32  # vectors fetched beyond the depth, so that ties at the cut are broken by descending doc id
QUERIES_PER_SEARCH = 256  # queries per search of the index
QUERIES_IN_MEMORY = 8192  # queries whose vectors are in memory at a time
QUERY_VECTORS, DOC_VECTORS = 1024, 8192  # vectors that MaxSim compares at a time: 32 MiB of similarities
Ranked = tuple[np.ndarray, np.ndarray]  # rows of docs, int64 [docs], and their scores, float32 [docs], best first


@dataclass(frozen=True)
class LateOptions:
    """How a search by token vectors (late interaction) proceeds.

    Args:
        token_depth: Number of nearest doc vectors that are fetched for each query vector.
        candidates: Number of docs per query that are compared exactly, by all their vectors.
    """

    token_depth: int = 256
    candidates: int = 1000


class VectorEngine:
    """A bi-encoder over stored vectors of docs.

    Args:
        scorer: The bi-encoder.
        collator: Holds the queries' token store.
        store: The docs' vectors.
        index: The index over these vectors: a `VectorIndex`, a `TensorIndex`, or, with a vector per token, one with the
            method `rank` (`LateIndex`).
        device: Where queries are encoded and token vectors compared.
        late: Options for docs of several vectors.
    """

    def __init__(
        self,
        scorer: BiEncoder,
        collator: Collator,
        store: VectorStore,
        index: Any,
        device: Device,
        late: LateOptions | None = None,
    ) -> None:
        self.scorer, self.collator, self.store, self.index, self.device = scorer, collator, store, index, device
        self.stages: Stages = index.stages
        self.late = late or LateOptions()
        self._warned = False
        self.num_bytes, self.vector_bytes = index.num_bytes, store.num_bytes
        self._rows_by_id = np.argsort(store.doc_ids, kind="stable")
        self._sorted_ids = store.doc_ids[self._rows_by_id]
        self._id_places = np.empty(len(self._rows_by_id), dtype=np.int64)  # place of each row's id among the sorted ids
        self._id_places[self._rows_by_id] = np.arange(len(self._rows_by_id))
        with torch.inference_mode():
            self._divisor = float(scorer.divisor())

    def search(self, query_ids: Sequence[str], depth: int) -> Candidates:
        """Return the best docs of each query; all docs if there are fewer than `depth`.

        Raises:
            DataError: A query's vector or a score is not finite.
        """
        query_rows = self.collator.queries.rows(list(query_ids))
        rankings: list[Ranked] = []
        for first in range(0, len(query_ids), QUERIES_IN_MEMORY):
            with self.stages("encode"):
                vectors = encode_queries(
                    self.scorer, self.collator, query_rows[first : first + QUERIES_IN_MEMORY], self.device
                )
            for start in range(0, vectors.num_texts, QUERIES_PER_SEARCH):
                queries = vectors.take(torch.arange(start, min(start + QUERIES_PER_SEARCH, vectors.num_texts)))
                if hasattr(self.index, "rank"):
                    found = self.index.rank(queries, depth)
                    rankings += [self._best(rows, scores, depth) for rows, scores in found]
                elif self.store.description.several:
                    rankings += self._search_tokens(queries, depth)
                else:
                    rankings += self._search_single(queries.values.numpy(), depth)
        offsets = np.concatenate([[0], np.cumsum([len(rows) for rows, _ in rankings])]).astype(np.int64)
        rows = np.concatenate([np.zeros(0, dtype=np.int64), *(rows for rows, _ in rankings)])
        scores = np.concatenate([np.zeros(0, dtype=np.float32), *(scores for _, scores in rankings)])
        bad = np.flatnonzero(~np.isfinite(scores))
        if len(bad):
            query_id = query_ids[int(np.searchsorted(offsets, bad[0], side="right")) - 1]
            doc_id = self.store.doc_ids[rows[bad[0]]].decode()
            raise _not_finite(len(bad), len(scores), float(scores[bad[0]]), query_id, doc_id)
        return Candidates(list(query_ids), offsets, self.store.doc_ids[rows], scores)

    def score(self, query_id: str, doc_ids: Sequence[str]) -> dict[str, float]:
        """Return the exact scores of those docs that are in the collection.

        Raises:
            DataError: The query's vector or a score is not finite.
        """
        ids = np.array([doc_id.encode() for doc_id in doc_ids], dtype=np.bytes_)
        slots = np.minimum(np.searchsorted(self._sorted_ids, ids), max(0, len(self._sorted_ids) - 1))
        known = self._sorted_ids[slots] == ids if len(self._sorted_ids) else np.zeros(len(ids), dtype=bool)
        rows = self._rows_by_id[slots[known]]
        query = encode_queries(self.scorer, self.collator, self.collator.queries.rows([query_id]), self.device)
        scores = self._exact(query, rows)
        bad = np.flatnonzero(~np.isfinite(scores))
        if len(bad):
            doc_id = self.store.doc_ids[rows[bad[0]]].decode()
            raise _not_finite(len(bad), len(scores), float(scores[bad[0]]), query_id, doc_id)
        known_ids = (doc_id for doc_id, is_known in zip(doc_ids, known, strict=True) if is_known)
        return dict(zip(known_ids, scores.tolist(), strict=True))

    def _search_single(self, queries: np.ndarray, depth: int) -> list[Ranked]:
        """Rank docs that have one vector each, for queries [queries, dim]."""
        rankings: list[Ranked] = [(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32))] * len(queries)
        pending, count = np.arange(len(queries)), depth * self.index.rescore + SPARE
        while len(pending):
            with self.stages("candidates"):
                scores, indices = self.index.search(queries[pending], count)
            with self.stages("exact"):
                found = self._ranked_singles(queries[pending], indices, depth)
                for query, ranked in zip(pending.tolist(), found, strict=True):
                    rankings[query] = ranked
                # ties at rank `depth` are broken by descending doc id, which needs all docs with that score: fetch more
                # if a doc that was not fetched may have it
                num_real = (indices >= 0).sum(1)
                more = (depth < num_real) & (num_real < self.index.num_vectors) & self.index.index_type.exact
                least = np.array([float(own[-1]) if len(own) else 0.0 for _, own in found]) * self._divisor
                tied = more & (scores[:, -1] + self.index.margin(queries[pending]) >= least) if more.any() else more
            pending, count = pending[tied], count * 8
        return rankings

    def _ranked_singles(self, queries: np.ndarray, indices: np.ndarray, depth: int) -> list[Ranked]:
        """Rank fetched docs that have one vector each by their exact scores.

        Args:
            queries: [queries, dim].
            indices: Rows of docs, -1 where fewer were fetched, int64 [queries, docs].
            depth: Number of docs per query.
        """
        if hasattr(self.index, "ranked"):
            return self.index.ranked(queries, indices, self._divisor, self._id_places, depth)  # type: ignore[no-any-return]
        exact = self._exact_singles(queries, indices)
        # each doc has one vector, so the index of a vector is the row of its doc
        return [self._best(rows[rows >= 0], own[rows >= 0], depth) for rows, own in zip(indices, exact, strict=True)]

    def _exact_singles(self, queries: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Return scores of docs that have one vector each, float32 [queries, docs]. Cells with row -1 get any score.

        Args:
            queries: [queries, dim].
            indices: Rows of docs, int64 [queries, docs].
        """
        return np.stack([
            self._exact(TextVectors(torch.from_numpy(query[None])), rows)
            for query, rows in zip(queries, np.maximum(indices, 0), strict=True)
        ])  # fmt: skip

    def _search_tokens(self, queries: TextVectors, depth: int) -> list[Ranked]:
        """Rank docs that have several vectors each.

        Docs near any query vector are candidates; the most promising ones are compared by all their vectors.
        """
        assert queries.counts is not None
        num_candidates = max(depth, self.late.candidates)
        if num_candidates >= self.store.num_docs:
            every_doc = np.arange(self.store.num_docs)
            with self.stages("exact"):
                return [self._best(every_doc, scores, depth) for scores in self._maxsim(queries, every_doc)]
        count = self.late.token_depth * self.index.rescore
        with self.stages("candidates"):
            scores, indices = self.index.search(queries.values.numpy(), count)
        rankings = []
        ends = queries.counts.cumsum(0).tolist()
        for query, (end, num_vectors) in enumerate(zip(ends, queries.counts.tolist(), strict=True)):
            part = slice(end - num_vectors, end)
            with self.stages("candidates"):
                rows = self._promising(scores[part], indices[part], num_candidates)
            with self.stages("exact"):
                rankings.append(self._best(rows, self._exact(queries.take(torch.tensor([query])), rows), depth))
        lengths = [len(rows) for rows, _ in rankings]
        if min(lengths) < depth and not self._warned:
            self._warned = True
            log.warning(
                "search: %d of %d queries got fewer than %d docs, the fewest %d; raise late.token_depth",
                sum(length < depth for length in lengths),
                len(lengths),
                depth,
                min(lengths),
            )
        return rankings

    def _promising(self, scores: np.ndarray, indices: np.ndarray, count: int) -> np.ndarray:
        """Return rows of the docs with the best approximate MaxSim, at most `count`.

        For each query vector, the approximation takes the doc's highest fetched similarity, and adds these up. If none
        of the doc's vectors was fetched for a query vector, the lowest similarity fetched for that query vector is
        used.

        Args:
            scores: Similarities of the fetched vectors, float32 [query vectors, fetched].
            indices: Indices of these vectors in the index, -1 where fewer were fetched, int64 [query vectors, fetched].
            count: Number of docs.
        """
        real = indices >= 0
        rows = np.searchsorted(self.store.ends, np.where(real, indices, 0), side="right")
        query_vectors = np.broadcast_to(np.arange(len(scores))[:, None], rows.shape)[real]
        docs, doc_of = np.unique(rows[real], return_inverse=True)
        lowest = np.where(real, scores, np.inf).min(axis=1)
        lowest = np.where(np.isfinite(lowest), lowest, 0.0)
        best = np.repeat(lowest[:, None], len(docs), axis=1)
        np.maximum.at(best, (query_vectors, doc_of), scores[real])
        sums = best.sum(axis=0)
        return docs if len(docs) <= count else docs[np.argpartition(-sums, count - 1)[:count]]

    def _exact(self, query: TextVectors, rows: np.ndarray) -> np.ndarray:
        """Return scores of docs from their stored vectors, independent of the index, float32 [docs]."""
        if self.store.description.several:
            return self._maxsim(query, rows)[0]
        # computed in float64 and rounded to float32, so that docs with equal vectors get equal scores whatever the
        # order of summation
        vectors, vector = self.store.take(rows).values.numpy(), query.values[0].numpy()
        return (vectors.astype(np.float64) @ vector.astype(np.float64) / self._divisor).astype(np.float32)

    def _maxsim(self, queries: TextVectors, rows: np.ndarray) -> np.ndarray:
        """Return the scores of every query with every doc, float32 [queries, docs]; docs are read once, in blocks."""
        out = np.empty((queries.num_texts, len(rows)), dtype=np.float32)
        on_device = queries.to(self.device.device)
        all_queries = torch.arange(queries.num_texts, device=self.device.device)
        step = max(1, DOC_VECTORS // max(1, int(self.store.counts[rows].max(initial=1))))
        for start in range(0, len(rows), step):
            with torch.inference_mode():
                docs = self.store.take(rows[start : start + step]).to(self.device.device)
                query_blocks = blocks(all_queries, on_device, QUERY_VECTORS)
                parts = [maxsim_all(on_device.take(block), docs) for block in query_blocks]
                out[:, start : start + step] = torch.cat(parts).cpu().numpy()
        return out

    def _best(self, rows: np.ndarray, scores: np.ndarray, depth: int) -> Ranked:
        """Sort docs by score, then by doc id, both descending, and cut at `depth`."""
        order = np.lexsort((self.store.doc_ids[rows], scores))[::-1][:depth]
        return rows[order], scores[order]


def _not_finite(count: int, total: int, score: float, query_id: str, doc_id: str) -> DataError:
    return DataError(
        f"search: expected finite scores, got {count} of {total} that are not, the first {score} for query "
        f"{query_id!r} and doc {doc_id!r}; look at the checkpoint's weights, and at the vectors"
    )
