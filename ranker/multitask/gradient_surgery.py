"""Combine the gradients of several tasks, and remove their conflicting parts."""

from __future__ import annotations

import torch
from torch import Tensor


def combine(gradients: Tensor, reach: Tensor, method: str, seed: int = 0) -> Tensor:
    r"""Sum the tasks' gradients of the shared parameters, after conflicting components are removed.

    `pcgrad` (Yu et al., NeurIPS 2020, arXiv:2001.06782): for each task i, over the other tasks j in a random order,

    .. math:: g_i \leftarrow g_i - \frac{g_i \cdot g_j}{\lVert g_j \rVert^2} g_j \quad \text{if } g_i \cdot g_j < 0

    where :math:`g_j` is the original gradient of task j. `guard` does this only for auxiliary tasks i with j = ranking,
    and does not change the gradient of ranking. A task that reads a lower layer has no gradient for higher layers. The
    projection adds no such gradient, because products and norms are computed over the parameters that the task reaches.

    Args:
        gradients: Weighted gradients [tasks, parameters]; ranking is the first task.
        reach: True if a task has a gradient for a parameter, bool [tasks, parameters].
        method: `none`, `pcgrad` or `guard`.
        seed: Seed of the random orders of pcgrad.

    Returns:
        The combined gradient [parameters].

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
        if method == "guard":
            others = [0]
        else:
            others = [j for j in torch.randperm(len(gradients), generator=generator).tolist() if j != task]
        projected = gradients[task].clone()
        for other in others:
            other_gradient = gradients[other] * reach[task]
            product = projected @ other_gradient
            if product < 0:
                projected -= product / other_gradient.square().sum() * other_gradient
        total += projected
    return total


def cosine(first: Tensor, second: Tensor, reach: Tensor) -> Tensor:
    """Return the cosine of two gradients [parameters] over parameters with `reach` True; 0 if one gradient is 0.

    >>> cosine(torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 1.0]), torch.ones(2, dtype=torch.bool))
    tensor(-0.7071)
    """
    first, second = first * reach, second * reach
    return first @ second / (first.norm() * second.norm()).clamp(min=torch.finfo(first.dtype).tiny)
