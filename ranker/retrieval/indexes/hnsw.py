"""A graph of neighbours that a query walks through (Malkov and Yashunin, 2018)."""

from __future__ import annotations

from typing import Any

from ranker.retrieval.index import require


class HNSW:
    """Inner products with the vectors that a walk through a neighbour graph meets.

    Its graph is built and searched on the CPU.

    Args:
        neighbours: Links of each vector, on the lowest level twice as many.
        build_depth: Candidates kept while a vector is linked.
        search_depth: Candidates kept while a query walks; at least as many as docs are asked for.
    """

    exact = False
    rescore = 1
    gpu = False

    def __init__(self, neighbours: int = 32, build_depth: int = 200, search_depth: int = 256) -> None:
        for name, value in (("neighbours", neighbours), ("build_depth", build_depth), ("search_depth", search_depth)):
            require(f"index.{name}", value)
        self.neighbours, self.build_depth, self.search_depth = neighbours, build_depth, search_depth

    def make(self, dim: int, num_vectors: int) -> Any:  # noqa: ARG002 - the kinds' common signature
        """Return a faiss index."""
        import faiss

        index = faiss.IndexHNSWFlat(dim, self.neighbours, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = self.build_depth
        index.hnsw.efSearch = self.search_depth
        return index

    def train_vectors(self, num_vectors: int) -> int:  # noqa: ARG002
        """How many vectors it learns from: none."""
        return 0
