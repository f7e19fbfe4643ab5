"""Exact search over term weights by an inverted index, for learned sparse rankers."""

from __future__ import annotations

from typing import Any

from ranker.retrieval.impact_store import ImpactStore
from ranker.retrieval.postings import Postings


class Sparse:
    """All docs that share a word with the query are scored.

    Args:
        quantized: Whether weights of docs are stored in 8 bits: a quarter of the size, scores are approximate.
    """

    terms = True
    exact = True
    rescore = 1
    gpu = None

    def __init__(self, quantized: bool = False) -> None:
        self.quantized = quantized

    def over(self, store: ImpactStore) -> Any:
        """Open the index that is stored beside the weights, or build it."""
        return Postings.over(store, self.quantized)
