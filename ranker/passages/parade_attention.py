"""PARADE's attention: a weighted mean of window vectors (Li et al., 2020, arXiv:2008.09093)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ParadeAttention(nn.Module):
    r"""Represent a doc by a weighted mean of its window vectors.

    .. math:: d = \sum_j \mathrm{softmax}_j(u \cdot p_j)\,p_j

    A doc with a single window is represented by the vector of this window.

    Args:
        dim: Size of a vector.
    """

    reads = "vectors"

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim).normal_(std=0.02))

    def forward(self, vectors: Tensor, mask: Tensor) -> Tensor:
        """Return the vectors of docs [docs, dim].

        Args:
            vectors: Vectors of the docs' windows [docs, windows, dim]; 0 in padding.
            mask: True for windows, False for padding, bool [docs, windows].
        """
        weights = (vectors @ self.weight).masked_fill(~mask, -torch.inf).softmax(-1)
        return (weights.unsqueeze(-1) * vectors).sum(-2)
