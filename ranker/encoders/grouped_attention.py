"""Attention within packed rows with fewer key heads than query heads. Keys and values are not repeated.

It is one operation for torch.compile, so that a compiled layer is not split. Short causal rows run through this
package's kernel (`kernels.grouped_attention`). Other rows run through torch's flash attention, whose operator supports
grouped heads, although `varlen_attn` of torch 2.11 does not pass them on.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from ranker.encoders.attention import triton_unavailable
from ranker.encoders.ragged import RaggedLayout
from ranker.encoders.shared_prefix import SharedPrefixes

try:  # Triton comes with torch's CUDA builds
    from ranker.encoders.kernels import grouped_attention as kernels
    from ranker.encoders.kernels.grouped_attention_backward import attend_backward
except ImportError:
    kernels = attend_backward = None  # type: ignore[assignment]


class GroupedRows(NamedTuple):
    """Row boundaries.

    Args:
        cu_seqlens: Cumulative row lengths, int32 [rows + 1].
        cu_keys: Cumulative numbers of each row's keys, int32 [rows + 1]; only torch's kernel reads them.
        key_indices: Indices of the keys, int64 [keys], if rows share prefixes; None: each row's keys are its tokens.
            Torch's kernel gets the keys in this order.
        blocks: See `RaggedLayout.blocks`, and `SharedPrefixes.blocks` if rows share prefixes.
        longest: Upper bound of the row lengths and of the numbers of keys.
        short: Whether this package's kernel can run here with rows of these lengths.
        wide_heads: Whether this package's kernel supports heads of size 128 on this device.
    """

    cu_seqlens: Tensor
    cu_keys: Tensor
    key_indices: Tensor | None
    blocks: Tensor
    longest: int
    short: bool
    wide_heads: bool

    def takes(self, head_size: int, causal: bool, window: int) -> bool:
        """Return whether this package's kernel supports attention with these heads within these rows.

        Args:
            head_size: Size of the heads.
            causal: Whether a token attends only to itself and earlier tokens.
            window: See `grouped_attention`.
        """
        heads = head_size == 64 or (head_size == 128 and self.wide_heads)
        return self.short and causal and heads and (self.key_indices is None or window < 0)


def grouped_rows(layout: RaggedLayout, longest: int, prefixes: SharedPrefixes | None = None) -> GroupedRows:
    """Return the row boundaries of a batch on a CUDA device.

    Args:
        layout: The rows.
        longest: Upper bound of the row lengths.
        prefixes: How the rows share prefixes; the rows are then its segments.
    """
    ends = layout.batch.cu_seqlens
    short = not triton_unavailable() and longest <= kernels.MAX_LENGTH
    wide = short and _shared_memory(ends.device) >= kernels.WIDE_HEADS_NEED
    # layers are compiled again for each bound, so all short rows get one bound
    longest = max(longest, 512)
    if prefixes is None:
        return GroupedRows(ends, ends, None, layout.blocks if short else ends, longest, short, wide)
    return GroupedRows(ends, prefixes.cu_keys, prefixes.key_indices, prefixes.blocks, longest, short, wide)


@cache
def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a Triton program may use."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@custom_op("ranker::grouped_attention", mutates_args=())
def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, blocks: Tensor,
    longest: int, short: bool, causal: bool, window: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention within each row.

    Args:
        query: bf16 or fp16 [tokens, heads, head size].
        key: [keys, key heads, head size]; the number of heads is a multiple of that of key heads.
        value: As `key`.
        cu_seqlens: Cumulative row lengths, int32 [rows + 1].
        cu_keys: Cumulative numbers of each row's keys, int32 [rows + 1]. The last query of a row belongs to its last
            key. Not read if `short`.
        blocks: See `GroupedRows`; only read if `short`.
        longest: Upper bound of the row lengths and of the numbers of keys.
        short: Whether to run this package's kernel. Rows are then causal, and there is one key for each token.
        causal: Whether a token attends only to itself and earlier tokens.
        window: Largest distance between a token and a token that it attends to; negative: no limit.
        scale: Factor of the logits.

    Returns:
        [tokens, heads, head size]; logarithms of the softmax sums, float32 [heads, tokens], base 2 if `short`.
    """
    if short:
        return kernels.attend(query, key, value, cu_seqlens, blocks, scale, window)
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        *(part.contiguous() for part in (query, key, value)), cu_seqlens, cu_keys, longest, longest, 0.0,
        causal and window < 0, return_debug_mask=False, scale=scale, window_size_left=window,
        window_size_right=0 if causal else window,
    )  # fmt: skip
    return out, sums


@grouped_attention.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads = query.shape[:2]
    return query.new_empty(query.shape), query.new_empty(heads, tokens, dtype=torch.float32)


@custom_op("ranker::grouped_attention_backward", mutates_args=())
def grouped_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, cu_seqlens: Tensor,
    cu_keys: Tensor, blocks: Tensor, longest: int, short: bool, causal: bool, window: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values; those of a key head are summed over its query heads."""
    if short:
        return attend_backward(grad, query, key, value, out, sums, cu_seqlens, blocks, scale, window)
    # without dropout, the state of torch's random generator is not read
    state, unused = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *(part.contiguous() for part in (grad, query, key, value)), out, sums, cu_seqlens, cu_keys, longest, longest,
        0.0, causal and window < 0, state, unused, scale=scale, window_size_left=window,
        window_size_right=0 if causal else window,
    )  # fmt: skip
    return grads


@grouped_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return grad.new_empty(query.shape), grad.new_empty(key.shape), grad.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seqlens, cu_keys, blocks, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens, cu_keys, blocks)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *grouped_attention_backward(grad, *ctx.saved_tensors, *ctx.options), *[None] * 8


grouped_attention.register_autograd(_backward, setup_context=_keep)
