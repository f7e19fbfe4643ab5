"""Marginal likelihood of an answer, summed over the docs that a reader may read (Guu et al., 2020)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ranker.losses._groups import log_softmax, real_cells, require_positive


class MarginalLikelihood(nn.Module):
    r"""Negative log-likelihood of the answer of a reader that reads one doc, drawn by the softmax of the scores.

    .. math:: \ell(s, y) = \mathrm{mean}_{groups} -\log \sum_i p_i \frac{e^{y_i}}{\max_j e^{y_j}}, \qquad
        p = \mathrm{softmax}(s / \tau)

    Labels are a reader's :math:`y_i = \log p(\mathrm{answer} \mid q, d_i)` (`ranker label teacher=reader`). The divisor
    is constant in a group. Because of the divisor, the loss is 0 if the ranker gives all probability to the doc with
    which the reader answers best. A group with no or one doc has loss 0.

    Source: Guu et al., "REALM", arXiv:2002.08909, equation 1; Lewis et al., "Retrieval-Augmented Generation",
    arXiv:2005.11401 (RAG-Sequence).

    Args:
        temperature: Divisor :math:`\tau` of the scores; must be positive.

    Attributes:
        sorts_all: False: the loss learns which docs are best, and hardly the order of the other docs.

    >>> import torch
    >>> scores, labels = torch.zeros(1, 2), torch.tensor([[-1.0, -2.0]])
    >>> MarginalLikelihood()(scores, labels, torch.ones(1, 2, dtype=torch.bool))  # -ln((1 + 1/e) / 2)
    tensor(0.3799)
    """

    pairwise = False
    sorts_all = False

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = require_positive("loss.temperature", temperature)

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the mean over groups of each group's loss in nats. All inputs are [batch, docs]."""
        scores, labels = real_cells(scores, labels, doc_mask)
        lowest = torch.finfo(scores.dtype).min
        best = labels.masked_fill(~doc_mask, lowest).amax(1, keepdim=True).clamp(min=lowest / 2)
        likelihood = log_softmax(scores / self.temperature, doc_mask) + labels - best
        total = likelihood.masked_fill(~doc_mask, lowest).logsumexp(1)
        return -total.masked_fill(~doc_mask.any(1), 0.0).mean()
