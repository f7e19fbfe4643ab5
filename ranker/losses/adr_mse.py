"""ADR-MSE: fit smooth ranks to a teacher's ranks (Schlatt et al., 2024)."""

from __future__ import annotations

from torch import Tensor, nn

from ranker.losses._groups import discounts, gaps, label_ranks, mean_in_groups, real_cells, require_positive


class ADRMSE(nn.Module):
    r"""Approximate discounted rank MSE: squared error between a doc's smooth rank and its rank by label.

    .. math:: \ell(s, y) = \mathrm{mean}_{groups} \mathrm{mean}_i \frac{(r_i - \hat r_i)^2}{\log_2(1 + r_i)},
        \quad \hat r_i = 1 + \sum_{j \ne i} \frac{1}{1 + e^{\alpha (s_i - s_j)}}

    where :math:`r_i` is the rank of doc i by descending label, from 1. Only the order of the labels counts. Docs with
    equal labels share the mean of their ranks; their smooth ranks reach this mean if their scores are equal. In the
    paper, teachers rank without ties. If all labels of a group are equal, the loss pulls its scores together. A group
    with no or one doc has loss 0.

    Source: Schlatt et al., "Rank-DistiLLM: Closing the Effectiveness Gap Between Cross-Encoders and LLMs for Passage
    Re-Ranking", arXiv:2405.07920, 2024.

    Args:
        alpha: Steepness of the sigmoid, in 1/score; must be positive. A larger value makes smooth ranks closer to
            true ranks, but gives no gradient to pairs with distant scores.

    >>> import torch
    >>> scores, labels = torch.tensor([[0.0, 0.0]]), torch.tensor([[5.0, 2.0]])
    >>> ADRMSE()(scores, labels, torch.ones(1, 2, dtype=torch.bool))  # both at rank 1.5: (0.25 + 0.25 / log2(3)) / 2
    tensor(0.2039)
    """

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        self.alpha = require_positive("loss.alpha", alpha)

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the mean over groups of each group's mean over docs (0 without docs). All inputs are [batch, docs]."""
        scores, labels = real_cells(scores, labels, doc_mask)
        # [batch, docs, docs]: close to 1 where doc j scores above doc i
        above = (-self.alpha * gaps(scores)).sigmoid().masked_fill(~doc_mask.unsqueeze(1), 0.0)
        smooth = 0.5 + above.sum(2)  # the sum includes the doc itself, with sigmoid(0) = 0.5
        ranks = label_ranks(labels, doc_mask)
        return mean_in_groups(discounts(ranks) * (ranks - smooth).square(), doc_mask)
