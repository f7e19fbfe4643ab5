"""Margin-MSE: fit a teacher's score gaps (Hofstätter et al., 2020)."""

from __future__ import annotations

from torch import Tensor, nn

from ranker.errors import ConfigError
from ranker.losses._groups import gaps, mean_in_groups, ordered_pairs, real_cells


class MarginMSE(nn.Module):
    r"""Squared error between the score gap of two docs and the teacher's score gap; labels are the teacher's scores.

    .. math:: \ell(s, y) = \mathrm{mean}_{groups} \mathrm{mean}_{(i, j)} ((s_i - s_j) - (y_i - y_j))^2

    The mean is over pairs with :math:`y_i > y_j`. Only gaps count, so student and teacher scores may differ by a
    constant. A group without such a pair has loss 0.

    Source: Hofstätter et al., "Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge
    Distillation", arXiv:2010.02666, 2020, with one positive and one negative per query.

    Args:
        pairs: `ordered`: every pair whose labels differ. `best`: only pairs with a doc of the group's highest label.

    >>> import torch
    >>> scores, labels = torch.tensor([[1.0, 0.0]]), torch.tensor([[8.0, 5.0]])
    >>> MarginMSE()(scores, labels, torch.ones(1, 2, dtype=torch.bool))  # (1 - 3)^2
    tensor(4.)
    """

    def __init__(self, pairs: str = "ordered") -> None:
        super().__init__()
        if pairs not in ("ordered", "best"):
            raise ConfigError(
                f"loss.pairs: expected one of ordered, best; got {pairs!r}; set loss.pairs to one of them"
            )
        self.pairs = pairs

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the mean over groups of each group's mean over pairs (0 without pairs).

        All inputs are [batch, docs].
        """
        scores, labels = real_cells(scores, labels, doc_mask)
        chosen = ordered_pairs(labels, doc_mask)
        if self.pairs == "best":
            is_lower = chosen.any(1)  # [batch, docs]: another doc of the group has a higher label
            chosen = chosen & ~is_lower.unsqueeze(2)
        return mean_in_groups((gaps(scores) - gaps(labels)).square(), chosen)
