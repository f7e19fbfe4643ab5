"""MeanP: the score of a doc is the mean score of its best k windows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ranker.errors import ConfigError


class MeanP(nn.Module):
    r"""Score a doc by its best k windows' mean score: :math:`s(q, d) = \frac{1}{k} \sum_{j \in top_k} s(q, w_j)`.

    If a doc has fewer than k windows, the mean is over all of them. Only the windows in the mean get a gradient.

    Args:
        k: Number of windows; None: all.

    Raises:
        ConfigError: `k` is below 1.
    """

    reads = "scores"

    def __init__(self, k: int | None = 3) -> None:
        super().__init__()
        if k is not None and k < 1:
            raise ConfigError(f"passages.k: expected at least 1, or null for all windows; got {k}")
        self.k = k

    def extra_repr(self) -> str:
        """Return the value of `k` as text."""
        return f"k={self.k}"

    def forward(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Return the scores of docs [...].

        Args:
            scores: Scores of the docs' windows [..., windows].
            mask: True for windows, False for padding, bool, broadcast against `scores`.

        >>> MeanP(2)(torch.tensor([[1.0, 4.0, 2.0], [3.0, 9.0, 9.0]]), torch.tensor([[True] * 3, [True, False, False]]))
        tensor([3., 3.])
        """
        width = scores.shape[-1]
        best, chosen = scores.masked_fill(~mask, -torch.inf).topk(width if self.k is None else min(self.k, width))
        real = mask.expand_as(scores).gather(-1, chosen)
        return best.masked_fill(~real, 0.0).sum(-1) / real.sum(-1)
