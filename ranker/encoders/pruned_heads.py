"""Load models with BERT's modules from which attention heads were removed.

The configuration of such a model contains the key `pruned_heads` of transformers 4: layer -> indices of the removed
heads. transformers 5 does not read this key. So this module makes the linear layers smaller before the weights are
loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

KEY = "pruned_heads"


def removed_heads(config: Any) -> dict[int, list[int]]:
    """Return layer -> indices of the removed heads; empty if no head was removed.

    Args:
        config: A configuration of transformers, or its values as a dict.
    """
    stored = config.get(KEY) if isinstance(config, dict) else getattr(config, KEY, None)
    return {int(layer): sorted(heads) for layer, heads in (stored or {}).items() if heads}


def with_fewer_heads(kind: Any, config: Any) -> Any:
    """Return a subclass whose models are built without the removed heads, or `kind` itself if no head was removed.

    Args:
        kind: A model class of transformers.
        config: The model's configuration.
    """
    if not removed_heads(config):
        return kind

    class Pruned(kind):
        def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(config, *arguments, **options)
            remove_heads(self, removed_heads(config))

    Pruned.__name__ = Pruned.__qualname__ = kind.__name__  # save_pretrained writes this name to the configuration
    Pruned.__module__ = kind.__module__
    return Pruned


def remove_heads(model: Any, removed: dict[int, list[int]]) -> None:
    """Make the linear layers of attention smaller, so that they contain only the weights of the kept heads."""
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
    """Return the row indices of the kept heads in a query, key or value weight, int64 [kept heads * size].

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
