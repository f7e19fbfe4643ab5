"""Self-attention on a CPU: torch's attention is called row by row, so nothing is padded, and most rows need no mask.

On a CPU, the overhead of a call is small compared with the work on a row. On a GPU it is large, so rows are padded
there if no kernel without padding runs (`padded_attention`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
    states: tuple[Tensor, ...] = (query, key, value)
    rows = _Rows.of(layout, query.shape[-1] ** -0.5 if scale is None else scale, causal, window)
    with torch.autocast(query.device.type, enabled=False):  # autocast would turn float32 into half precision again
        # without flash attention (`sdpa_kernel(SDPBackend.MATH)`), torch's operations have second derivatives
        flash = torch.backends.cuda.flash_sdp_enabled() and query.shape[-1] == value.shape[-1]
        if flash and _need_gradients(states) and rows.all_have_keys:
            return _AttendRows.apply(*states, rows)  # type: ignore[no-any-return, no-untyped-call]
        states, mixed = precise(*states), []
        for own, keys, mask in rows.parts():
            q, k, v = (_heads_first(part) for part in (states[0][own], states[1][keys], states[2][keys]))
            attended = scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal and mask is None, scale=rows.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            mixed.append(attended[0].transpose(0, 1))
    return torch.cat(mixed).to(query.dtype) if mixed else query


@dataclass(frozen=True)
class _Rows:
    """Rows of a batch, and how their tokens attend.

    Args:
        lengths: Length of each row.
        key_counts: Number of tokens of each row that are attended to; they come first.
        scale: Factor of the logits.
        causal: Whether a token attends only to itself and earlier tokens.
        window: Largest distance between a token and a token that it attends to.
        near: Whether a token attends to another in rows longer than a window, bool [longest row, longest row]; None:
            there are no such rows.
    """

    lengths: list[int]
    key_counts: list[int]
    scale: float
    causal: bool
    window: int
    near: Tensor | None

    @classmethod
    def of(cls, layout: RaggedLayout, scale: float, causal: bool, window: int | None) -> _Rows:
        """Describe the rows of a layout."""
        longest, near = layout.batch.max_length, None
        if window is not None and window < longest - 1:
            near = band(longest, window, layout.batch.tokens.device)
            near = near.tril() if causal else near
        return cls(layout.lengths, layout.key_counts, scale, causal, longest if window is None else window, near)

    @property
    def all_have_keys(self) -> bool:
        """Whether each row with tokens has a token that is attended to."""
        return all(keys or not length for length, keys in zip(self.lengths, self.key_counts, strict=True))

    def parts(self) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Yield the tokens of each row, those that are attended to, and a mask [tokens, tokens], without empty rows."""
        start = 0
        for length, keys in zip(self.lengths, self.key_counts, strict=True):
            if length:
                whole = self.near is None or self.window >= length - 1
                mask = None if whole or self.near is None else self.near[:length, :length]
                yield slice(start, start + length), slice(start, start + keys), mask
            start += length


class _AttendRows(torch.autograd.Function):
    """Attention row by row, with gradients by torch's kernel for CPUs.

    Without this class torch would record a dozen operations for each row, and concatenate the gradients of all rows.
    Half precision becomes float32 one row at a time, so that it stays in the CPU's cache.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: _Rows) -> Tensor:
        """Return [tokens, heads, head size] in the dtype of `query`."""
        exact = torch.empty(query.shape, dtype=_exact(query))
        sums = []  # logarithms of the sums of exp(logits) of each row
        for own, keys, mask in rows.parts():
            parts = _row_states(query[own], key[keys], value[keys])
            attended, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *parts, 0.0, rows.causal and mask is None, attn_mask=_added(mask, exact), scale=rows.scale
            )
            exact[own] = attended[0].transpose(0, 1)
            sums.append(total)
        ctx.rows, ctx.sums = rows, sums
        ctx.save_for_backward(query, key, value, exact)
        return exact.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values.

        Raises:
            RuntimeError: Second derivatives are needed.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "attention by rows: expected create_graph=False, got True; compute the states within "
                "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
            )
        query, key, value, exact = ctx.saved_tensors
        made = torch.empty_like if ctx.rows.key_counts == ctx.rows.lengths else torch.zeros_like
        gradients = made(query), made(key), made(value)
        for (own, keys, mask), total in zip(ctx.rows.parts(), ctx.sums, strict=True):
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _heads_first(upstream[own].to(exact.dtype)), *_row_states(query[own], key[keys], value[keys]),
                _heads_first(exact[own]), total, 0.0, ctx.rows.causal and mask is None,
                attn_mask=_added(mask, exact), scale=ctx.rows.scale,
            )  # fmt: skip
            for gradient, tokens, part in zip(gradients, (own, keys, keys), found, strict=True):
                times = part.shape[1] // gradient.shape[1]  # query heads per key head
                shared = part[0] if times == 1 else part[0].unflatten(0, (-1, times)).sum(1)
                gradient[tokens] = shared.transpose(0, 1)
        return *gradients, None


def _exact(like: Tensor) -> torch.dtype:
    return torch.float32 if like.dtype in (torch.bfloat16, torch.float16) else like.dtype


def _added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return a bool mask as numbers that are added to the logits: 0 or -inf."""
    return None if mask is None else torch.zeros_like(mask, dtype=like.dtype).masked_fill_(~mask, float("-inf"))


def _heads_first(row: Tensor) -> Tensor:
    """Return [tokens, heads, size] as [1, heads, tokens, size], with the numbers of a head next to each other."""
    row = row if row.stride(-1) == 1 else row.contiguous()
    return row.transpose(0, 1).unsqueeze(0)


def _row_states(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Return the states of a row for the kernel, each [1, heads, tokens, size], in float32 at least."""
    times = query.shape[1] // key.shape[1]
    key, value = (part if times == 1 else part.repeat_interleave(times, 1) for part in (key, value))
    return tuple(_heads_first(part.to(_exact(part))) for part in (query, key, value))


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
    return tuple(part.to(_exact(part)) for part in parts) if _need_gradients(parts) else parts


def _need_gradients(parts: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(part.requires_grad for part in parts)
