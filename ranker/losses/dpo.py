"""Direct preference optimisation against a frozen reference (Rafailov et al., 2023)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ranker.losses._groups import gaps, mean_in_groups, ordered_pairs, real_cells, require_positive


class DPO(nn.Module):
    r"""Logistic loss on the score gaps of pairs, minus the gaps of a reference model.

    .. math:: \ell(s, r, y) = \mathrm{mean}_{groups} \mathrm{mean}_{y_i > y_j}
        -\log \sigma(\beta ((s_i - r_i) - (s_j - r_j)))

    where r are the reference's scores. A doc's probability is :math:`\pi(i) = e^{s_i} / \sum_j e^{s_j}`, so that
    :math:`\log \pi(i) - \log \pi(j) = s_i - s_j`. The reference is the same model without its LoRA adapters; the
    training subtracts the reference's scores. A group without an ordered pair has loss 0.

    Source: Rafailov et al., "Direct Preference Optimization", arXiv:2305.18290, equation 7.

    Args:
        beta: How strongly the model is kept near the reference, in 1/score; must be positive. With a small value the
            model can move far from the reference.

    Attributes:
        against_reference: True: the training calls this loss with the scores minus the reference's scores.

    >>> import torch
    >>> relative, labels = torch.tensor([[10.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    >>> DPO()(relative, labels, torch.ones(1, 2, dtype=torch.bool))  # ln(1 + 1/e)
    tensor(0.3133)
    """

    against_reference = True

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.beta = require_positive("loss.beta", beta)

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the mean over groups of each group's mean over ordered pairs (0 without such pairs).

        All inputs are [batch, docs]; `scores` are the model's scores minus the reference's scores.
        """
        scores, labels = real_cells(scores, labels, doc_mask)
        return mean_in_groups(-logsigmoid(self.beta * gaps(scores)), ordered_pairs(labels, doc_mask))
