"""Indices of the pairs of a query and a doc that MaxSim compares, as tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass
class Pairs:
    """Pairs of a query and a doc, whose texts have different numbers of vectors.

    Args:
        query_starts: Index of each query's first vector, then the number of all query vectors, int64 [queries + 1].
        doc_starts: Index of each doc's first vector, then the number of all doc vectors, int64 [docs + 1].
        query_of: The query of each pair, int64 [pairs].
        doc_of: The doc of each pair, int64 [pairs].
        widest_query: Largest number of vectors of a query.
        widest_doc: Largest number of vectors of a doc.
    """

    query_starts: Tensor
    doc_starts: Tensor
    query_of: Tensor
    doc_of: Tensor
    widest_query: int
    widest_doc: int

    @classmethod
    def of(cls, query_counts: Tensor, doc_counts: Tensor, query_of: Tensor, doc_of: Tensor) -> Pairs:
        """Return the pairs of texts with these numbers of vectors, int64 [texts]."""
        query_starts, doc_starts = (functional.pad(counts.cumsum(0), (1, 0)) for counts in (query_counts, doc_counts))
        widest_query, widest_doc = (int(counts.max()) if len(counts) else 0 for counts in (query_counts, doc_counts))
        return cls(query_starts, doc_starts, query_of.contiguous(), doc_of.contiguous(), widest_query, widest_doc)

    @property
    def count(self) -> int:
        """Number of pairs."""
        return len(self.query_of)

    def by_query(self) -> tuple[Tensor, Tensor]:
        """Return the pairs sorted by query, int64 [pairs], and the start of each query's pairs, int64 [queries + 1]."""
        return _grouped(self.query_of, len(self.query_starts) - 1)

    def by_doc(self) -> tuple[Tensor, Tensor]:
        """Return the pairs sorted by doc, int64 [pairs], and the start of each doc's pairs, int64 [docs + 1]."""
        return _grouped(self.doc_of, len(self.doc_starts) - 1)


def _grouped(owners: Tensor, count: int) -> tuple[Tensor, Tensor]:
    order = owners.argsort(stable=True)
    owners_in_order = owners[order]
    return order, torch.searchsorted(owners_in_order, torch.arange(count + 1, device=owners.device))
