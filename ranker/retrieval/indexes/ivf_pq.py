"""Lists of compressed vectors (Jégou et al., 2011); the best are compared again by their whole vectors."""

from __future__ import annotations

from typing import Any

from ranker.errors import ConfigError
from ranker.retrieval.index import TRAINED_PER_LIST, num_lists, require


class IVFPQ:
    """Approximate inner products with the vectors of some lists, exact ones for the best.

    Args:
        lists: Number of lists; None: 4 times the root of the number of vectors.
        probes: Lists that a query looks into; None: an eighth of them, at least 8.
        subvectors: Bytes of a compressed vector; must divide the vectors' size. None: the largest divisor up to a
            quarter of it.
        rescore: So many times the docs asked for are compared again exactly.
        gpu: Whether to search on all GPUs; None: where faiss sees one.
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
            ConfigError: The subvectors do not divide the vectors.
        """
        import faiss

        subvectors = self.subvectors or next(count for count in range(max(1, dim // 4), 0, -1) if dim % count == 0)
        if dim % subvectors:
            raise ConfigError(f"index.subvectors: expected a divisor of the vectors' size {dim}, got {subvectors}")
        lists = num_lists(self.lists, num_vectors)
        bits = min(8, max(1, num_vectors.bit_length() - 1))  # no more codes than there are vectors to learn them from
        index = faiss.IndexIVFPQ(faiss.IndexFlatIP(dim), dim, lists, subvectors, bits, faiss.METRIC_INNER_PRODUCT)
        index.nprobe = min(lists, self.probes or max(8, lists // 8))
        return index

    def train_vectors(self, num_vectors: int) -> int:
        """How many vectors it learns from."""
        return max(
            TRAINED_PER_LIST * num_lists(self.lists, num_vectors), 256 * TRAINED_PER_LIST
        )  # 256 codes per subvector
