"""ApproxNDCG: nDCG with smooth ranks (Qin et al., 2010)."""

from __future__ import annotations

from torch import Tensor, nn

from ranker.losses._groups import discounts, gaps, ndcg_gains, real_cells, require_positive


class ApproxNDCG(nn.Module):
    r"""Maximise a smooth nDCG: a sigmoid replaces the step function that counts the docs above a doc.

    .. math:: \ell(s, y) = \mathrm{mean}_{groups} \left(1 - \frac{1}{\max \mathrm{DCG}}
        \sum_i \frac{2^{y_i} - 1}{\log_2(1 + \hat r_i)}\right),
        \quad \hat r_i = 1 + \sum_{j \ne i} \frac{1}{1 + e^{\alpha (s_i - s_j)}}

    The value is between 0 and 1. Labels below 0 have gain 0. A group without a label above 0 has loss 0.

    Source: Qin, Liu and Li, "A general approximation framework for direct optimization of information retrieval
    measures", Information Retrieval 13, 2010.

    Args:
        alpha: Steepness of the sigmoid, in 1/score; must be positive. A larger value is closer to nDCG, but gives no
            gradient to pairs with distant scores.

    >>> import torch
    >>> scores, labels = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    >>> ApproxNDCG()(scores, labels, torch.ones(1, 2, dtype=torch.bool))  # both at rank 1.5: 1 - 1 / log2(2.5)
    tensor(0.2435)
    """

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        self.alpha = require_positive("loss.alpha", alpha)

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the mean over groups of 1 - ApproxNDCG (0 if no label is above 0). All inputs are [batch, docs]."""
        scores, labels = real_cells(scores, labels, doc_mask)
        gains = ndcg_gains(labels, doc_mask)
        # [batch, docs, docs]: close to 1 where doc j scores above doc i
        above = (-self.alpha * gaps(scores)).sigmoid().masked_fill(~doc_mask.unsqueeze(1), 0.0)
        ranks = 0.5 + above.sum(2)  # the sum includes the doc itself, with sigmoid(0) = 0.5
        ndcg = (gains * discounts(ranks)).sum(1)
        return (1.0 - ndcg).masked_fill(gains.amax(1) == 0, 0.0).mean()
