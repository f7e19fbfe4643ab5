"""Attention of transformers' own models over padded groups of rows, with any rule of which tokens attend to which."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ranker.encoders.packing import Pass


@dataclass(frozen=True)
class AttentionRule:
    """Which tokens attend to which, and how logits are computed.

    Args:
        scale: Factor of the logits.
        causal: Whether tokens attend only to tokens at or before their own position.
        window: Tokens attend to tokens nearer than this; None: to all tokens.
        softcap: Logits become softcap * tanh(logits / softcap); None: logits are not capped.
        bias: Added to the logits, [1, heads, longest, longest]; None: nothing is added.
        dropout: Dropout rate of attention weights.
    """

    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    bias: Tensor | None
    dropout: float


def attend_groups(states: list[Tensor], forward: Pass, rule: AttentionRule) -> Tensor:
    """Compute attention with padding, in groups of rows of near lengths.

    Args:
        states: Queries, keys and values [tokens, heads, head size].
        forward: The running pass.
        rule: The rule of attention.

    Returns:
        [tokens, heads, head size].
    """
    starts, attended = forward.batch.cu_seqlens[:-1].long(), forward.batch.attended
    results, indices = [], []
    for group in forward.groups:
        columns = torch.arange(group.longest, device=starts.device)
        real = columns < group.lengths.unsqueeze(1)
        cells = starts[group.rows].unsqueeze(1) + torch.minimum(columns, group.lengths.unsqueeze(1) - 1)
        padded = [part[cells].transpose(1, 2) for part in states]
        keys = real if attended is None else columns < attended[group.rows].unsqueeze(1)
        all_keys = attended is None and group.uniform
        mask = _mask(keys, all_keys, rule, columns)
        if mask is None or rule.window is None:
            mixed = attend_padded(padded, mask, rule).transpose(1, 2)
        else:
            # a padding token, or a token that the others do not attend to, may have no key in its window; SDPA may
            # return NaN for it
            lonely = ~mask.any(-1, keepdim=True)
            mixed = attend_padded(padded, mask | lonely, rule).masked_fill(lonely, 0.0).transpose(1, 2)
        real_cells = real.flatten().nonzero_static(size=int(group.lengths.sum()))[:, 0]
        results.append(mixed.flatten(0, 1).index_select(0, real_cells))
        indices.append(cells.flatten().index_select(0, real_cells))
    order = torch.cat(indices)
    numbers = torch.arange(len(order), device=order.device)
    return torch.cat(results).index_select(0, torch.empty_like(order).index_copy_(0, order, numbers))


def _mask(keys: Tensor, all_keys: bool, rule: AttentionRule, columns: Tensor) -> Tensor | None:
    """Return the keys that each query reads, bool [rows, 1, queries or 1, keys]; None if no mask is needed."""
    reach = len(columns) if rule.window is None else rule.window
    windowed = reach < len(columns)
    if all_keys and not windowed:
        return None
    mask = keys[:, None, None, :]
    distance = columns.unsqueeze(1) - columns
    if rule.causal:
        mask = mask & (distance >= 0)
    if windowed:
        mask = mask & (distance.abs() < reach)
    return mask


def attend_padded(states: list[Tensor], mask: Tensor | None, rule: AttentionRule) -> Tensor:
    """Compute attention over padded tensors.

    Args:
        states: Queries, keys and values [rows, heads, columns, head size].
        mask: The keys that each query reads, bool, broadcast to [rows, heads, columns, columns]. If it is None, only a
            causal rule limits the keys.
        rule: The rule of attention; its window is not applied.

    Returns:
        [rows, heads, columns, head size].
    """
    query, key, value = states
    if rule.softcap is None:
        bias = rule.bias
        if bias is not None:
            bias = bias[:, :, : query.shape[2], : query.shape[2]].to(query.dtype)
            mask = bias if mask is None else bias.masked_fill(~mask, torch.finfo(query.dtype).min)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=rule.dropout, scale=rule.scale,
            is_causal=rule.causal and mask is None, enable_gqa=key.shape[1] != query.shape[1],
        )  # fmt: skip
    repeats = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    logits = rule.softcap * torch.tanh(query @ key.transpose(2, 3) * rule.scale / rule.softcap)
    if mask is None and rule.causal:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    if mask is not None:
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    weights = functional.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return functional.dropout(weights.to(value.dtype), rule.dropout) @ value
