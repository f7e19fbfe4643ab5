"""Compressed late interaction: centroids, residuals of 2 or 4 bits, exact scores of the best docs (PLAID, WARP).

Source: Santhanam et al., 2022 (arXiv:2205.09707); Scheerer et al., 2025 (arXiv:2501.17788).
"""

from __future__ import annotations

from typing import Any

import torch

from ranker.errors import CheckpointError, ConfigError
from ranker.retrieval.index import require
from ranker.retrieval.late.arrays import Effort
from ranker.retrieval.late.build import build
from ranker.retrieval.late.index import LateIndex
from ranker.retrieval.vector_store import VectorStore


class Plaid:
    """Search by centroids and quantized residuals of token vectors.

    Args:
        bits: Bits per dimension of a residual: 2 or 4.
        centroids: Number of centroids; None: 16 times the square root of the number of vectors, a power of two.
        probes: Centroids that each query token probes, on a CPU with numba at least 64. None: on a CPU with numba, so
            many that they have about 35,000 vectors; elsewhere, so many that a query's lists have about 300,000 docs.
        candidates: This many times the requested number of docs are compared by their compressed vectors. On a CPU with
            numba, all docs that have a vector at a probed centroid are.
        rescore: This many times the requested number of docs are scored exactly; None: 1.8 on a CPU with numba, else 3.
        stored: Whether exact scores are computed from the stored vectors; False: from decompressed ones.
        gpu: Whether to build and search on a GPU; None: yes if there is one.
    """

    late = True
    exact = False

    def __init__(
        self,
        bits: int = 2,
        centroids: int | None = None,
        probes: int | None = None,
        candidates: int = 15,
        rescore: float | None = None,
        stored: bool = True,
        gpu: bool | None = None,
    ) -> None:
        if bits not in (2, 4):
            raise ConfigError(f"index.bits: expected 2 or 4, got {bits}")
        self.centroids = require("index.centroids", centroids)
        self.effort = Effort(
            require("index.probes", probes) or 0,
            require("index.candidates", candidates) or 1,
            require("index.rescore", rescore) or 0,
        )
        if gpu and not torch.cuda.is_available():
            raise ConfigError("index.gpu: expected a GPU, got none; set index.gpu=null")
        self.bits, self.stored, self.gpu = bits, stored, gpu

    def over(self, store: VectorStore) -> Any:
        """Open the index that is stored beside the vectors, or build it.

        Raises:
            CheckpointError: The stored index is of other vectors, or docs were added or deleted.
            DataError: A vector is not finite, or a part of the index is damaged.
        """
        device = "cuda" if self.gpu or (self.gpu is None and torch.cuda.is_available()) else "cpu"
        folder = build(store, self.bits, self.centroids, device)
        index = LateIndex(folder, store if self.stored else None, self.effort, device)
        if len(index.doc_ids) != store.num_docs or len(index.deleted):
            raise CheckpointError(
                f"{folder}: expected the index of {store.num_docs} docs, got one with "
                f"{len(index.doc_ids) - store.num_docs} added and {len(index.deleted)} deleted docs; search it through "
                "ranker.retrieval.late.index.LateIndex, or delete it, it is built anew"
            )
        return index
