"""Binary cross-entropy with soft labels, doc by doc."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ranker.losses._groups import mean_in_groups, real_cells, require_positive


class BCE(nn.Module):
    r"""Binary cross-entropy between a soft label and the sigmoid of the score; the score is the log-odds of relevance.

    .. math:: \ell(s, y) = \mathrm{mean}_{groups} \mathrm{mean}_i
        [-w\, t_i \log \sigma(s_i) - (1 - t_i) \log (1 - \sigma(s_i))], \quad t_i = \min(\max(y_i / m, 0), 1)

    Labels below 0 or above `max_label` are clipped, because for t outside [0, 1] the loss has no lower bound. A group
    without docs has loss 0.

    Source: Good, "Rational Decisions", Journal of the Royal Statistical Society B 14, 1952 (the logarithmic score).

    Args:
        max_label: The label m of a certainly relevant doc, by which labels are divided. Must be positive.
        positive_weight: Weight w of relevance; with w equal to the number of negatives per positive, relevant and other
            docs have the same total weight. Must be positive.

    >>> import torch
    >>> scores, labels = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 1.5]])
    >>> BCE(max_label=3.0)(scores, labels, torch.ones(1, 2, dtype=torch.bool))  # score 0 costs ln 2 for any label
    tensor(0.6931)
    """

    pairwise = False
    needs_negatives = False

    def __init__(self, max_label: float = 1.0, positive_weight: float = 1.0) -> None:
        super().__init__()
        self.max_label = require_positive("loss.max_label", max_label)
        self.positive_weight = require_positive("loss.positive_weight", positive_weight)

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the mean over groups of each group's mean over docs.

        All inputs are [batch, docs]; scores are log-odds.
        """
        scores, labels = real_cells(scores, labels, doc_mask)
        relevance = (labels / self.max_label).clamp(0.0, 1.0)
        doc_loss = -self.positive_weight * relevance * logsigmoid(scores) - (1 - relevance) * logsigmoid(-scores)
        return mean_in_groups(doc_loss, doc_mask)
