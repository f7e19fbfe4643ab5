"""ListMLE: the likelihood of the order by label (Xia et al., 2008)."""

from __future__ import annotations

from torch import Tensor, nn

from ranker.losses._groups import choice_losses, has_lower, real_cells


class ListMLE(nn.Module):
    r"""Negative log-likelihood of the order by label in the Plackett-Luce model of the scores.

    .. math:: \ell(s, y) = \mathrm{mean}_{groups} \sum_i -\log \frac{e^{s_i}}{\sum_{y_j \le y_i} e^{s_j}}

    where the outer sum is over docs i for which another doc of the group has a lower label. With distinct labels, the
    sum leaves out the last doc only, whose term is 0. Docs with equal labels share a denominator (Breslow's rule for
    ties). With one relevant doc and binary labels, the loss is the softmax cross-entropy. A group in which all labels
    are equal has loss 0.

    Source: Xia et al., "Listwise Approach to Learning to Rank: Theory and Algorithm", ICML 2008; Breslow, "Covariance
    Analysis of Censored Survival Data", Biometrics 30, 1974 (ties).

    >>> import torch
    >>> scores, labels = torch.zeros(1, 3), torch.tensor([[2.0, 0.5, 1.0]])
    >>> ListMLE()(scores, labels, torch.ones(1, 3, dtype=torch.bool))  # ln 3 + ln 2
    tensor(1.7918)
    """

    def __init__(self) -> None:
        super().__init__()  # the inherited signature would accept any option, even a misspelt one

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the mean over groups of each group's sum over choices (0 if labels are equal).

        All inputs are [batch, docs].
        """
        scores, labels = real_cells(scores, labels, doc_mask)
        losses = choice_losses(scores, labels, doc_mask)
        return losses.masked_fill(~has_lower(labels, doc_mask), 0.0).sum(1).mean()
