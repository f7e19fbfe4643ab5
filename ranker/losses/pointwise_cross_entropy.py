"""Pointwise cross-entropy, relevant or not relevant: the loss of the original monoBERT (Nogueira and Cho, 2019)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ranker.losses._groups import mean_in_groups, real_cells


class PointwiseCrossEntropy(nn.Module):
    r"""Classify each doc independently as relevant or not, as monoBERT does with two logits.

    .. math:: \ell(s, y) = \mathrm{mean}_{groups} \mathrm{mean}_i
        \begin{cases} -\log p_i & y_i > 0 \\ -\log (1 - p_i) & y_i \le 0 \end{cases}

    with :math:`p = \mathrm{softmax}(l_0, l_1)_1`. A softmax over two logits depends only on their difference: if the
    score is the log-odds :math:`s = l_1 - l_0`, then :math:`p = 1 / (1 + e^{-s})`. So this loss equals the paper's
    cross-entropy, from one number per doc. The paper averages over all pairs of a batch; here every group has the same
    weight, with any number of docs. A doc is relevant if its label is above 0. A group without docs has loss 0.

    Source: Nogueira and Cho, "Passage Re-ranking with BERT", arXiv:1901.04085, 2019.

    >>> import torch
    >>> scores, labels = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    >>> PointwiseCrossEntropy()(scores, labels, torch.ones(1, 2, dtype=torch.bool))  # probability 1/2: ln 2
    tensor(0.6931)
    """

    pairwise = False
    needs_negatives = False

    def __init__(self) -> None:
        super().__init__()  # the inherited signature would accept any option, even a misspelt one

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the mean over groups of each group's mean over docs.

        All inputs are [batch, docs]; scores are log-odds.
        """
        scores, labels = real_cells(scores, labels, doc_mask)
        towards_label = scores.where(labels > 0, -scores)
        return mean_in_groups(-logsigmoid(towards_label), doc_mask)
