"""List attention: a token attends to its own row and to the first tokens of the other rows (docs) of its list.

This is the attention of the Set-Encoder (Schlatt et al., 2024, arXiv:2404.06912). A first token keeps its position 0,
so the result does not depend on the order of the rows in a list.

If a model was trained with lists of L rows, it gives the other rows too much weight in longer lists, because each other
row adds a key to the softmax. With `list_size` = L, log((L - 1) / (n - 1)) is added to the logits of other rows' first
tokens in a list of n rows. These tokens together then have the weight of L - 1 tokens. A row's attention stays the same
if each of the other rows is repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ranker.encoders.ragged import RaggedLayout


def list_bias(lists: Tensor, size: int) -> Tensor:
    """Return log((size - 1) / (n - 1)) for lists of n rows, float64; 0 for n = 1.

    Args:
        lists: Number of rows n of each list.
        size: L: the other rows of a list together get the weight of L - 1 rows; with 1 they get no weight.
    """
    others = lists.double() - 1
    return torch.where(others > 0, torch.log((size - 1) / others.clamp(min=1)), 0.0)


def list_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: RaggedLayout,
    scale: float | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute list attention with SDPA.

    On a CPU, if there is no window and no dropout, each row is computed by itself; otherwise rows are padded.

    Args:
        query: [tokens, heads, head size].
        key: [tokens, key heads, head size]; heads is a multiple of key heads.
        value: As `key`.
        layout: The rows; `layout.batch.lists` has the number of rows of each list, and `layout.batch.list_size` is L.
        scale: Factor of the logits; None: head size ** -0.5.
        window: Largest distance, in tokens, between a token and a token of its own row that it attends to; None: no
            limit. First tokens of other rows are always attended to.
        dropout: Probability of dropping an attention weight.

    Returns:
        The attention output, [tokens, heads, head size].
    """
    if query.device.type == "cpu" and window is None and dropout == 0:
        return _by_row(query, key, value, layout, scale)
    own, sharing = _list_of_row(layout), _others(layout)
    bias = _row_bias(layout)
    extra = [_of_lists(part, layout) for part in (key, value)]
    mixed = []
    for group in layout.groups:
        padded = [group.pad(part).transpose(1, 2) for part in (query, key, value)]
        # a product with a 0/1 matrix: the backward pass of indexing would add gradients in a random order
        chosen = own.index_select(0, group.rows).to(extra[0].dtype)
        shared = [(chosen @ part.flatten(1)).view(-1, *part.shape[1:]).transpose(1, 2) for part in extra]
        keys, values = (torch.cat(parts, 2) for parts in zip(padded[1:], shared, strict=True))
        length = group.key_mask.shape[1]
        mask = group.key_mask[:, None, :].expand(-1, length, -1)
        if window is not None and window < length - 1:
            positions = torch.arange(length, device=query.device)
            mask = mask & ((positions.unsqueeze(1) - positions).abs() <= window)
        mask = torch.cat([mask, sharing.index_select(0, group.rows)[:, None, :].expand(-1, length, -1)], 2)
        mask = mask | ~mask.any(2, keepdim=True)  # a padding token attends to all keys; without keys it would be NaN
        if bias is not None:
            added = functional.pad(bias.index_select(0, group.rows)[:, None].expand(-1, sharing.shape[1]), (length, 0))
            mask = added[:, None].expand_as(mask).masked_fill(~mask, float("-inf")).to(query.dtype)
        attended = functional.scaled_dot_product_attention(
            padded[0], keys, values, mask[:, None], dropout, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        mixed.append(group.unpad(attended.transpose(1, 2)))
    return torch.cat(mixed).index_select(0, layout.from_groups) if mixed else query


def _by_row(query: Tensor, key: Tensor, value: Tensor, layout: RaggedLayout, scale: float | None) -> Tensor:
    """Compute list attention row by row, without padding and without a mask."""
    if not len(query):
        return query
    gqa = query.shape[1] != key.shape[1]
    firsts = layout.batch.cu_seqlens[:-1].long()
    parts = [part.transpose(0, 1).split(layout.lengths, 1) for part in (query, key, value)]
    shared = [part.index_select(0, firsts).transpose(0, 1) for part in (key, value)]
    mixed, start, size = [], 0, layout.batch.list_size
    for rows in _lists(layout).tolist():
        bias = 0.0 if size is None else float(list_bias(torch.tensor(rows), size))
        for row in range(start, start + rows):
            queries = parts[0][row]
            keys, values = (
                torch.cat([part[row], of[:, start:row], of[:, row + 1 : start + rows]], 1)
                for part, of in zip(parts[1:], shared, strict=True)
            )
            mask = None
            if bias:
                mask = query.new_full((1, keys.shape[1]), bias)
                mask[:, : parts[1][row].shape[1]] = 0
                mask = mask.expand(queries.shape[1], -1)
            attended = functional.scaled_dot_product_attention(
                queries[None], keys[None], values[None], mask, scale=scale, enable_gqa=gqa
            )
            mixed.append(attended[0].transpose(0, 1))
        start += rows
    return torch.cat(mixed)


def _row_bias(layout: RaggedLayout) -> Tensor | None:
    """Return what is added to the logits of other rows' first tokens, by row, float64 [rows]; None: nothing."""
    size, rows = layout.batch.list_size, layout.batch.num_rows
    if size is None:
        return None
    lists = _lists(layout)
    of_lists = list_bias(lists, size)
    return functional.pad(of_lists, (0, 1)).repeat_interleave(
        torch.cat([lists, rows - lists.sum(0, keepdim=True)]), output_size=rows
    )


def _of_lists(states: Tensor, layout: RaggedLayout) -> Tensor:
    """Return first tokens' states by list, [lists, max_list, ...], from all states; 0 in cells without a row."""
    lists, cells = _lists(layout), layout.batch.cu_seqlens[:-1].long()
    rows = torch.arange(layout.batch.max_list, device=states.device)
    targets = (torch.arange(len(lists), device=states.device)[:, None] * layout.batch.max_list + rows).flatten()
    targets = targets[(rows < lists[:, None]).flatten().nonzero_static(size=len(cells))[:, 0]]
    grid = states.new_zeros(len(lists) * layout.batch.max_list, *states.shape[1:])
    return grid.index_copy(0, targets, states.index_select(0, cells)).unflatten(0, (len(lists), -1))


def _list_of_row(layout: RaggedLayout) -> Tensor:
    """Return whether each row belongs to each list, bool [rows, lists]."""
    lists, rows = _lists(layout), torch.arange(layout.batch.num_rows, device=layout.row_indices.device)
    ends = lists.cumsum(0)
    return (rows[:, None] < ends) & (rows[:, None] >= ends - lists)


def _others(layout: RaggedLayout) -> Tensor:
    """Return for each row which positions of its list belong to another row, bool [rows, max_list]."""
    lists, rows = _lists(layout), torch.arange(layout.batch.num_rows, device=layout.row_indices.device)
    list_of_row = lists.repeat_interleave(lists, output_size=len(rows))
    place = rows - (lists.cumsum(0) - lists).repeat_interleave(lists, output_size=len(rows))
    columns = torch.arange(layout.batch.max_list, device=rows.device)
    return (columns < list_of_row[:, None]) & (columns != place[:, None])


def _lists(layout: RaggedLayout) -> Tensor:
    lists = layout.batch.lists
    assert lists is not None
    return lists
