"""Gradients of several tasks put together so that they do not undo each other."""

from __future__ import annotations

import torch
from torch import Tensor


def combine(gradients: Tensor, reach: Tensor, method: str, seed: int = 0) -> Tensor:
    r"""Sum the tasks' gradients by the shared parameters, after taking out what conflicts.

    `pcgrad` (Yu et al., NeurIPS 2020, arXiv:2001.06782): for each task i, over the other tasks j in a random order,

    .. math:: g_i \leftarrow g_i - \frac{g_i \cdot g_j}{\lVert g_j \rVert^2} g_j \quad \text{if } g_i \cdot g_j < 0

    with j's original gradient. `guard` does it for the auxiliary tasks against ranking alone: ranking's gradient stays
    as it is. A task that reads a lower layer has no gradient above it and gets none: products and norms are over the
    parameters that it reaches.

    Args:
        gradients: Weighted gradients, ranking's first [tasks, parameters].
        reach: Where a task has a gradient, bool [tasks, parameters].
        method: `none`, `pcgrad` or `guard`.
        seed: Seed of pcgrad's orders.

    Returns:
        [parameters]

    >>> combine(torch.tensor([[1.0, 0.0], [-1.0, 1.0]]), torch.ones(2, 2, dtype=torch.bool), "pcgrad")
    tensor([0.5000, 1.5000])
    >>> combine(torch.tensor([[1.0, 0.0], [-1.0, 1.0]]), torch.ones(2, 2, dtype=torch.bool), "guard")
    tensor([1., 1.])
    """
    if method == "none":
        return gradients.sum(0)
    total = gradients[0].clone() if method == "guard" else torch.zeros_like(gradients[0])
    generator = torch.Generator().manual_seed(seed)
    for task in range(1 if method == "guard" else 0, len(gradients)):
        others = (
            [0]
            if method == "guard"
            else [j for j in torch.randperm(len(gradients), generator=generator).tolist() if j != task]
        )
        own = gradients[task].clone()
        for other in others:
            against = gradients[other] * reach[task]
            product = own @ against
            if product < 0:
                own -= product / against.square().sum() * against
        total += own
    return total


def cosine(first: Tensor, second: Tensor, reach: Tensor) -> Tensor:
    """Cosine of two gradients over the parameters that `reach` names; 0 where one of them is 0.

    >>> cosine(torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 1.0]), torch.ones(2, dtype=torch.bool))
    tensor(-0.7071)
    """
    first, second = first * reach, second * reach
    return first @ second / (first.norm() * second.norm()).clamp(min=torch.finfo(first.dtype).tiny)
