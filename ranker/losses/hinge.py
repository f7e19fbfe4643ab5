"""Pairwise hinge: the doc with the higher label must score higher by a margin (Herbrich et al., 2000)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu

from ranker.losses._groups import gaps, mean_in_groups, ordered_pairs, real_cells, require_positive


class Hinge(nn.Module):
    r"""Penalise pairs of docs with different labels whose score gap is below the margin, by the missing amount.

    .. math:: \ell(s, y) = \mathrm{mean}_{groups} \mathrm{mean}_{y_i > y_j} \max(0, m - (s_i - s_j))

    A group without an ordered pair has loss 0.

    Source: Herbrich, Graepel and Obermayer, "Large Margin Rank Boundaries for Ordinal Regression", 2000.

    Args:
        margin: Smallest score gap m at which a pair has no loss; must be positive.

    >>> import torch
    >>> scores, labels = torch.tensor([[0.5, 0.25]]), torch.tensor([[1.0, 0.0]])
    >>> Hinge(margin=1.0)(scores, labels, torch.ones(1, 2, dtype=torch.bool))
    tensor(0.7500)
    """

    def __init__(self, margin: float = 1.0) -> None:
        super().__init__()
        self.margin = require_positive("loss.margin", margin)

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the mean over groups of each group's mean over ordered pairs (0 without such pairs).

        All inputs are [batch, docs].
        """
        scores, labels = real_cells(scores, labels, doc_mask)
        return mean_in_groups(relu(self.margin - gaps(scores)), ordered_pairs(labels, doc_mask))
