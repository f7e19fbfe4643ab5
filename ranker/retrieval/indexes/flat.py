"""Exhaustive search: exact, in time proportional to the size of the collection."""

from __future__ import annotations

from typing import Any


class Flat:
    """Inner products with all vectors.

    Args:
        gpu: Whether to search on all GPUs; None: yes if faiss sees one.
    """

    exact = True
    rescore = 1

    def __init__(self, gpu: bool | None = None) -> None:
        self.gpu = gpu

    def make(self, dim: int, num_vectors: int) -> Any:  # noqa: ARG002 - signature of IndexType
        """Return a faiss index."""
        import faiss

        return faiss.IndexFlatIP(dim)

    def train_vectors(self, num_vectors: int) -> int:  # noqa: ARG002
        """Return 0: it needs no training."""
        return 0
