"""Vectors of one bit per dimension (RaBitQ; Gao and Long, 2024, arXiv:2405.12497); stored vectors rescore the best."""

from __future__ import annotations

from typing import Any

from ranker.retrieval.index_type import require

TRAINED = 100_000  # number of vectors whose mean is the centre
SEED = 1  # seed of the rotation


class Binary:
    """Estimated inner products with all vectors, one bit per dimension; exact inner products for the best results.

    A vector minus the mean of all vectors is rotated at random. The signs of the rotated numbers are stored, with two
    factors of 4 bytes that make the estimate unbiased.

    Args:
        rescore: Number of docs that are compared again exactly, as a multiple of the number of requested docs.
        query_bits: Bits of each number of a query.
    """

    exact = False
    gpu = False

    def __init__(self, rescore: int = 10, query_bits: int = 8) -> None:
        self.rescore = require("index.rescore", rescore) or 1
        self.query_bits = require("index.query_bits", query_bits) or 8

    def make(self, dim: int, num_vectors: int) -> Any:  # noqa: ARG002 - signature of IndexType
        """Return a faiss index."""
        import faiss

        codes: Any = faiss.IndexRaBitQ(dim, faiss.METRIC_INNER_PRODUCT)
        codes.qb = self.query_bits
        rotation: Any = faiss.RandomRotationMatrix(dim, dim)
        rotation.init(SEED)
        index = faiss.IndexPreTransform(rotation, codes)
        # faiss frees both with the index, and Python must not
        rotation.this.disown()
        codes.this.disown()
        index.own_fields = True
        return index

    def train_vectors(self, num_vectors: int) -> int:  # noqa: ARG002
        """Return the number of vectors that the index is trained on."""
        return TRAINED
