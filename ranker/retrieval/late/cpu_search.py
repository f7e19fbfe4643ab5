"""Search of a compressed index on a CPU."""

from __future__ import annotations

import threading

import numpy as np

from ranker.retrieval.late import doc_kernels, query_kernels
from ranker.retrieval.late.arrays import Arrays
from ranker.retrieval.late.vector_code import HALF_SCALE
from ranker.retrieval.vector_store import VectorStore

MERGE = 0.95  # smallest cosine at which query tokens are merged
LEAST_NEAR = 64  # smallest number of centroids that each merged token probes


class CPUSearch:
    """Merges query tokens whose vectors are similar, then finds candidates by 16-bit similarities.

    The computations are in `query_kernels` and `doc_kernels`.

    Args:
        arrays: The index. Its compressed vectors are copied, centroid by centroid.
    """

    def __init__(self, arrays: Arrays) -> None:
        centroids = arrays.centroids.values.numpy()
        self._values = arrays.buckets.half_byte_values().numpy()
        self._longest = float(np.sqrt((centroids * centroids).sum(1).max()))
        self._num_docs = arrays.num_docs
        owners = np.where(arrays.present, np.arange(self._num_docs, dtype=np.int32), np.int32(-1))
        owners = np.repeat(owners, np.diff(arrays.ends, prepend=0))
        scales = np.rint(arrays.scales.astype(np.float32) * HALF_SCALE).astype(np.int16)
        codes, residuals = np.asarray(arrays.codes), np.asarray(arrays.residuals)
        self._cells = doc_kernels.lists(codes, residuals, scales, owners, len(centroids))
        padding = np.zeros((-len(centroids) % query_kernels.ROWS, centroids.shape[1]), dtype=np.float32)
        self._centroids = np.concatenate([centroids, padding])
        self._local = threading.local()

    def _slots(self) -> np.ndarray:
        """Return this thread's working memory for `doc_kernels.scan`, all -1, int32 [docs]."""
        if not hasattr(self._local, "slots"):
            self._local.slots = np.full(self._num_docs, -1, dtype=np.int32)
        slots: np.ndarray = self._local.slots
        return slots

    def candidates(self, query: np.ndarray, probes: int, count: int) -> np.ndarray:
        """Score docs with the compressed vectors, and return the rows of the best docs, sorted by row number.

        They are int64 [at most count].

        Args:
            query: Vectors of the query, float32 [tokens, dim].
            probes: Number of centroids that each merged token probes. A value below `LEAST_NEAR` is raised to
                `LEAST_NEAR`.
            count: Number of docs.
        """
        rows, scores = self.scores(query, max(probes, LEAST_NEAR))
        return np.sort(rows if len(rows) <= count else rows[np.argpartition(-scores, count - 1)[:count]])

    def scores(self, query: np.ndarray, probes: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the docs with a vector at a probed centroid, int64 [docs], and their MaxSim, float32 [docs].

        For each query token, only the doc vectors assigned to its probed centroids are compared. If a doc has no such
        vector, the token's similarity with the doc is the token's similarity with the least similar probed centroid.

        Args:
            query: Vectors of the query, float32 [tokens, dim].
            probes: Number of centroids that each merged token probes.
        """
        tokens, num_bytes = query_kernels.merged(query, MERGE), self._cells[0].shape[1] - 2
        table, steps, lows = query_kernels.tables(tokens, self._values, num_bytes, self._longest)
        similarities = query_kernels.integers(self._centroids, query_kernels.columns_of(tokens), steps, lows)
        similarities = similarities[: len(self._cells[3])]
        least = query_kernels.bounds(similarities, len(tokens), probes)
        floors = (least - np.rint(lows / steps)).astype(np.int16)
        rows, best = doc_kernels.scan(similarities, least, floors, table, self._cells, self._slots())
        return rows, doc_kernels.totals(best, steps, len(rows))

    @staticmethod
    def exact(query: np.ndarray, rows: np.ndarray, store: VectorStore) -> np.ndarray:
        """Compute MaxSim of the query with each doc, float32 [docs], from the uncompressed stored vectors in float32.

        Args:
            query: Vectors of the query, float32 [tokens, dim].
            rows: Rows of the docs, int64 [docs].
            store: The vectors.
        """
        scores, shards = np.empty(len(rows), dtype=np.float32), rows // store.description.shard_docs
        for shard in np.unique(shards).tolist():
            vectors, docs = store.shard(shard)
            own = shards == shard
            ends = store.ends[rows[own]] - (store.ends[docs.start - 1] if docs.start else 0)
            starts = ends - store.counts[rows[own]]
            scores[own] = doc_kernels.maxsim(np.asarray(vectors), starts, ends, query)
        return scores
