"""LambdaLoss: RankNet whose pairs are weighted by their effect on nDCG (NDCG-Loss2++, Wang et al., 2018)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ranker.errors import ConfigError
from ranker.losses._groups import discounts, gaps, ndcg_gains, ordered_pairs, real_cells, require_positive


class LambdaLoss(nn.Module):
    r"""Logistic loss on ordered pairs, weighted by the nDCG that a wrong order can cost at the current ranks.

    .. math:: \ell(s, y) = \mathrm{mean}_{groups} \sum_{y_i > y_j} (\rho_{ij} + \mu\, \delta_{ij})\, |G_i - G_j|
        \log_2(1 + e^{-\sigma (s_i - s_j)})

    .. math:: \rho_{ij} = \left|\frac{1}{D(r_i)} - \frac{1}{D(r_j)}\right|, \quad
        \delta_{ij} = \left|\frac{1}{D(|r_i - r_j|)} - \frac{1}{D(|r_i - r_j| + 1)}\right|, \quad
        D(r) = \log_2(1 + r), \quad G_i = \frac{2^{y_i} - 1}{\max \mathrm{DCG@}k}

    :math:`\rho` is the weight of LambdaRank, :math:`\delta` the weight of the tighter bound NDCG-Loss2; their weighted
    sum is NDCG-Loss2++. Ranks carry no gradient. Docs with equal scores get different ranks, by ascending label. So the
    loss is above 0 if all scores are equal, and the order of the docs in the batch does not matter. Labels below 0 have
    gain 0. A group without an ordered pair has loss 0.

    Source: Wang et al., "The LambdaLoss Framework for Ranking Metric Optimization", CIKM 2018.

    Args:
        sigma: Steepness of the logistic curve, in 1/score; must be positive.
        mu: Weight of delta relative to rho, at least 0; 0 gives LambdaRank, 10 is the paper's value.
        k: Depth of the nDCG that is optimised. For a rank greater than k, 1/D(r) is set to 0; a pair with both ranks
            greater than k has no loss. None: all ranks.

    >>> import torch
    >>> scores, labels = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    >>> LambdaLoss(mu=0.0)(scores, labels, torch.ones(1, 2, dtype=torch.bool))  # 1 - 1 / log2(3)
    tensor(0.3691)
    """

    def __init__(self, sigma: float = 1.0, mu: float = 10.0, k: int | None = None) -> None:
        super().__init__()
        if not (math.isfinite(mu) and mu >= 0):
            raise ConfigError(
                f"loss.mu: expected a finite number of 0 or more, got {mu!r}; set loss.mu to such a number, "
                "for example 10.0"
            )
        if k is not None and k < 1:
            raise ConfigError(
                f"loss.k: expected a rank of 1 or more, or null for all ranks, got {k!r}; set loss.k to such a rank, "
                "for example 10"
            )
        self.sigma = require_positive("loss.sigma", sigma)
        self.mu = mu
        self.k = k

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the mean over groups of each group's weighted sum over ordered pairs (0 without such pairs).

        All inputs are [batch, docs].
        """
        scores, labels = real_cells(scores, labels, doc_mask)
        ordered = ordered_pairs(labels, doc_mask)
        weight = self._pair_weights(scores.detach(), labels, doc_mask).masked_fill(~ordered, 0.0)
        pair_loss = -logsigmoid(self.sigma * gaps(scores)) / math.log(2)
        return (weight * pair_loss).sum((1, 2)).mean()

    def _pair_weights(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return (rho + mu delta) |G_i - G_j|, [batch, docs, docs]; the diagonal is not used."""
        ranks = _ranks(scores, labels, doc_mask).to(scores.dtype)
        rank_discounts = discounts(ranks)
        # the distance is 0 on the diagonal only, which is not used; the clamp keeps delta finite there
        distance = gaps(ranks).abs().clamp(min=1.0)
        weight = self.mu * (discounts(distance) - discounts(distance + 1.0)).abs()
        if self.k is not None:
            rank_discounts = rank_discounts.masked_fill(ranks > self.k, 0.0)
            weight = weight.masked_fill(torch.minimum(ranks.unsqueeze(2), ranks.unsqueeze(1)) > self.k, 0.0)
        return (weight + gaps(rank_discounts).abs()) * gaps(ndcg_gains(labels, doc_mask, self.k)).abs()


def _ranks(scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
    """Return 1-based ranks [batch, docs] by descending score, then ascending label; cells without a doc come last."""
    by_label = labels.argsort(dim=1, stable=True)
    scores_by_label = scores.masked_fill(~doc_mask, -torch.inf).gather(1, by_label)
    order = by_label.gather(1, scores_by_label.argsort(dim=1, descending=True, stable=True))
    return order.argsort(dim=1) + 1
