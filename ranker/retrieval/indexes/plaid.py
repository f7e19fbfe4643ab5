"""Compressed late interaction: centroids, residuals of 2 or 4 bits, exact scores of the best docs (PLAID, WARP).

Source: Santhanam et al., 2022 (arXiv:2205.09707); Scheerer et al., 2025 (arXiv:2501.17788).
"""

from __future__ import annotations

from typing import Any

import torch

from ranker.errors import CheckpointError, ConfigError
from ranker.retrieval.index_type import require
from ranker.retrieval.late.arrays import Effort
from ranker.retrieval.late.build import build
from ranker.retrieval.late.index import LateIndex
from ranker.retrieval.vector_store import VectorStore


class Plaid:
    """Search by centroids and quantized residuals of token vectors.

    Args:
        bits: Bits per dimension of a residual: 2 or 4.
        centroids: Number of centroids; None: 16 times the square root of the number of vectors, rounded down to a power
            of two.
        probes: Number of centroids that each query token probes. On a CPU with numba, a value below 64 is raised to 64.
            Merged query tokens probe more there, and the other tokens of their query fewer, but at least 64. None:
            chosen from the index. On a CPU with numba, the centroids that one query token probes then have about 35,000
            vectors in total if no tokens are merged. Elsewhere, the doc lists of all centroids that a query probes have
            about 300,000 docs in total.
        candidates: This many times the requested number of docs are compared by their compressed vectors. On a CPU with
            numba this is ignored: every doc with a vector at a probed centroid is compared.
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
                "ranker.retrieval.late.index.LateIndex, or delete it to have it built anew"
            )
        return index
