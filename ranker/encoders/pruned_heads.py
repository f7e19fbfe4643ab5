"""Models with BERT's modules from which attention heads were removed.

Their configuration has `pruned_heads`, layer -> numbers of the removed heads, as in transformers up to version 4.
Version 5 does not read it, so the linear layers are made smaller here before weights are loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

KEY = "pruned_heads"


def removed_heads(config: Any) -> dict[int, list[int]]:
    """Return layer -> numbers of the removed heads; empty if the model has all.

    Args:
        config: A configuration of transformers, or its content.
    """
    stored = config.get(KEY) if isinstance(config, dict) else getattr(config, KEY, None)
    return {int(layer): sorted(heads) for layer, heads in (stored or {}).items() if heads}


def with_fewer_heads(kind: Any, config: Any) -> Any:
    """Return a model class whose models lack the heads that the configuration says were removed.

    Args:
        kind: A class of transformers.
        config: The configuration.
    """
    if not removed_heads(config):
        return kind

    class Pruned(kind):
        def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(config, *arguments, **options)
            remove_heads(self, removed_heads(config))

    Pruned.__name__ = Pruned.__qualname__ = kind.__name__  # the name in the configuration that is written
    Pruned.__module__ = kind.__module__
    return Pruned


def remove_heads(model: Any, removed: dict[int, list[int]]) -> None:
    """Make the linear layers of attention smaller; the weights are those of the kept heads."""
    for number, heads in removed.items():
        attention = model.base_model.encoder.layer[number].attention
        own, size = attention.self, attention.self.attention_head_size
        rows = head_rows(own.num_attention_heads, heads, size)
        for name in ("query", "key", "value"):
            setattr(own, name, _part(getattr(own, name), rows, 0))
        attention.output.dense = _part(attention.output.dense, rows, 1)
        own.num_attention_heads -= len(heads)
        own.all_head_size = own.num_attention_heads * size


def head_rows(total: int, removed: list[int], size: int) -> Tensor:
    """Return the rows of the kept heads in the weight of queries, keys or values, int64 [kept heads * size].

    >>> head_rows(3, [1], 2).tolist()
    [0, 1, 4, 5]
    """
    kept = torch.tensor([head for head in range(total) if head not in removed], dtype=torch.int64)
    return (kept.unsqueeze(1) * size + torch.arange(size)).flatten()


def _part(linear: nn.Linear, chosen: Tensor, axis: int) -> nn.Linear:
    weight = linear.weight.detach()
    part = weight.index_select(axis, chosen.to(weight.device))
    smaller = nn.Linear(part.shape[1], part.shape[0], linear.bias is not None, device=weight.device, dtype=weight.dtype)
    smaller.weight = nn.Parameter(part)
    if linear.bias is not None:
        bias = linear.bias.detach()
        smaller.bias = nn.Parameter(bias if axis else bias.index_select(0, chosen.to(bias.device)))
    return smaller
