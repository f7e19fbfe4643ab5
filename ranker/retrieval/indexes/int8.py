"""Exhaustive search over vectors with 8 bits per dimension; stored vectors rescore the best results."""

from __future__ import annotations

from typing import Any

from ranker.retrieval.index_type import require

TRAINED = 100_000  # number of vectors from which the range of each dimension is taken


class Int8:
    """Inner products with all vectors in 8 bits, a quarter of float32's size; exact ones for the best results.

    Each number of a vector is rounded to one of 256 values between the smallest and the largest value of its dimension
    in the collection.

    Args:
        rescore: Number of docs that are compared again exactly, as a multiple of the number of requested docs.
    """

    exact = False
    gpu = False

    def __init__(self, rescore: int = 4) -> None:
        self.rescore = require("index.rescore", rescore) or 1

    def make(self, dim: int, num_vectors: int) -> Any:  # noqa: ARG002 - signature of IndexType
        """Return a faiss index."""
        import faiss

        return faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)

    def train_vectors(self, num_vectors: int) -> int:  # noqa: ARG002
        """Return the number of vectors that the index is trained on."""
        return TRAINED
