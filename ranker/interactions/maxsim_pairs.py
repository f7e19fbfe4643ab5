"""The pairs of a query and a doc that MaxSim compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ranker.interactions.maxsim import TextVectors


@dataclass
class Pairs:
    """Pairs of a query and a doc; their texts may have different numbers of vectors.

    Args:
        queries: Vectors of the queries.
        docs: Vectors of the docs.
        chosen: The query and the doc of each pair, int64 [pairs] each. None: every query with every doc, in the order
            of the queries.
    """

    queries: TextVectors
    docs: TextVectors
    chosen: tuple[Tensor, Tensor] | None = None

    @property
    def count(self) -> int:
        """Number of pairs."""
        return self.queries.num_texts * self.docs.num_texts if self.chosen is None else len(self.chosen[0])

    def indices(self) -> tuple[Tensor, Tensor]:
        """Return `chosen`. If it is None, return tensors that are not read: the kernel computes the indices itself."""
        if self.chosen is None:
            return self.queries.starts, self.docs.starts
        return self.chosen[0].contiguous(), self.chosen[1].contiguous()

    def by_query(self) -> tuple[Tensor, Tensor]:
        """Return the pairs sorted by query, int64 [pairs], and the start of each query's pairs, int64 [queries + 1].

        If `chosen` is None, return tensors that are not read.
        """
        return self.indices() if self.chosen is None else _grouped(self.chosen[0], self.queries.num_texts)

    def by_doc(self) -> tuple[Tensor, Tensor]:
        """Return the pairs sorted by doc, int64 [pairs], and the start of each doc's pairs, int64 [docs + 1].

        If `chosen` is None, return tensors that are not read.
        """
        return self.indices() if self.chosen is None else _grouped(self.chosen[1], self.docs.num_texts)


def _grouped(owners: Tensor, count: int) -> tuple[Tensor, Tensor]:
    order = owners.argsort(stable=True)
    owners_in_order = owners[order]
    return order, torch.searchsorted(owners_in_order, torch.arange(count + 1, device=owners.device))
