"""Compute a score of each doc from pairwise comparisons of docs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

STEPS = 30  # steps of Newton's method, which converges after a few
RIDGE = 1e-2  # weight of the L2 penalty; it keeps strengths finite if a doc wins or loses all comparisons


def sum_of_wins(logits: Tensor, mask: Tensor) -> Tensor:
    r"""Return :math:`s_i = \sum_{j \ne i} \sigma(l_{ij})`, duoBERT's SUM, [lists, docs]; 0 in cells without a doc.

    Args:
        logits: Log-odds that doc i is better than doc j, [lists, docs, docs]; the diagonal is not read.
        mask: True where a list has a doc, bool [lists, docs].
    """
    return (logits.sigmoid() * _pairs(mask)).sum(2)


def bradley_terry(logits: Tensor, mask: Tensor) -> Tensor:
    r"""Return the strengths of docs in a Bradley-Terry model (1952, Biometrika 39) of the comparisons, [lists, docs].

    .. math:: \max_\theta \sum_{i \ne j} w_{ij} \log \sigma(\theta_i - \theta_j) - \lambda/2 \, \|\theta\|^2, \quad
        w_{ij} = (\sigma(l_{ij}) + 1 - \sigma(l_{ji})) / 2

    where :math:`w_{ij}` is the probability that i is better than j, averaged over both input orders of the pair, and
    :math:`\lambda` is `RIDGE`. Gradients are exact for the maximum: they are computed by implicit differentiation.

    Args:
        logits: See `sum_of_wins`.
        mask: See `sum_of_wins`.
    """
    pairs, wins = _pairs(mask), logits.double().sigmoid()
    wins = 0.5 * (wins + 1 - wins.transpose(1, 2)) * pairs
    with torch.no_grad():
        strengths = wins.new_zeros(mask.shape)
        for _ in range(STEPS):
            strengths = strengths + _newton(strengths, wins, pairs)
    # at the maximum, Newton's step is 0, and its gradient is the gradient of the maximum
    return strengths + _newton(strengths, wins, pairs)


def _newton(strengths: Tensor, wins: Tensor, pairs: Tensor) -> Tensor:
    """Return Newton's step [lists, docs]; no gradient flows through the Hessian."""
    expected = (strengths.unsqueeze(2) - strengths.unsqueeze(1)).sigmoid() * pairs
    slope = (wins - expected).sum(2) - RIDGE * strengths
    curvature = (expected * (1 - expected)).detach()
    hessian = torch.diag_embed(curvature.sum(2) + RIDGE) - curvature
    return torch.linalg.solve(hessian, slope.unsqueeze(2))[:, :, 0]


def _pairs(mask: Tensor) -> Tensor:
    """Return True for cells that hold a pair of two different docs of a list, bool [lists, docs, docs]."""
    others = ~torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    return mask.unsqueeze(2) & mask.unsqueeze(1) & others


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": sum_of_wins,
    "bradley_terry": bradley_terry,
}
