"""Vectors of texts, and MaxSim between query vectors and doc vectors. Padding never changes a score."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from ranker.data.ragged import tensor_ranges
from ranker.interactions.maxsim_pairs import Pairs
from ranker.types import Movable


@dataclass
class TextVectors(Movable):
    """Vectors of texts, one or several per text, concatenated in the order of the texts.

    Args:
        values: All vectors, float32 (float64 in double precision) [vectors, dim].
        counts: Number of vectors of each text, int64 [texts]; None: each text has one vector.
        longest: Upper bound of `counts`, known without reading `counts` from a GPU; None: unknown.
    """

    values: Tensor
    counts: Tensor | None = None
    longest: int | None = None

    @property
    def num_texts(self) -> int:
        """Number of texts."""
        return self.values.shape[0] if self.counts is None else self.counts.shape[0]

    @cached_property
    def starts(self) -> Tensor:
        """Index of each text's first vector, and at the end the number of all vectors, int64 [texts + 1]."""
        if self.counts is None:
            return torch.arange(len(self.values) + 1, device=self.values.device)
        return functional.pad(self.counts.cumsum(0), (1, 0))

    def bound(self) -> int:
        """Return `longest`; if it is unknown, the largest of `counts`, for which the host waits for the device."""
        if self.longest is None:
            self.longest = 1 if self.counts is None else int(self.counts.max()) if len(self.counts) else 0
        return self.longest

    def vector_indices(self, texts: Tensor, total: int | None = None) -> Tensor:
        """Return where the vectors of some texts are in `values`, in the order of `texts`.

        Args:
            texts: Indices of the texts, at least 0, int64 [texts].
            total: Number of their vectors; None: unknown, so the host waits for the device.

        Returns:
            int64 [vectors]
        """
        if self.counts is None:
            return texts
        counts = self.counts[texts]
        return tensor_ranges(self.starts[texts], counts, int(counts.sum()) if total is None else total)

    def take(self, texts: Tensor, indices: Tensor | None = None) -> TextVectors:
        """Return the vectors of some texts.

        Args:
            texts: Indices of the texts, at least 0, int64 [texts]; the result has their order.
            indices: `vector_indices` of the texts, if they are known.
        """
        return TextVectors(
            self.values.index_select(0, self.vector_indices(texts) if indices is None else indices),
            None if self.counts is None else self.counts[texts],
            self.longest,
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


def has_kernel(queries: TextVectors, docs: TextVectors) -> bool:
    """Return whether the Triton kernel supports these vectors: several per text, on a GPU, of at most 32 bits."""
    several = queries.counts is not None and docs.counts is not None
    return (
        several
        and queries.values.is_cuda
        and torch.float64 not in (queries.values.dtype, docs.values.dtype)
        and find_spec("triton") is not None
    )


def _by_kernel(queries: TextVectors, docs: TextVectors, chosen: tuple[Tensor, Tensor] | None) -> Tensor:
    """Compute MaxSim of pairs (see `Pairs`) without storing similarities and without a wait of the host."""
    from ranker.interactions.kernels.maxsim import maxsim  # needs Triton

    return maxsim(queries.values, docs.values, Pairs(queries, docs, chosen))


def maxsim_pairs(queries: TextVectors, docs: TextVectors, query_indices: Tensor) -> Tensor:
    r"""Compute MaxSim of each doc with its query (Khattab and Zaharia, 2020).

    .. math:: s(q, d) = \sum_{i \in q} \max_{j \in d} q_i \cdot d_j

    Products have the type of the queries' vectors; sums are in float32 (float64 in double precision).

    Args:
        queries: Vectors of the queries.
        docs: Vectors of the docs; each doc has at least one.
        query_indices: The query of each doc, int64 [docs].

    Returns:
        Scores [docs].

    >>> one = TextVectors(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    >>> two = TextVectors(torch.tensor([[-0.6, 0.8], [0.5, 0.5], [0.1, 0.0]]), torch.tensor([1, 2]))
    >>> maxsim_pairs(one, two, torch.tensor([0, 0]))  # the 0 of a padding vector does not replace the maximum -0.6
    tensor([-0.6000,  0.5000])
    """
    if has_kernel(queries, docs):
        return _by_kernel(queries, docs, (query_indices, torch.arange(docs.num_texts, device=query_indices.device)))
    query_grid, query_mask = queries.padded()
    doc_grid, doc_mask = docs.padded()
    with torch.autocast(doc_grid.device.type, enabled=False):
        # [docs, query vectors, doc vectors]
        similarities = query_grid.index_select(0, query_indices) @ doc_grid.transpose(1, 2).to(query_grid.dtype)
    best = full_precision(similarities.masked_fill(~doc_mask.unsqueeze(1), -torch.inf).max(2).values)
    return best.masked_fill(~query_mask.index_select(0, query_indices), 0.0).sum(1)


def maxsim_chosen(queries: TextVectors, docs: TextVectors, query_of: Tensor, doc_of: Tensor) -> Tensor:
    """Compute MaxSim of chosen pairs of queries and docs, [pairs]. The kernel reads docs without copying them.

    Args:
        queries: Vectors of the queries.
        docs: Vectors of the docs; each doc has at least one.
        query_of: The query of each pair, int64 [pairs].
        doc_of: The doc of each pair, int64 [pairs].
    """
    if has_kernel(queries, docs):
        return _by_kernel(queries, docs, (query_of, doc_of))
    return maxsim_pairs(queries, docs.take(doc_of), query_of)


def maxsim_all(queries: TextVectors, docs: TextVectors) -> Tensor:
    """Compute MaxSim of every query with every doc, [queries, docs].

    Without the kernel, memory grows with query vectors times doc vectors, so split the texts into `blocks` first.
    """
    if has_kernel(queries, docs):
        return _by_kernel(queries, docs, None).view(queries.num_texts, docs.num_texts)
    query_grid, query_mask = queries.padded()
    doc_grid, doc_mask = docs.padded()
    with torch.autocast(doc_grid.device.type, enabled=False):
        similarities = query_grid.flatten(0, 1) @ doc_grid.flatten(0, 1).T.to(query_grid.dtype)
    similarities = similarities.view(*query_mask.shape, *doc_mask.shape)  # [queries, query vectors, docs, doc vectors]
    best = full_precision(similarities.masked_fill(~doc_mask, -torch.inf).max(3).values)
    return best.masked_fill(~query_mask.unsqueeze(2), 0.0).sum(1)


def blocks(texts: Tensor, vectors: TextVectors, max_vectors: int) -> list[Tensor]:
    """Split texts into blocks of about `max_vectors` vectors, padding included. A block has at least one text.

    Args:
        texts: Indices of the texts, int64 [texts].
        vectors: Vectors of all texts.
        max_vectors: Largest number of vectors of a block with several texts.

    Returns:
        The indices of each block's texts, int64 [texts of the block].
    """
    return list(texts.split(max(1, max_vectors // max(1, vectors.bound()))))
