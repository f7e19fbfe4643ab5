"""Inverted lists of compressed vectors (Jégou et al., 2011); the best results are rescored by stored vectors."""

from __future__ import annotations

from typing import Any

from ranker.errors import ConfigError
from ranker.retrieval.index_type import TRAINED_PER_LIST, num_lists, require


class IVFPQ:
    """Approximate inner products with the vectors of the lists nearest to the query; exact ones for the best results.

    Args:
        lists: Number of lists; None: 4 times the square root of the number of vectors.
        probes: Number of lists that are searched for a query; None: an eighth of the lists, at least 8.
        subvectors: Bytes of a compressed vector; must divide the size of a vector. None: the largest divisor up to a
            quarter of the size.
        rescore: Number of docs that are compared again exactly, as a multiple of the number of requested docs.
        gpu: Whether to search on all GPUs; None: yes if faiss sees one.
    """

    exact = False

    def __init__(
        self,
        lists: int | None = None,
        probes: int | None = None,
        subvectors: int | None = None,
        rescore: int = 10,
        gpu: bool | None = None,
    ) -> None:
        self.lists, self.probes, self.subvectors = (
            require(f"index.{name}", value)
            for name, value in (("lists", lists), ("probes", probes), ("subvectors", subvectors))
        )
        self.rescore = require("index.rescore", rescore) or 1
        self.gpu = gpu

    def make(self, dim: int, num_vectors: int) -> Any:
        """Return a faiss index.

        Raises:
            ConfigError: `subvectors` does not divide the size of a vector.
        """
        import faiss

        subvectors = self.subvectors or next(count for count in range(max(1, dim // 4), 0, -1) if dim % count == 0)
        if dim % subvectors:
            raise ConfigError(f"index.subvectors: expected a divisor of the vectors' size {dim}, got {subvectors}")
        lists = num_lists(self.lists, num_vectors)
        bits = min(8, max(1, num_vectors.bit_length() - 1))  # at most as many codes as training vectors
        index = faiss.IndexIVFPQ(faiss.IndexFlatIP(dim), dim, lists, subvectors, bits, faiss.METRIC_INNER_PRODUCT)
        index.nprobe = min(lists, self.probes or max(8, lists // 8))
        return index

    def train_vectors(self, num_vectors: int) -> int:
        """Return the number of vectors that the index is trained on."""
        num_centroids = max(num_lists(self.lists, num_vectors), 256)  # 256 codes per subvector
        return TRAINED_PER_LIST * num_centroids
