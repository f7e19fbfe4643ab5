"""Search of a compressed index on a CPU."""

from __future__ import annotations

import threading

import numpy as np
import torch

from ranker.data.ragged import ranges
from ranker.retrieval.late import doc_kernels, query_kernels
from ranker.retrieval.late.arrays import Arrays
from ranker.retrieval.late.vector_code import HALF_SCALE
from ranker.retrieval.vector_store import VectorStore

MERGE = 0.9  # smallest cosine at which query tokens are merged
LEAST_NEAR = 64  # smallest number of centroids that each merged token probes
CONVERTED = 32  # docs whose vectors are converted to float32 at a time
SAMPLE = 2**16  # about how many vectors give the usual size of a residual's elements


def probes_of(lengths: np.ndarray, probes: int, num_centroids: int) -> np.ndarray:
    """Return the number of centroids that each merged token probes, int64 [tokens], at least `LEAST_NEAR`.

    Tokens of equal lengths probe `probes` each. A sum of merged tokens probes more, and the other tokens of its query
    fewer, because most of a score comes from the sum: probes are proportional to the square root of the length. If the
    squared error of a token's similarity falls with the third power of its probes, the error of the score is that of a
    query of equal tokens, in proportion to the scores.

    Args:
        lengths: Lengths of the merged tokens' vectors, float32 [tokens].
        probes: Number of centroids; if it is the number of all, each token probes all.
        num_centroids: Number of all centroids.
    """
    if probes >= num_centroids or not len(lengths):
        return np.full(len(lengths), num_centroids)
    roots = np.sqrt(np.maximum(lengths.astype(np.float64), 1e-9))
    counts = probes * roots * np.cbrt(roots.sum() / (roots**4).sum())
    return np.maximum(np.rint(counts).astype(np.int64), LEAST_NEAR)


def maxsim(vectors: np.ndarray, starts: np.ndarray, ends: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Return `doc_kernels.maxsim` for vectors in float32 or float16, which is converted, float32 [docs]."""
    if vectors.dtype == np.float32:
        return doc_kernels.maxsim(vectors, starts, ends, query)
    scores = np.empty(len(starts), dtype=np.float32)
    for first in range(0, len(starts), CONVERTED):
        some = slice(first, first + CONVERTED)
        counts = ends[some] - starts[some]
        values = torch.from_numpy(vectors[ranges(starts[some], counts)]).float().numpy()  # faster than numpy
        last = np.cumsum(counts)
        scores[some] = doc_kernels.maxsim(values, last - counts, last, query)
    return scores


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
        sample = residuals[:: max(1, len(residuals) // SAMPLE)]
        squares = (arrays.buckets.byte_values().numpy() ** 2).mean(1)
        self._residual = float(np.sqrt(squares[sample].mean())) if len(sample) else 0.0
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
            probes: See `probes_of`.
            count: Number of docs.
        """
        rows, scores = self.scores(query, probes)
        return np.sort(rows if len(rows) <= count else rows[np.argpartition(-scores, count - 1)[:count]])

    def scores(self, query: np.ndarray, probes: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the docs with a vector at a probed centroid, int64 [docs], and their MaxSim, float32 [docs].

        For each query token, only the doc vectors assigned to its probed centroids are compared. The token's similarity
        with a doc is at least the token's similarity with the least similar probed centroid plus the standard deviation
        of the token's inner product with a residual. So this is the similarity if a doc has no such vector.

        Args:
            query: Vectors of the query, float32 [tokens, dim].
            probes: See `probes_of`.
        """
        tokens, num_bytes = query_kernels.merged(query, MERGE), self._cells[0].shape[1] - 2
        table, steps, lows = query_kernels.tables(tokens, self._values, num_bytes, self._longest)
        similarities = query_kernels.integers(self._centroids, query_kernels.columns_of(tokens), steps, lows)
        similarities = similarities[: len(self._cells[3])]
        lengths = np.linalg.norm(tokens, axis=1)
        least = query_kernels.bounds(similarities, probes_of(lengths, probes, len(similarities)))
        floors = (least - np.rint((lows - self._residual * lengths) / steps)).astype(np.int16)
        rows, best = doc_kernels.scan(similarities, least, floors, table, self._cells, self._slots())
        return rows, doc_kernels.totals(best, steps, len(rows))

    @staticmethod
    def exact(query: np.ndarray, rows: np.ndarray, store: VectorStore) -> np.ndarray:
        """Compute MaxSim of the query with each doc, float32 [docs], from the uncompressed stored vectors.

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
            scores[own] = maxsim(np.asarray(vectors), ends - store.counts[rows[own]], ends, query)
        return scores
