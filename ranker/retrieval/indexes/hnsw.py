"""Hierarchical graph of neighbours, which a search follows towards the query (Malkov and Yashunin, 2018)."""

from __future__ import annotations

from typing import Any

from ranker.retrieval.index_type import require


class HNSW:
    """Inner products with the vectors that a search through a neighbour graph visits.

    The graph is built and searched on the CPU.

    Args:
        neighbours: Links of each vector; twice as many on the lowest level.
        build_depth: Length of the candidate list while a vector is added.
        search_depth: Length of the candidate list during a search; raised if a search fetches more vectors.
    """

    exact = False
    rescore = 1
    gpu = False

    def __init__(self, neighbours: int = 32, build_depth: int = 200, search_depth: int = 256) -> None:
        for name, value in (("neighbours", neighbours), ("build_depth", build_depth), ("search_depth", search_depth)):
            require(f"index.{name}", value)
        self.neighbours, self.build_depth, self.search_depth = neighbours, build_depth, search_depth

    def make(self, dim: int, num_vectors: int) -> Any:  # noqa: ARG002 - signature of IndexType
        """Return a faiss index."""
        import faiss

        index = faiss.IndexHNSWFlat(dim, self.neighbours, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = self.build_depth
        index.hnsw.efSearch = self.search_depth
        return index

    def train_vectors(self, num_vectors: int) -> int:  # noqa: ARG002
        """Return 0: it needs no training."""
        return 0
