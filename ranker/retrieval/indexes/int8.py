"""Vectors of 8 bits a number, compared all; the best results are rescored by stored vectors."""

from __future__ import annotations

from typing import Any

from ranker.retrieval.index import require

TRAINED = 100_000  # vectors that the range of each number is taken from


class Int8:
    """Inner products with all vectors in 8 bits: a quarter of the size of float32; exact ones for the best results.

    Each number of a vector is rounded to one of 256 values between its smallest and its largest value in the
    collection.

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
