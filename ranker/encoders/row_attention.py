"""Self-attention on a CPU: torch's attention is called row by row, so nothing is padded, and most rows need no mask.

On a CPU, the overhead of a call is small compared with the work on a row. On a GPU it is large, so rows are padded
there if no kernel without padding runs (`padded_attention`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ranker.encoders.attention import PaddedRows, band, padded_attention, padded_average
from ranker.encoders.list_attention import list_attention
from ranker.encoders.ragged import RaggedLayout


def runs_by_row(device: torch.device, dropout: float = 0.0) -> bool:
    """Return whether attention runs row by row: on a CPU, without dropout of attention weights."""
    return device.type == "cpu" and dropout == 0


def row_attention(qkv: Tensor, rows: PaddedRows, window: int | None = None) -> Tensor:
    """Compute attention row by row if `runs_by_row`, else with `padded_attention`, with the same result."""
    batch = rows.layout.batch
    if batch.lists is not None:
        query, key, value = qkv.unbind(1)
        return list_attention(query, key, value, rows.layout, window=window, dropout=rows.dropout)
    # only `padded_attention` supports tokens without a key in their window, such as tokens far behind attended ones
    lonely = batch.attended is not None and window is not None and window < batch.max_length - 1
    if lonely or not runs_by_row(qkv.device, rows.dropout):
        return padded_attention(qkv, rows, window)
    query, key, value = qkv.unbind(1)
    return attend_rows(query, key, value, rows.layout, window=window)


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: RaggedLayout,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """Compute attention within each row.

    Args:
        query: [tokens, heads, head size].
        key: [tokens, key heads, head size]; heads is a multiple of key heads.
        value: As `key`.
        layout: The rows. With `causal` or a window, all tokens must be attended to.
        scale: Factor of the logits; None: head size ** -0.5.
        causal: Whether a token attends only to itself and earlier tokens.
        window: Largest distance between a token and a token that it attends to; None: no limit.

    Returns:
        [tokens, heads, head size]
    """
    dtype, longest = query.dtype, layout.batch.max_length
    mask = None
    if window is not None and window < longest - 1:
        mask = band(longest, window, query.device)
        mask = mask.tril() if causal else mask
    mixed = []
    with torch.autocast(query.device.type, enabled=False):  # autocast would turn float32 into half precision again
        parts = [part.split(layout.lengths) for part in precise(query, key, value)]
        for *row, keys in zip(*parts, layout.key_counts, strict=True):
            length = len(row[0])
            if length:
                q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in row)
                near = None if mask is None or window is None or window >= length - 1 else mask[:length, :length]
                attended = scaled_dot_product_attention(
                    q, k[:, :, :keys], v[:, :, :keys], near, is_causal=causal and near is None, scale=scale,
                    enable_gqa=q.shape[1] != k.shape[1],
                )  # fmt: skip
                mixed.append(attended[0].transpose(0, 1))
    return torch.cat(mixed).to(dtype) if mixed else query


def row_average(states: Tensor, queries: Tensor, rows: PaddedRows) -> Tensor:
    """Average the states of each row: row by row on a CPU, elsewhere with `padded_average`, with the same result.

    Args:
        states: [tokens, dim].
        queries: Queries multiplied by the key weights, [rows, heads, dim].
        rows: Layout of the tokens.
    """
    layout = rows.layout
    if not (len(queries) and runs_by_row(states.device)):
        return padded_average(states, queries, rows)
    dtype, scale = queries.dtype, (queries.shape[2] // queries.shape[1]) ** -0.5
    means = []
    with torch.autocast(states.device.type, enabled=False):
        states, queries = precise(states.to(dtype), queries)
        for query, row, keys in zip(queries.unbind(), states.split(layout.lengths), layout.key_counts, strict=True):
            row = row[None, None, :keys]
            mean = scaled_dot_product_attention(query[None, None], row, row, scale=scale) if keys else query * 0.0
            means.append(mean.view_as(query))
    return torch.stack(means).to(dtype)


def precise(*parts: Tensor) -> tuple[Tensor, ...]:
    """Convert half precision to float32 if gradients are needed.

    torch's backward pass of attention on a CPU is slower in half precision than in float32.
    """
    half = any(part.dtype in (torch.bfloat16, torch.float16) for part in parts)
    if half and torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        return tuple(part.float() for part in parts)
    return parts
