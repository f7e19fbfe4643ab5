"""Position-aware ListMLE: ListMLE with more weight for the top of the order by label (Lan et al., 2014)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ranker.losses._groups import choice_losses, has_lower, label_ranks, real_cells


class PListMLE(nn.Module):
    r"""ListMLE whose choices are weighted by their rank in the order by label.

    .. math:: \ell(s, y) = \mathrm{mean}_{groups} \frac{1}{\sum_i \alpha_i}
        \sum_i -\alpha_i \log \frac{e^{s_i}}{\sum_{y_j \le y_i} e^{s_j}}, \quad \alpha_i = 2^{n - r_i} - 1

    with n docs in the group and :math:`r_i` the rank of doc i by descending label, from 1. Sums over i are over docs
    for which another doc of the group has a lower label. Equal labels share a denominator and the mean of their ranks.
    The weights of a group are divided by their sum, which the paper does not do. Without this division, a group of 30
    docs would have a million times the weight of a group of 10 docs. A group in which all labels are equal has loss 0.

    Source: Lan et al., "Position-Aware ListMLE: A Sequential Learning Process for Ranking", UAI 2014.

    >>> import torch
    >>> scores, labels = torch.zeros(1, 3), torch.tensor([[2.0, 0.5, 1.0]])
    >>> PListMLE()(scores, labels, torch.ones(1, 3, dtype=torch.bool))  # (3 ln 3 + ln 2) / 4
    tensor(0.9972)
    """

    def __init__(self) -> None:
        super().__init__()  # the inherited signature would accept any option, even a misspelt one

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the mean over groups of each group's weighted mean over choices (0 if labels are equal).

        All inputs are [batch, docs].
        """
        scores, labels = real_cells(scores, labels, doc_mask)
        ordered = has_lower(labels, doc_mask)
        num_docs = doc_mask.sum(1, keepdim=True).to(scores.dtype)
        # (2^(n - r) - 1) / 2^n: the common factor cancels, and 2^n would overflow
        weights = torch.exp2(-label_ranks(labels, doc_mask)) - torch.exp2(-num_docs)
        weights = weights.masked_fill(~ordered, 0.0)
        total = weights.sum(1)
        losses = (weights * choice_losses(scores, labels, doc_mask).masked_fill(~ordered, 0.0)).sum(1)
        return (losses / total.masked_fill(total == 0, 1.0)).mean()
