"""Inverted lists: vectors are grouped by nearest centroid, and a query searches the nearest lists.

Source: Sivic and Zisserman, "Video Google", ICCV 2003.
"""

from __future__ import annotations

from typing import Any

from ranker.retrieval.index_type import TRAINED_PER_LIST, num_lists, require


class IVFFlat:
    """Inner products with the vectors of the lists nearest to the query.

    Args:
        lists: Number of lists; None: 4 times the square root of the number of vectors.
        probes: Number of lists that are searched for a query; None: an eighth of the lists, at least 8.
        gpu: Whether to search on all GPUs; None: yes if faiss sees one.
    """

    exact = False
    rescore = 1

    def __init__(self, lists: int | None = None, probes: int | None = None, gpu: bool | None = None) -> None:
        self.lists, self.probes, self.gpu = require("index.lists", lists), require("index.probes", probes), gpu

    def make(self, dim: int, num_vectors: int) -> Any:
        """Return a faiss index."""
        import faiss

        lists = num_lists(self.lists, num_vectors)
        # without the metric, faiss would search by L2 whatever the quantizer says
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
        index.nprobe = min(lists, self.probes or max(8, lists // 8))
        return index

    def train_vectors(self, num_vectors: int) -> int:
        """Return the number of vectors that the index is trained on."""
        return TRAINED_PER_LIST * num_lists(self.lists, num_vectors)
