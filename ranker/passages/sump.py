"""SumP: the score of a doc is the sum of its windows' scores (Dai and Callan, 2019, arXiv:1905.09217)."""

from __future__ import annotations

from torch import Tensor, nn


class SumP(nn.Module):
    r"""Score a doc by the sum of its windows' scores: :math:`s(q, d) = \sum_j s(q, w_j)`."""

    reads = "scores"

    def forward(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Return the scores of docs [...].

        Args:
            scores: Scores of the docs' windows [..., windows].
            mask: True for windows, False for padding, bool, broadcast against `scores`.
        """
        return scores.masked_fill(~mask, 0.0).sum(-1)
