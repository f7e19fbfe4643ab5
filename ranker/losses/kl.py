"""KL divergence between the teacher's and the student's distribution over a group's docs."""

from __future__ import annotations

from torch import Tensor, nn

from ranker.losses._groups import log_softmax, real_cells, require_positive


class KL(nn.Module):
    r"""Fit the softmax over a group's scores to the softmax over its labels, which are a teacher's scores.

    .. math:: \ell(s, y) = \mathrm{mean}_{groups} \sum_i p_i (\log p_i - \log q_i), \quad
        p = \mathrm{softmax}(y / \tau_y), \; q = \mathrm{softmax}(s / \tau)

    The minimum, 0, is reached if :math:`s / \tau` and :math:`y / \tau_y` differ by a constant. If all labels of a group
    are equal, the loss pulls its scores together. A group with no or one doc has loss 0. The value is not multiplied by
    :math:`\tau^2`.

    Source: Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network", arXiv:1503.02531, 2015.

    Args:
        temperature: Divisor :math:`\tau` of the scores; must be positive.
        teacher_temperature: Divisor :math:`\tau_y` of the labels; a larger value gives more weight to docs with low
            labels. Must be positive. None: `temperature`.

    >>> import torch
    >>> scores, labels = torch.tensor([[3.0, 1.0]]), torch.tensor([[7.0, 5.0]])
    >>> KL()(scores, labels, torch.ones(1, 2, dtype=torch.bool))  # the same gap
    tensor(0.)
    """

    pairwise = False

    def __init__(self, temperature: float = 1.0, teacher_temperature: float | None = None) -> None:
        super().__init__()
        self.temperature = require_positive("loss.temperature", temperature)
        if teacher_temperature is None:
            teacher_temperature = temperature
        self.teacher_temperature = require_positive("loss.teacher_temperature", teacher_temperature)

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the mean over groups of each group's divergence in nats. All inputs are [batch, docs]."""
        scores, labels = real_cells(scores, labels, doc_mask)
        teacher = log_softmax(labels / self.teacher_temperature, doc_mask)
        student = log_softmax(scores / self.temperature, doc_mask)
        return (teacher.exp() * (teacher - student)).sum(1).mean()  # a cell without a doc adds 1 * (0 - 0)
