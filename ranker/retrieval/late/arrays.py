"""An opened compressed index in memory: the centroid and residual of each vector, and the docs at each centroid."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
        candidates: Number of docs that are scored by their compressed vectors; not read by `CPUSearch`.
        rescore: Number of docs that are scored exactly.
    """

    probes: int
    candidates: int
    rescore: float


@dataclass
class Arrays:
    """The arrays that a search reads.

    Args:
        centroids: The centroids.
        buckets: The buckets of the residuals.
        codes: Number of the centroid of each vector, uint16 or int32 [vectors].
        residuals: Packed residuals, uint8 [vectors, bytes].
        scales: Factor of each decompressed vector, float16 [vectors].
        ends: Index after the last vector of each doc, int64 [docs].
        present: Whether a doc is not deleted, bool [docs].
    """

    centroids: Centroids
    buckets: Buckets
    codes: np.ndarray
    residuals: np.ndarray
    scales: np.ndarray
    ends: np.ndarray
    present: np.ndarray

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
        scales = shards[0].scales if whole else np.concatenate([shard.scales for shard in shards])
        counts = np.concatenate([shard.counts for shard in shards])
        present = np.ones(len(counts), dtype=bool)
        present[deleted] = False
        return cls(*codec, codes, residuals, scales, np.cumsum(counts, dtype=np.int64), present)

    @cached_property
    def _lists(self) -> tuple[np.ndarray, np.ndarray]:
        counts = np.diff(self.ends, prepend=0)
        docs = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        kept = slice(None) if self.present.all() else np.repeat(self.present, counts)
        pairs = self.codes[kept].astype(np.int32), docs[kept]
        # scipy's conversion sorts by centroid in linear time and drops repeated docs
        shape = len(self.centroids.values), len(counts)
        at = sparse.csr_matrix((np.ones(len(pairs[0]), dtype=np.int8), pairs), shape)
        return at.indices.astype(np.int32), at.indptr.astype(np.int64)

    @property
    def entries(self) -> np.ndarray:
        """Rows of the docs at each centroid, centroid by centroid, without deleted docs, int32 [entries].

        A doc is at the centroids that are the codes of its vectors.
        """
        return self._lists[0]

    @property
    def starts(self) -> np.ndarray:
        """Centroid c has `entries[starts[c]:starts[c + 1]]`, int64 [centroids + 1]."""
        return self._lists[1]

    @property
    def num_docs(self) -> int:
        """Number of docs, deleted ones included."""
        return len(self.ends)
