"""InfoNCE over one or several positives: a softmax over all docs of the group (van den Oord et al., 2018)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ranker.errors import ConfigError
from ranker.losses._groups import log_softmax, mean_in_groups, real_cells, require_positive


class InfoNCE(nn.Module):
    r"""Softmax cross-entropy of each positive (label above 0) among all docs of the group, with the other positives.

    With :math:`p = \mathrm{softmax}(s / \tau)` over the group,

    .. math:: \ell_{each}(s, y) = \mathrm{mean}_{groups} \mathrm{mean}_{y_i > 0} -\log p_i, \quad
        \ell_{any}(s, y) = \mathrm{mean}_{groups} -\log \sum_{y_i > 0} p_i

    `each` is lowest if all positives have equal, high scores; `any` is low if one positive has a high score. The loss
    `lce` compares each positive with the negatives only. With one positive, `each`, `any` and `lce` are equal. A group
    without a positive or without a negative has loss 0.

    Source: van den Oord, Li and Vinyals, "Representation Learning with Contrastive Predictive Coding",
    arXiv:1807.03748, 2018; for several positives: Khosla et al., "Supervised Contrastive Learning", NeurIPS 2020
    (`each`, eq. 2), and Miech et al., "End-to-End Learning of Visual Representations from Uncurated Instructional
    Videos", CVPR 2020 (`any`, eq. 1).

    Args:
        positives: `each` or `any`.
        temperature: Divisor of the scores before the softmax; must be positive.

    >>> import torch
    >>> scores, labels = torch.zeros(1, 4), torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    >>> InfoNCE()(scores, labels, torch.ones(1, 4, dtype=torch.bool))  # ln 4
    tensor(1.3863)
    >>> InfoNCE(positives="any")(scores, labels, torch.ones(1, 4, dtype=torch.bool))  # ln 2
    tensor(0.6931)
    """

    pairwise = False

    def __init__(self, positives: str = "each", temperature: float = 1.0) -> None:
        super().__init__()
        if positives not in ("each", "any"):
            raise ConfigError(
                f"loss.positives: expected one of each, any; got {positives!r}; set loss.positives to one of them"
            )
        self.positives = positives
        self.temperature = require_positive("loss.temperature", temperature)

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the mean over groups of each group's loss (0 without a positive or a negative).

        All inputs are [batch, docs].
        """
        scores, labels = real_cells(scores, labels, doc_mask)
        log_shares = log_softmax(scores / self.temperature, doc_mask)
        positive = (labels > 0) & doc_mask
        has_contrast = (positive.any(1) & (doc_mask & ~positive).any(1)).unsqueeze(1)
        if self.positives == "each":
            return mean_in_groups(-log_shares, positive & has_contrast)
        lowest = torch.finfo(log_shares.dtype).min  # with -inf, a group without a positive would have a NaN gradient
        total = log_shares.masked_fill(~positive, lowest).logsumexp(1, keepdim=True)
        return mean_in_groups(-total, has_contrast)
