"""Localized contrastive estimation: a positive doc competes with the negatives of its query (Gao et al., 2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ranker.losses._groups import mean_in_groups, real_cells, require_positive


class LCE(nn.Module):
    r"""Softmax cross-entropy of a positive doc among the group's negatives.

    .. math:: \ell(s, y) = \mathrm{mean}_{groups} \mathrm{mean}_{y_i > 0}
        -\log \frac{e^{s_i / \tau}}{e^{s_i / \tau} + \sum_{y_j \le 0} e^{s_j / \tau}}

    Positives are docs with a label above 0. If a group has several positives, each positive is compared with the
    negatives only. Groups may differ in their number of negatives: padding is masked, and no negative is repeated. A
    group without a positive or without a negative has loss 0 and is included in the mean over groups.

    Source: Gao, Dai and Callan, "Rethink Training of BERT Rerankers in Multi-Stage Retrieval Pipeline", ECIR 2021.

    Args:
        temperature: Divisor of the scores before the softmax; must be positive.

    >>> import torch
    >>> scores, labels = torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    >>> LCE()(scores, labels, torch.ones(1, 4, dtype=torch.bool))  # ln(1 + 3/e)
    tensor(0.7437)
    >>> LCE()(scores, labels, torch.tensor([[True, True, False, False]]))  # ln(1 + 1/e)
    tensor(0.3133)
    """

    pairwise = False

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = require_positive("loss.temperature", temperature)

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Average the loss over the positives of each group (0 without positives), then average over groups.

        All inputs are [batch, docs].
        """
        scores, labels = real_cells(scores, labels, doc_mask)
        logits = scores / self.temperature
        positive = labels > 0
        # Masked cells get the lowest finite number. With -inf, a group without a negative would have only -inf as
        # logits, and the gradient of their logsumexp would be NaN.
        negatives = logits.masked_fill(positive | ~doc_mask, torch.finfo(logits.dtype).min)
        return mean_in_groups(-logsigmoid(logits - negatives.logsumexp(1, keepdim=True)), positive)
