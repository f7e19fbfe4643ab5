"""ListNet: cross-entropy between the top-one probabilities of labels and scores (Cao et al., 2007)."""

from __future__ import annotations

from torch import Tensor, nn

from ranker.losses._groups import log_softmax, ordered_pairs, real_cells, require_positive


class ListNet(nn.Module):
    r"""Cross-entropy between the probabilities that a doc is ranked first: by the labels and by the scores.

    .. math:: \ell(s, y) = \mathrm{mean}_{groups}
        -\sum_i \mathrm{softmax}(y / \tau_y)_i \log \mathrm{softmax}(s / \tau_s)_i

    A group whose labels are all equal has loss 0. The minimum is the entropy of the softmax of the labels, not 0.

    Source: Cao et al., "Learning to Rank: From Pairwise Approach to Listwise Approach", ICML 2007.

    Args:
        label_temperature: Divisor of the labels; a smaller value puts more weight on the highest grade. Must be
            positive.
        score_temperature: Divisor of the scores; must be positive.

    >>> import torch
    >>> scores, labels = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    >>> ListNet()(scores, labels, torch.ones(1, 2, dtype=torch.bool))  # equal scores: ln 2
    tensor(0.6931)
    """

    def __init__(self, label_temperature: float = 1.0, score_temperature: float = 1.0) -> None:
        super().__init__()
        self.label_temperature = require_positive("loss.label_temperature", label_temperature)
        self.score_temperature = require_positive("loss.score_temperature", score_temperature)

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the mean over groups of each group's cross-entropy (0 if all labels are equal).

        All inputs are [batch, docs].
        """
        scores, labels = real_cells(scores, labels, doc_mask)
        first_by_label = log_softmax(labels / self.label_temperature, doc_mask).exp()
        doc_loss = -first_by_label * log_softmax(
            scores / self.score_temperature, doc_mask
        )  # a cell without a doc adds 0
        has_order = ordered_pairs(labels, doc_mask).flatten(1).any(1)
        return doc_loss.sum(1).masked_fill(~has_order, 0.0).mean()
