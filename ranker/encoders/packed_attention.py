"""Attention within rows for transformers' own models, in a packed pass or a pass over padded rows.

transformers calls the attention function that is registered under a model's attention implementation. In a packed
pass, the model reads one long row [1, tokens] that contains all texts. The attention function of this file reads from
the model's `Packing` where each text begins. Each module of the model holds a reference to this `Packing`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ranker.encoders.attention import unpadded_unavailable
from ranker.encoders.grouped_attention import grouped_attention
from ranker.encoders.list_attention import list_attention
from ranker.encoders.packing import Pass, packed_pass_runs
from ranker.encoders.padded_attention import AttentionRule, attend_groups, attend_padded
from ranker.encoders.row_attention import attend_rows, precise, runs_by_row
from ranker.encoders.shared_prefix import attend_segments

IMPLEMENTATION = "packed_rows"  # name of the attention function in transformers' registry
LARGEST_HEAD = 256  # largest head size of torch's flash attention
NO_PREFIXES = "prefixes can be shared only in causal models without position biases"


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention within rows: transformers calls this function for the implementation `packed_rows`.

    Args:
        module: The attention module.
        query: [1, heads, tokens, head size].
        key: [1, key heads, tokens, head size].
        value: [1, key heads, tokens, head size].
        attention_mask: The mask from transformers. It is None in a packed pass, which uses row boundaries. It is used
            only if someone calls the transformers model directly, without the `Encoder`.
        dropout: Dropout rate of attention weights. Only attention with padding applies it (`attend_groups`).
        scaling: Factor of the logits; None: head size ** -0.5.
        options: `sliding_window`: tokens attend to tokens nearer than this; `softcap`: logits become softcap *
            tanh(logits / softcap); `position_bias`, [1, heads, longest, longest], is added to the logits.

    Returns:
        [1, tokens, heads, head size], and None for the attention weights.

    Raises:
        NotImplementedError: The model passes an option that this function does not support.
    """
    forward = module.packing.current
    rows = None if forward is None else forward.rows
    plain = not any(options.get(name) is not None for name in ("softcap", "position_bias", "s_aux"))
    if rows is None or not plain or query.shape[-1] > LARGEST_HEAD or key.shape[2] != query.shape[2]:
        return _attend_apart(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options)
    rule = _rule(module, query, scaling, dropout, options)
    if rows.key_indices is not None and not rule.causal:
        raise NotImplementedError(NO_PREFIXES)
    query, key, value = _states(query, key, value)
    # a window of at least the longest row is no limit
    window = -1 if rule.window is None or rule.window >= rows.longest else rule.window - 1
    short = rows.takes(query.shape[-1], rule.causal, window)
    if rows.key_indices is not None and not short:
        key, value = (part.index_select(0, rows.key_indices) for part in (key, value))
    mixed, _ = grouped_attention(
        query, key, value, rows.cu_seqlens, rows.cu_keys, rows.blocks, rows.longest, short, rule.causal, window,
        rule.scale,
    )  # fmt: skip
    return mixed.unsqueeze(0), None


def _rule(module: Any, query: Tensor, scaling: float | None, dropout: float, options: dict[str, Any]) -> AttentionRule:
    causal = options.get("is_causal")
    window = options.get("sliding_window")
    return AttentionRule(
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        bool(getattr(module, "is_causal", False)) if causal is None else bool(causal),
        None if window is None else window + module.packing.window_excess,
        options.get("softcap"),
        options.get("position_bias"),
        dropout if module.training and module.packing.attention_dropout else 0.0,
    )


def _states(*parts: Tensor) -> list[Tensor]:
    """Return queries, keys and values [1, heads, tokens, head size] as [tokens, heads, head size]."""
    states = [part.squeeze(0).transpose(0, 1) for part in parts]
    kind = states[0].device.type
    # under autocast, rotary positions and norms return float32, but attention needs parts of one type
    if torch.is_autocast_enabled(kind) and len({part.dtype for part in states}) > 1:
        states = list(precise(*states)) if kind == "cpu" else states
    if torch.is_autocast_enabled(kind) and (kind == "cuda" or len({part.dtype for part in states}) > 1):
        states = [part.to(torch.get_autocast_dtype(kind)) for part in states]
    return states


