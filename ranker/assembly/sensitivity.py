"""Estimate how much the loss grows if a weight is rounded to few bits: the Hessian's trace times the rounding error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def in_groups(weight: Tensor, bits: int = 4, group: int = 128) -> Tensor:
    """Return a weight rounded to integer multiples of a scale.

    Each output's inputs are divided into groups, and each group has its own scale, as in Q-BERT (Shen et al., 2020,
    arXiv:1909.05840, section 3.2). Ranges are symmetric around 0.

    Args:
        weight: [out, in].
        bits: Bits per element, at least 2.
        group: Number of inputs in a group; the last group may have fewer.
    """
    most = 2 ** (bits - 1) - 1
    parts = []
    for part in weight.split(group, dim=1):
        largest = part.abs().amax(1, keepdim=True)
        unit = torch.where(largest > 0, largest / most, torch.ones_like(largest))
        parts.append((part / unit).round().clamp(-most, most) * unit)
    return torch.cat(parts, 1)


def hessian_traces(
    losses: Iterable[Callable[[], Tensor]], weights: Mapping[str, Tensor], draws: int, seed: int = 0
) -> dict[str, float]:
    """Return Hutchinson's estimate of the trace of the mean loss's Hessian with respect to each weight.

    For a vector v of random signs, the expectation of v . (H v) is the trace of H. H v is the gradient of (g . v),
    where g is the gradient of the loss.

    Args:
        losses: Functions that return a loss, a scalar. Traces are computed for the mean of the losses.
        weights: Name -> weight on which the losses depend.
        draws: Number of random vectors for each loss.
        seed: Seed of the random vectors.
    """
    names, values = list(weights), list(weights.values())
    device = values[0].device
    generator = torch.Generator(device=device).manual_seed(seed)
    sums, count = dict.fromkeys(names, 0.0), 0
    for loss in losses:
        with sdpa_kernel(SDPBackend.MATH):  # torch's other attention kernels have no second derivative
            gradients = torch.autograd.grad(loss(), values, create_graph=True)
        for _ in range(draws):
            signs = [
                torch.randint(0, 2, value.shape, generator=generator, device=device).to(value.dtype) * 2 - 1
                for value in values
            ]
            products: Any = torch.autograd.grad(gradients, values, signs, retain_graph=True)
            for name, sign, product in zip(names, signs, products, strict=True):
                sums[name] += float((sign * product).sum())
            count += 1
        del gradients
    return {name: total / max(count, 1) for name, total in sums.items()}


def sensitivities(
    weights: Mapping[str, Tensor], traces: Mapping[str, float], bits: int = 4, group: int = 128
) -> list[dict[str, Any]]:
    """Return trace, rounding error and sensitivity of each weight; the most sensitive weight comes first.

    Args:
        weights: Name -> weight [out, in].
        traces: Name -> trace of the Hessian.
        bits: Bits per element.
        group: Number of inputs in a group of elements with one scale.

    Returns:
        For each weight: `weight` (its name), `numbers` (how many elements it has), `trace` (divided by `numbers`),
        `error` (squared norm of the rounding errors) and `sensitivity`, which is `trace` times `error`. The sensitivity
        is twice the expected change of the loss, to second order, if rounding errors are independent with mean 0
        (HAWQ-V2, Dong et al., 2020, arXiv:1911.03852).
    """
    rows = []
    for name, weight in weights.items():
        error = float((in_groups(weight.detach(), bits, group) - weight.detach()).double().square().sum())
        mean = traces[name] / weight.numel()
        rows.append(
            {"weight": name, "numbers": weight.numel(), "trace": mean, "error": error, "sensitivity": mean * error}
        )
    return sorted(rows, key=lambda row: -float(row["sensitivity"]))
