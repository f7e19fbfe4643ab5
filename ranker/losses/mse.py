"""Mean squared error on a teacher's scores, doc by doc."""

from __future__ import annotations

from torch import Tensor, nn

from ranker.losses._groups import mean_in_groups, real_cells


class MSE(nn.Module):
    r"""Squared error between a score and its label; labels are a teacher's scores.

    .. math:: \ell(s, y) = \mathrm{mean}_{groups} \mathrm{mean}_i (s_i - y_i)^2

    The student learns the teacher's scale and offset too; `margin_mse` and `kl` ignore the offset. A group of one doc
    counts; a group without docs counts 0.

    Source: Ba and Caruana, "Do Deep Nets Really Need to be Deep?", NIPS 2014 (regression to a teacher's logits).

    >>> import torch
    >>> scores, labels = torch.tensor([[1.0, 0.0]]), torch.tensor([[8.0, 1.0]])
    >>> MSE()(scores, labels, torch.ones(1, 2, dtype=torch.bool))  # (49 + 1) / 2
    tensor(25.)
    """

    pairwise = False
    needs_negatives = False

    def __init__(self) -> None:
        super().__init__()  # explicit: the inherited signature would accept any option, also a misspelt one

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the mean over groups of each group's mean over docs (0 if it has none). All inputs [batch, docs]."""
        scores, labels = real_cells(scores, labels, doc_mask)
        return mean_in_groups((scores - labels).square(), doc_mask)
