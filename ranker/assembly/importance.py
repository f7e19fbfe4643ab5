"""Measure how much each layer, attention head and feed-forward unit of a trained ranker matters for its scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from ranker.types import RankBatch


def layer_contributions(scorer: Any, batches: Iterable[RankBatch]) -> Tensor:
    """Return how much each layer changes hidden states: 1 - mean cosine of a token's states before and after the layer.

    This is the measure of contribution-based dropping in "Poor Man's BERT" (Sajjad et al., 2020, arXiv:2004.03844).
    The mean is taken over all tokens.

    Args:
        scorer: The scorer, in evaluation mode.
        batches: The batches, on the scorer's device.

    Returns:
        float64 [layers]
    """
    total, tokens = torch.zeros(scorer.encoder.num_layers, dtype=torch.float64), 0
    with torch.no_grad():
        for batch in batches:
            part = batch.pairs if batch.pairs is not None else batch.docs
            assert part is not None
            states = list(scorer.encoder.layers(part))
            for i, (before, after) in enumerate(pairwise(states)):
                total[i] += (1 - cosine_similarity(before.double(), after.double(), dim=-1)).sum().cpu()
            tokens += part.num_tokens
    return total / tokens


def unit_importances(
    scorer: Any, batches: Iterable[RankBatch], outputs: Callable[[nn.Module], dict[int, nn.Linear]], size: int = 1
) -> list[Tensor]:
    """Return the first-order change of a pair's score if a unit, or an attention head of `size` units, is set to 0.

    The importance of unit h is the mean over pairs of |sum over tokens of h * ds/dh|, where s is the score. Michel et
    al., 2019 (arXiv:1905.10650, section 4.1) define it for heads with the loss in place of s; the score needs no
    labels. For a head, h * ds/dh is also summed over the head's units, inside the absolute value.

    Args:
        scorer: The scorer, in evaluation mode, with transformers' own forward pass (`encoder.ragged=false`).
        batches: Batches of one pair each.
        outputs: Returns layer index -> the linear layer that reads the units of that layer.
        size: Units of a head; 1: each unit has its own importance.

    Returns:
        float64 [units / size] for each layer.
    """
    layers = outputs(scorer.encoder.model)
    sums = {i: torch.zeros(linear.in_features // size, dtype=torch.float64) for i, linear in layers.items()}
    count = 0

    def record(number: int) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            units = inputs[0]

            def add(gradient: Tensor) -> None:
                change = (units.detach().double() * gradient.double()).reshape(-1, units.shape[-1]).sum(0)
                change = change.view(-1, size).sum(1)
                sums[number] += change.abs().cpu()

            units.register_hook(add)

        return hook

    hooks = [linear.register_forward_pre_hook(record(i)) for i, linear in layers.items()]
    try:
        for batch in batches:
            scorer.zero_grad()
            scorer(batch)[batch.doc_mask].sum().backward()
            count += 1
    finally:
        for hook in hooks:
            hook.remove()
    scorer.zero_grad()
    return [sums[i] / max(count, 1) for i in sorted(sums)]


def kept_layers(total: int, layers: int, drop: str, contributions: Tensor | None = None) -> list[int]:
    """Return the indices of the layers to keep, ascending.

    Args:
        total: Number of layers.
        layers: Number of layers to keep.
        drop: `top` drops the top layers; `alternate` keeps evenly spaced layers, always the first and, if at least two
            are kept, the last; `contribution` keeps the first layer and those with the largest contributions.
        contributions: Contribution of each layer [total], for `drop="contribution"`.

    >>> kept_layers(6, 3, "top"), kept_layers(6, 3, "alternate"), kept_layers(12, 6, "alternate")
    ([0, 1, 2], [0, 2, 5], [0, 2, 4, 7, 9, 11])
    >>> kept_layers(4, 2, "contribution", torch.tensor([0.1, 0.2, 0.4, 0.3]))
    [0, 2]
    """
    if drop == "top" or layers == 1:
        return list(range(layers))
    if drop == "alternate":
        return [int(i * (total - 1) / (layers - 1) + 0.5 - 1e-9) for i in range(layers)]
    assert contributions is not None
    order = sorted(range(1, total), key=lambda i: (-float(contributions[i]), i))
    return sorted([0, *order[: layers - 1]])


def kept_units(importances: Tensor, share: float, multiple: int) -> Tensor:
    """Return the indices of the units with the largest importances, ascending, int64 [kept].

    Args:
        importances: [units].
        share: Share of units to keep, above 0.
        multiple: The number of kept units is rounded up to a multiple of this, but not above the number of units.

    >>> kept_units(torch.tensor([0.1, 0.4, 0.3, 0.2]), 0.5, 1).tolist()
    [1, 2]
    """
    total = len(importances)
    count = min(total, -(-round(share * total + 0.499999) // multiple) * multiple)
    order = torch.argsort(importances, descending=True, stable=True)
    return order[:count].sort().values


def kept_heads(importances: Sequence[Tensor], share: float) -> list[list[int]]:
    """Return the heads to keep, ascending, for each layer: those with the largest importances among all layers' heads.

    Before layers are compared, the importances of a layer are divided by their l2 norm (Michel et al., 2019,
    section 4.1). Each layer keeps at least one head.

    Args:
        importances: For each layer, the importances of its heads [heads].
        share: Share of all heads to keep, above 0. The number of heads is rounded up.

    >>> kept_heads([torch.tensor([0.3, 0.4]), torch.tensor([10.0, 0.1])], 0.5)
    [[1], [0]]
    """
    normed = [part / part.norm().clamp(min=torch.finfo(part.dtype).tiny) for part in importances]
    kept = [[int(part.argmax())] for part in normed]
    order = sorted(
        (-float(value), layer, head)
        for layer, part in enumerate(normed)
        for head, value in enumerate(part)
        if head not in kept[layer]
    )
    total = sum(map(len, normed))
    count = max(len(kept), math.ceil(share * total - 1e-9))
    for _, layer, head in order[: count - len(kept)]:
        kept[layer].append(head)
    return [sorted(heads) for heads in kept]