@torch._dynamo.disable  # type: ignore[attr-defined]
def _attend_apart(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float,
    scaling: float | None, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute what `packed_attention` computes, outside of compiled code."""
    forward = module.packing.current
    if forward is None:  # the model itself was called, and not the encoder
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    if options.get("s_aux") is not None or key.shape[2] != query.shape[2] or query.shape[0] != 1:
        raise NotImplementedError("attention sinks, cross-attention and caches have no packed form")
    rule = _rule(module, query, scaling, dropout, options)
    rate, states = rule.dropout, _states(query, key, value)
    if forward.prefixes is not None:
        return _with_prefixes(states, forward, rule).unsqueeze(0), None
    plain = rule.softcap is None and rule.bias is None
    if forward.batch.lists is not None:
        if rule.causal or not plain:
            raise NotImplementedError(
                "attention across the docs of a query does not support causal attention, position biases or soft caps"
            )
        window = None if rule.window is None else rule.window - 1
        query, key, value = states
        return list_attention(query, key, value, forward.layout, rule.scale, window, rate).unsqueeze(0), None
    by_row = plain and _all_read(forward, rule)
    if by_row and query.shape[-1] <= LARGEST_HEAD and not unpadded_unavailable(query.device, states[0].dtype):
        return _unpadded(states, forward, rule).unsqueeze(0), None
    if by_row and runs_by_row(query.device, rate):
        window = None if rule.window is None else rule.window - 1
        query, key, value = states
        return attend_rows(query, key, value, forward.layout, rule.scale, rule.causal, window).unsqueeze(0), None
    if query.device.type == "cpu":
        with torch.autocast("cpu", enabled=False):  # as in `attend_rows`
            return attend_groups(list(precise(*states)), forward, rule).to(query.dtype).unsqueeze(0), None
    return attend_groups(states, forward, rule).unsqueeze(0), None


def _unpadded(states: list[Tensor], forward: Pass, rule: AttentionRule) -> Tensor:
    """Compute attention with torch's kernel for rows of different lengths, [tokens, heads, head size]."""
    (query, key, value), ends, layout = states, forward.batch.cu_seqlens, forward.layout
    if layout.key_indices is not None:
        key, value = (part.index_select(0, layout.key_indices) for part in (key, value))
    window = -1 if rule.window is None else rule.window - 1
    mixed, _ = grouped_attention(
        query, key, value, ends, layout.cu_keys, ends, forward.longest, False, rule.causal, window, rule.scale
    )
    return mixed


def _with_prefixes(states: list[Tensor], forward: Pass, rule: AttentionRule) -> Tensor:
    """Compute attention from segments of rows to their prefixes and to themselves, [tokens, heads, head size]."""
    assert forward.prefixes is not None
    if not rule.causal or rule.bias is not None:
        raise NotImplementedError(NO_PREFIXES)
    query = states[0]
    with torch.autocast(query.device.type, enabled=False):  # as in `attend_rows`
        parts = list(precise(*states)) if query.device.type == "cpu" else states
        attend = partial(attend_padded, rule=rule)
        return attend_segments(parts, forward.prefixes, attend, rule.window).to(query.dtype)


def _all_read(forward: Pass, rule: AttentionRule) -> bool:
    """Return whether at most one of two limits applies to the keys of a row.

    One limit is `TokenBatch.attended` (only the first tokens are keys), the other is causality or a window.
    Kernels without padding align the last query of a row with its last key, so they can't apply both limits.
    """
    limited = rule.causal or (rule.window is not None and rule.window < forward.batch.max_length)
    return forward.batch.attended is None or not limited


def row_mask(*args: Any, **options: Any) -> Tensor | None:
    """Return None in a packed pass, which uses row boundaries instead of a mask; otherwise return SDPA's mask."""
    return None if packed_pass_runs() else sdpa_mask(*args, **options)


def register() -> None:
    """Register `packed_rows` in transformers."""
    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, row_mask)
