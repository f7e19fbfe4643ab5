"""REINFORCE (Williams, 1992): rankings are drawn from the scores, and their nDCG is the reward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ranker.errors import ConfigError
from ranker.losses._groups import discounts, ndcg_gains, real_cells

# 32-bit finaliser "lowbias32" (Chris Wellons, "Prospecting for Hash Functions", 2018), and odd multipliers
MASK, FIRST, SECOND = 2**32 - 1, 0x7FEB352D, 0x846CA68B
SAMPLE, RANK = 0x9E3779B1, 0x85EBCA77


class Reinforce(nn.Module):
    r"""One minus the mean nDCG of drawn rankings, with the gradient of REINFORCE.

    .. math:: \ell(s, y) = \mathrm{mean}_{groups} \, 1 - \frac{1}{m} \sum_k R_k, \qquad
        \nabla \ell = \mathrm{mean}_{groups} -\frac{1}{m} \sum_k (R_k - b_k) \nabla \log P(\pi_k)

    Ranking :math:`\pi_k` is drawn from the Plackett-Luce model of the scores, :math:`P(\pi) = \prod_i e^{s_{\pi_i}} /
    \sum_{j \ge i} e^{s_{\pi_j}}`, by sorting scores plus Gumbel noise. The reward of a ranking is :math:`R_k =
    \mathrm{nDCG}(\pi_k)`. The baseline :math:`b_k` is the mean reward of the other m - 1 rankings. The noise is a hash
    of (seed of the step, group, ranking, the doc's rank by score and label), so the noise depends neither on devices
    and micro-batches nor on the order of docs. A group without a label above 0 has loss 0.

    Source: Williams, "Simple Statistical Gradient-Following Algorithms", Machine Learning 8, 1992; Kool, van Hoof and
    Welling, "Buy 4 REINFORCE Samples, Get a Baseline for Free!", ICLR 2019 workshop (the baseline).

    Args:
        samples: Rankings m that are drawn for each group, at least 2.
        k: nDCG is computed over the first k ranks; None: over all ranks.

    Attributes:
        draws: True: the training also passes the step's seed and the groups' ids.

    Raises:
        ConfigError: An option is out of range.
    """

    draws = True

    def __init__(self, samples: int = 16, k: int | None = None) -> None:
        super().__init__()
        if samples < 2:
            raise ConfigError(f"loss.samples: expected at least 2, got {samples!r}; set loss.samples to such a number")
        if k is not None and k < 1:
            raise ConfigError(
                f"loss.k: expected a rank of 1 or more, or null for all ranks, got {k!r}; set loss.k to one of these"
            )
        self.samples, self.k = samples, k

    def forward(
        self, scores: Tensor, labels: Tensor, doc_mask: Tensor, seed: int = 0, group_ids: Tensor | None = None
    ) -> Tensor:
        """Return the mean over groups of 1 - mean nDCG (0 for a group without a label above 0).

        Args:
            scores: [batch, docs].
            labels: [batch, docs].
            doc_mask: [batch, docs].
            seed: Seed of the step.
            group_ids: Number of each group within the step, int64 [batch]; None: all groups have the same noise.
        """
        scores, labels = real_cells(scores, labels, doc_mask)
        if group_ids is None:
            group_ids = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
        noise = self._noise(scores.detach(), labels, doc_mask, seed, group_ids)
        lowest = torch.finfo(scores.dtype).min
        orders = (scores.detach() + noise).masked_fill(~doc_mask, lowest).argsort(dim=2, descending=True, stable=True)
        gains = ndcg_gains(labels, doc_mask, self.k)
        ranks = torch.arange(1, scores.shape[1] + 1, device=scores.device, dtype=scores.dtype)
        weights = discounts(ranks).masked_fill(ranks > (self.k or torch.inf), 0.0)
        rewards = (gains.expand_as(orders).gather(2, orders) * weights).sum(2)  # [samples, batch]
        baselines = (rewards.sum(0) - rewards) / (self.samples - 1)
        expected = ((baselines - rewards) * _log_probability(scores, doc_mask, orders)).mean(0)
        possible = gains.amax(1).gt(0).to(scores.dtype)
        return (possible - rewards.mean(0) + expected - expected.detach()).mean()

    def _noise(self, scores: Tensor, labels: Tensor, doc_mask: Tensor, seed: int, group_ids: Tensor) -> Tensor:
        """Return Gumbel noise [samples, batch, docs]; docs with equal score and label may swap their noise."""
        by_score = scores.masked_fill(~doc_mask, -torch.inf).argsort(dim=1, descending=True, stable=True)
        by_label = labels.gather(1, by_score).argsort(dim=1, descending=True, stable=True)
        order = by_score.gather(1, by_label)
        order = order.gather(1, (~doc_mask).gather(1, order).byte().argsort(dim=1, stable=True))
        ranks = order.argsort(dim=1)  # masked docs are last
        samples = torch.arange(self.samples, device=scores.device).view(-1, 1, 1) * SAMPLE
        groups = _finalise(_finalise(group_ids ^ (seed & MASK)) ^ ((seed >> 32) & MASK)).view(1, -1, 1)
        bits = _finalise(_finalise(groups ^ (samples & MASK)) ^ (ranks * RANK & MASK))
        uniform = (bits.double() + 0.5) / 2**32
        return -(-uniform.log()).log().to(scores.dtype)


def _finalise(bits: Tensor) -> Tensor:
    """Hash 32-bit numbers, stored in int64: each bit of the result depends on all bits of the argument."""
    for shift, multiplier in ((16, FIRST), (15, SECOND)):
        bits = ((bits ^ (bits >> shift)) * multiplier) & MASK
    return bits ^ (bits >> 16)


def _log_probability(scores: Tensor, doc_mask: Tensor, orders: Tensor) -> Tensor:
    """Return the Plackett-Luce log-probability [samples, batch] of rankings [samples, batch, docs]."""
    real = doc_mask.expand_as(orders).gather(2, orders)  # real docs are first
    ordered = scores.expand_as(orders).gather(2, orders)
    logits = ordered.masked_fill(~real, torch.finfo(scores.dtype).min)
    rest = logits.flip(2).logcumsumexp(2).flip(2)  # logsumexp over the docs at this rank and below
    return (ordered - rest).masked_fill(~real, 0.0).sum(2)
