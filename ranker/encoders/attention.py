"""Self-attention over ragged batches: kernels without padding on CUDA in half precision, padded SDPA elsewhere."""

from __future__ import annotations

import shutil
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from ranker.encoders.ragged import RaggedLayout

try:  # Triton comes with torch's CUDA builds
    from ranker.encoders.kernels import short_attention as short
except ImportError:
    short = None  # type: ignore[assignment]


class PackedRows(NamedTuple):
    """Row boundaries for attention without padding.

    Args:
        cu_seqlens: Cumulative row lengths, int32 [rows + 1].
        cu_keys: Cumulative counts of attended tokens, int32 [rows + 1].
        key_indices: Indices of the attended tokens, int64 [keys]; None if all tokens are attended to.
        max_length: Upper bound of the row lengths, a host number.
        blocks: See `RaggedLayout.blocks`; read by the kernels of this package.
    """

    cu_seqlens: Tensor
    cu_keys: Tensor
    key_indices: Tensor | None
    max_length: int
    blocks: Tensor


class PaddedRows(NamedTuple):
    """Rows for attention over padded tensors.

    Args:
        layout: Layout of the tokens.
        dropout: Probability of dropping an attention weight.
    """

    layout: RaggedLayout
    dropout: float = 0.0


def unpadded_unavailable(device: torch.device, dtype: torch.dtype) -> str:
    """Return why no attention kernel without padding runs here; empty if one does."""
    if device.type != "cuda":
        return f"the device is {device.type}, not cuda"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the precision is {dtype}, not bfloat16 or float16 (trainer.precision=bf16-mixed)"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    return ""


@cache  # searches PATH, and every forward pass calls it
def triton_unavailable() -> str:
    """Return why Triton's kernels can't run; empty if they can."""
    if short is None:
        return "Triton is not installed"
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return "Triton needs a C compiler (gcc), and none is installed"
    return ""


def short_unavailable(head_size: int, max_length: int) -> str:
    """Return why the kernel for short rows can't run for these sizes; empty if it can."""
    if triton_unavailable():
        return triton_unavailable()
    if head_size not in short.HEAD_SIZES:
        return f"the head size is {head_size}, not one of {', '.join(map(str, short.HEAD_SIZES))}"
    if max_length > short.MAX_LENGTH:
        return f"rows have up to {max_length} tokens, more than {short.MAX_LENGTH}"
    return ""


def short_attention(qkv: Tensor, rows: PackedRows) -> Tensor:
    """Attend with this package's kernel for short rows; arguments and result as in `library_attention`."""
    return short.short_attention(qkv, rows.cu_seqlens, rows.cu_keys, rows.blocks)[0]


def library_attention(qkv: Tensor, rows: PackedRows) -> Tensor:
    """Attend with torch's variable-length kernel.

    Args:
        qkv: Queries, keys and values, [tokens, 3, heads, head size].
        rows: Row boundaries.

    Returns:
        [tokens, heads, head size]
    """
    query, key, value = qkv.unbind(1)
    if rows.key_indices is not None:
        key, value = key.index_select(0, rows.key_indices), value.index_select(0, rows.key_indices)
    mixed: Any = varlen_attn(query, key, value, rows.cu_seqlens, rows.cu_keys, rows.max_length, rows.max_length)
    return mixed


def padded_attention(qkv: Tensor, rows: PaddedRows) -> Tensor:
    """Attend by padded SDPA, the only path with attention dropout.

    Args:
        qkv: Queries, keys and values, [tokens, 3, heads, head size].
        rows: Layout and dropout.

    Returns:
        [tokens, heads, head size]
    """
    layout = rows.layout
    query, key, value = (layout.pad(part).transpose(1, 2) for part in qkv.unbind(1))
    padded = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=layout.key_mask[:, None, None, :], dropout_p=rows.dropout
    )
    return layout.unpad(padded.transpose(1, 2))


def padded_average(states: Tensor, queries: Tensor, rows: PaddedRows) -> Tensor:
    """Average each row's states with the attention weights of one query per row and head; without dropout.

    Args:
        states: [tokens, dim].
        queries: Queries multiplied by the key weights (`first_token_attention`), [rows, heads, dim].
        rows: Layout of the tokens.

    Returns:
        [rows, heads, dim]
    """
    layout = rows.layout
    padded, scale = layout.pad(states).unsqueeze(1), (queries.shape[2] // queries.shape[1]) ** -0.5
    mask = layout.key_mask[:, None, None, :]
    return functional.scaled_dot_product_attention(
        queries.unsqueeze(1), padded, padded, attn_mask=mask, scale=scale
    ).squeeze(1)
