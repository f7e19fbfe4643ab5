"""RankNet with a teacher's order of docs (Schlatt et al., 2024), optionally with more weight for the top ranks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ranker.errors import ConfigError
from ranker.losses._groups import gaps, label_ranks, ordered_pairs, real_cells, require_positive


class DistillRankNet(nn.Module):
    r"""Logistic loss on every pair of docs with different labels; labels are a teacher's scores.

    .. math:: \ell(s, y) = \mathrm{mean}_{groups} \frac{\sum_{r_i < r_j} w_{ij} \log(1 + e^{-\sigma (s_i - s_j)})}
        {\sum_{r_i < r_j} w_{ij}}

    where :math:`r_i` is the rank of doc i by descending label, from 1; equal labels share the mean of their ranks. With
    `weights=equal`, as in Rank-DistiLLM, the value equals that of `ranknet` on the same labels. With
    `weights=inverse_ranks`, :math:`w_{ij} = 1 / (r_i + r_j)`. Only the order of the labels counts. A group without a
    pair of different labels has loss 0.

    Source: Schlatt et al., "Rank-DistiLLM", arXiv:2405.07920, 2024; Reddy et al., "FIRST: Faster Improved Listwise
    Reranking with Single Token Decoding", arXiv:2406.15657, 2024 (the weights by ranks).

    Args:
        weights: `equal` or `inverse_ranks`.
        sigma: Steepness of the logistic curve, in 1/score; must be positive.

    >>> import torch
    >>> scores, labels = torch.tensor([[1.0, 0.0]]), torch.tensor([[9.0, 7.0]])
    >>> DistillRankNet()(scores, labels, torch.ones(1, 2, dtype=torch.bool))  # ln(1 + 1/e)
    tensor(0.3133)
    """

    def __init__(self, weights: str = "equal", sigma: float = 1.0) -> None:
        super().__init__()
        if weights not in ("equal", "inverse_ranks"):
            raise ConfigError(
                f"loss.weights: expected one of equal, inverse_ranks; got {weights!r}; set loss.weights to one of them"
            )
        self.weights = weights
        self.sigma = require_positive("loss.sigma", sigma)

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the mean over groups of each group's weighted mean over ordered pairs (0 without such pairs).

        All inputs are [batch, docs].
        """
        scores, labels = real_cells(scores, labels, doc_mask)
        weights = ordered_pairs(labels, doc_mask).to(scores.dtype)
        if self.weights == "inverse_ranks":
            ranks = label_ranks(labels, doc_mask)
            weights = weights / (ranks.unsqueeze(2) + ranks.unsqueeze(1))
        sums = (weights * -logsigmoid(self.sigma * gaps(scores))).sum((1, 2))
        total = weights.sum((1, 2))
        return (sums / total.masked_fill(total == 0, 1.0)).mean()
