"""Search of a compressed index on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ranker.retrieval.late import cpu_kernels as kernels
from ranker.retrieval.late.arrays import Arrays, Effort

# Smallest cosines at which query tokens are merged, tried one after another until the sums fit into the lanes.
MERGE = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6)
# In `kernels.refine`, each token probes at least LEAST_NEAR centroids, and at least one NEAR_SHARE-th of all.
LEAST_NEAR, NEAR_SHARE = 64, 32


class _Group(NamedTuple):
    """Similarities with up to LANES tokens of a query, scaled to 16-bit integers (see `kernels.scaled`).

    Args:
        centroids: Similarities of the centroids, uint16 [centroids, LANES].
        parts: Inner products of the bytes of a residual, uint16 [bytes, 256, LANES].
        zeros: Inner product of a residual of zeros, uint16 [LANES].
        scale: The factor of all of these.
        tokens: Number of tokens.
    """

    centroids: np.ndarray
    parts: np.ndarray
    zeros: np.ndarray
    scale: float
    tokens: int


class CPUSearch:
    """Finds candidates by 16-bit similarities (`cpu_kernels`), after merging query tokens with similar vectors.

    Args:
        arrays: The index.
    """

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._values = arrays.buckets.byte_values().numpy()
        self._centroids = arrays.centroids.values.numpy()
        self._local = threading.local()

    def _slots(self) -> np.ndarray:
        """Return this thread's working memory for `kernels.gather`, all -1, int32 [docs]."""
        if not hasattr(self._local, "slots"):
            self._local.slots = np.full(self._arrays.num_docs, -1, dtype=np.int32)
        slots: np.ndarray = self._local.slots
        return slots

    def candidates(
        self, query: np.ndarray, effort: Effort, stored: Callable[[np.ndarray], np.ndarray] | None = None
    ) -> np.ndarray:
        """Return the rows of the candidates, which are then scored exactly, int64 [at most effort.rescore].

        Args:
            query: Vectors of the query, float32 [tokens, dim].
            effort: How many centroids and docs are compared.
            stored: Function from indices of vectors, int64 [vectors], to the stored vectors, float32 [vectors, dim].
                With it, at most effort.exact candidates are returned, see `_narrowed`.
        """
        index = self._arrays
        groups = [self._scaled(part) for part in self._parts(query)]
        near = max(effort.probes, LEAST_NEAR, len(self._centroids) // NEAR_SHARE)
        counts = np.array([effort.probes, near])
        reached = [kernels.probe(group.centroids, group.tokens, counts) for group in groups]
        probed = np.logical_or.reduce([masks for masks, _ in reached])
        rows, total = np.zeros(0, dtype=np.int64), np.zeros(1)
        for group, (_, bounds) in zip(groups, reached, strict=True):
            rows, scores = kernels.gather(
                group.centroids, probed[0], bounds[0], index.entries, index.starts, self._slots()
            )
            total = total + scores / group.scale
        rows = np.sort(best(rows, total, effort.candidates))
        if len(rows) <= effort.rescore:
            return rows
        vectors, total = (index.codes, index.residuals, index.ends), np.zeros(1)
        chosen: list[np.ndarray] = []
        for group, (_, bounds) in zip(groups, reached, strict=True):
            words = group.centroids.view(np.uint64), group.parts.reshape(-1, kernels.LANES).view(np.uint64)
            scores, nearest = kernels.refine(*words, probed[1], bounds[1] + group.zeros, vectors, rows)
            total = total + scores / group.scale
            chosen.append(nearest[:, : group.tokens])
        places = best(np.arange(len(rows)), total, effort.rescore)
        if stored is None or len(places) <= (effort.exact or effort.rescore):
            return rows[places]
        order = self._narrowed(query, np.concatenate(chosen, 1)[places], stored)
        return rows[places[order[: effort.exact]]]

    @staticmethod
    def _narrowed(query: np.ndarray, chosen: np.ndarray, stored: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return the order of docs by MaxSim with some of their vectors: the nearest ones by compressed vectors.

        Args:
            query: float32 [tokens, dim].
            chosen: Index of the nearest vector of each doc to each merged token, int64 [docs, merged tokens].
            stored: See `candidates`.
        """
        similarities = stored(chosen.flatten()) @ query.T
        scores = similarities.reshape(*chosen.shape, len(query)).max(1).sum(1)
        return np.argsort(-scores, kind="stable")

    def _parts(self, query: np.ndarray) -> list[np.ndarray]:
        """Merge tokens until LANES are left, or as far as `MERGE` allows; return groups [at most LANES, dim]."""
        sums = query
        for least in MERGE:
            sums = kernels.merged(query, least)
            if len(sums) <= kernels.LANES:
                break
        return [sums[first : first + kernels.LANES] for first in range(0, len(sums), kernels.LANES)]

    def _scaled(self, tokens: np.ndarray) -> _Group:
        """Return the scaled similarities with a group of tokens [at most LANES, dim]."""
        num_bytes, numbers = self._arrays.residuals.shape[1], self._values.shape[1]
        query = np.zeros((num_bytes * numbers, kernels.LANES), dtype=np.float32)
        query[: tokens.shape[1], : len(tokens)] = tokens.T
        table = kernels.byte_table(query, self._values)
        return _Group(*kernels.scaled(self._centroids @ query[: tokens.shape[1]], table), len(tokens))


def best(rows: np.ndarray, scores: np.ndarray, count: int) -> np.ndarray:
    """Return the rows of the `count` largest scores, in no order."""
    return rows if len(rows) <= count else rows[np.argpartition(-scores, count - 1)[:count]]
