"""RankNet: pairwise logistic loss (Burges et al., 2005)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ranker.losses._groups import gaps, mean_in_groups, ordered_pairs, real_cells, require_positive


class RankNet(nn.Module):
    r"""Logistic loss on the score gap of every ordered pair of docs.

    .. math:: \ell(s, y) = \mathrm{mean}_{groups} \mathrm{mean}_{y_i > y_j} \log(1 + e^{-\sigma (s_i - s_j)})

    A group without an ordered pair has loss 0.

    Source: Burges et al., "Learning to Rank using Gradient Descent", ICML 2005.

    Args:
        sigma: Steepness of the logistic curve, in 1/score; must be positive.

    >>> import torch
    >>> scores, labels = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    >>> RankNet()(scores, labels, torch.ones(1, 2, dtype=torch.bool))  # ln(1 + 1/e)
    tensor(0.3133)
    """

    def __init__(self, sigma: float = 1.0) -> None:
        super().__init__()
        self.sigma = require_positive("loss.sigma", sigma)

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the mean over groups of each group's mean over ordered pairs (0 without such pairs).

        All inputs are [batch, docs].
        """
        scores, labels = real_cells(scores, labels, doc_mask)
        # logsigmoid is exact for all gaps; softplus is linear above 20, which is not exact in float64.
        return mean_in_groups(-logsigmoid(self.sigma * gaps(scores)), ordered_pairs(labels, doc_mask))
