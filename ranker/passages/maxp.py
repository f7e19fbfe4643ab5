"""MaxP: the score of a doc is the score of its best window (Dai and Callan, 2019, arXiv:1905.09217)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MaxP(nn.Module):
    r"""Score a doc by its best window: :math:`s(q, d) = \max_j s(q, w_j)`. Only that window gets a gradient."""

    reads = "scores"

    def forward(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Return the scores of docs [...].

        Args:
            scores: Scores of the docs' windows [..., windows].
            mask: True for windows, False for padding, bool, broadcast against `scores`.

        >>> MaxP()(torch.tensor([[-2.0, -1.0, 5.0]]), torch.tensor([[True, True, False]]))
        tensor([-1.])
        """
        return scores.masked_fill(~mask, -torch.inf).max(-1).values
