"""Vectors of texts, and MaxSim between query vectors and doc vectors; padding never changes a score."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ranker.data.ragged import tensor_ranges
from ranker.types import Movable


@dataclass
class TextVectors(Movable):
    """Vectors of texts, one or several per text, concatenated in the order of the texts.

    Args:
        values: All vectors, float32 (float64 in double precision) [vectors, dim].
        counts: Number of vectors of each text, int64 [texts]; None: one each.
    """

    values: Tensor
    counts: Tensor | None = None

    @property
    def num_texts(self) -> int:
        """Number of texts."""
        return self.values.shape[0] if self.counts is None else self.counts.shape[0]

    def vector_indices(self, texts: Tensor) -> Tensor:
        """Return where the vectors of chosen texts are in `values`, in the order of `texts`.

        Args:
            texts: Indices of the texts, int64 [texts].

        Returns:
            int64 [vectors]
        """
        if self.counts is None:
            return texts
        starts, counts = (self.counts.cumsum(0) - self.counts)[texts], self.counts[texts]
        return tensor_ranges(starts, counts, int(counts.sum()))

    def take(self, texts: Tensor) -> TextVectors:
        """Return the vectors of chosen texts, int64 [texts], in that order."""
        return TextVectors(
            self.values.index_select(0, self.vector_indices(texts)), None if self.counts is None else self.counts[texts]
        )

    def padded(self) -> tuple[Tensor, Tensor]:
        """Return the vectors padded with zeros [texts, max vectors, dim] and their mask [texts, max vectors]."""
        counts = torch.ones_like(self.values[:, 0], dtype=torch.int64) if self.counts is None else self.counts
        max_vectors = int(counts.max()) if len(counts) else 0
        mask = torch.arange(max_vectors, device=counts.device) < counts.unsqueeze(1)
        cells = torch.nonzero_static(mask.flatten(), size=self.values.shape[0]).squeeze(1)
        grid = self.values.new_zeros(mask.numel(), self.values.shape[1]).index_copy(0, cells, self.values)
        return grid.view(*mask.shape, -1), mask


def full_precision(tensor: Tensor) -> Tensor:
    """Convert to float32, but keep float64.

    Similarities in half precision overflow and tie (case PC-52, docs/cases.md).
    """
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def maxsim_pairs(queries: TextVectors, docs: TextVectors, query_indices: Tensor) -> Tensor:
    r"""Compute MaxSim of each doc with its query (Khattab and Zaharia, 2020).

    .. math:: s(q, d) = \sum_{i \in q} \max_{j \in d} q_i \cdot d_j

    Args:
        queries: Vectors of the queries.
        docs: Vectors of the docs, at least one each.
        query_indices: The query of each doc, int64 [docs].

    Returns:
        Scores [docs].

    >>> one = TextVectors(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    >>> two = TextVectors(torch.tensor([[-0.6, 0.8], [0.5, 0.5], [0.1, 0.0]]), torch.tensor([1, 2]))
    >>> maxsim_pairs(one, two, torch.tensor([0, 0]))  # padding does not win over -0.6
    tensor([-0.6000,  0.5000])
    """
    query_grid, query_mask = queries.padded()
    doc_grid, doc_mask = docs.padded()
    with torch.autocast(doc_grid.device.type, enabled=False):
        # [docs, query vectors, doc vectors]
        similarities = query_grid.index_select(0, query_indices) @ doc_grid.transpose(1, 2)
    best = similarities.masked_fill(~doc_mask.unsqueeze(1), -torch.inf).max(2).values
    return best.masked_fill(~query_mask.index_select(0, query_indices), 0.0).sum(1)


def maxsim_all(queries: TextVectors, docs: TextVectors) -> Tensor:
    """Compute MaxSim of every query with every doc, [queries, docs].

    Memory grows with query vectors times doc vectors, so call it with blocks of texts (`blocks`).
    """
    query_grid, query_mask = queries.padded()
    doc_grid, doc_mask = docs.padded()
    with torch.autocast(doc_grid.device.type, enabled=False):
        similarities = query_grid.flatten(0, 1) @ doc_grid.flatten(0, 1).T
    similarities = similarities.view(*query_mask.shape, *doc_mask.shape)  # [queries, query vectors, docs, doc vectors]
    best = similarities.masked_fill(~doc_mask, -torch.inf).max(3).values
    return best.masked_fill(~query_mask.unsqueeze(2), 0.0).sum(1)


def blocks(texts: Tensor, vectors: TextVectors, max_vectors: int) -> list[Tensor]:
    """Split texts into blocks of about `max_vectors` vectors, counted with padding; each has at least one text.

    Args:
        texts: Indices of the texts, int64 [texts].
        vectors: Vectors of all texts.
        max_vectors: Vectors of a block.

    Returns:
        The indices of each block's texts, int64 [texts of the block].
    """
    widest = 1 if vectors.counts is None or not vectors.num_texts else int(vectors.counts.max())
    return list(texts.split(max(1, max_vectors // max(1, widest))))
