"""An opened compressed index in memory: the centroid and residual of each vector, and the docs at each centroid."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from ranker.retrieval.late.centroids import Centroids
from ranker.retrieval.late.folder import Shard
from ranker.retrieval.late.residuals import Buckets


@dataclass(frozen=True)
class Effort:
    """How many centroids and docs a search compares with a query.

    Args:
        probes: Number of centroids that each token of a query probes.
        candidates: Number of docs that are scored by their compressed vectors.
        rescore: Number of docs that are scored exactly.
    """

    probes: int
    candidates: int
    rescore: int


@dataclass
class Arrays:
    """The arrays that a search reads.

    Args:
        centroids: The centroids.
        buckets: The buckets of the residuals.
        codes: Number of the centroid of each vector, uint16 or int32 [vectors].
        residuals: Packed residuals, uint8 [vectors, bytes].
        ends: Index after the last vector of each doc, int64 [docs].
        entries: Rows of the docs at each centroid (docs with a vector whose code it is), centroid by centroid, without
            deleted docs, int32 [entries].
        starts: Centroid c has `entries[starts[c]:starts[c + 1]]`, int64 [centroids + 1].
    """

    centroids: Centroids
    buckets: Buckets
    codes: np.ndarray
    residuals: np.ndarray
    ends: np.ndarray
    entries: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, codec: tuple[Centroids, Buckets], shards: list[Shard], deleted: np.ndarray) -> Arrays:
        """Concatenate shards in memory. A single shard is not copied: its arrays stay memory-mapped files.

        Args:
            codec: Centroids and buckets.
            shards: The shards, at least one.
            deleted: Rows of deleted docs.
        """
        whole = len(shards) == 1
        codes = shards[0].codes if whole else np.concatenate([shard.codes for shard in shards])
        residuals = shards[0].residuals if whole else np.concatenate([shard.residuals for shard in shards])
        counts = np.concatenate([shard.counts for shard in shards])
        present = np.ones(len(counts), dtype=bool)
        present[deleted] = False
        docs = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        kept = slice(None) if present.all() else np.repeat(present, counts)
        pairs = codes[kept].astype(np.int32), docs[kept]
        # scipy's conversion sorts by centroid in linear time and drops repeated docs
        at = sparse.csr_matrix((np.ones(len(pairs[0]), dtype=np.int8), pairs), (len(codec[0].values), len(counts)))
        starts = at.indptr.astype(np.int64)
        return cls(*codec, codes, residuals, np.cumsum(counts, dtype=np.int64), at.indices.astype(np.int32), starts)

    @property
    def num_docs(self) -> int:
        """Number of docs, deleted ones included."""
        return len(self.ends)
