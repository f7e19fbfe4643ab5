"""Self-attention over ragged batches: kernels without padding on CUDA in half precision, and SDPA with padding.

On a CPU, `row_attention` is used instead of SDPA with padding.
"""

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
    from ranker.encoders.kernels import short_attention_operator as operator
except ImportError:
    short = operator = None  # type: ignore[assignment]


class PackedRows(NamedTuple):
    """Row boundaries for attention without padding.

    Args:
        cu_seqlens: Cumulative row lengths, int32 [rows + 1].
        cu_keys: Cumulative numbers of attended tokens, int32 [rows + 1].
        key_indices: Indices of the attended tokens, int64 [keys]; None if all tokens are attended to.
        max_length: Upper bound of the row lengths, as an int.
        blocks: See `RaggedLayout.blocks`; only kernels of this package read it.
        lists: The rows of each list, `kernels.lists.ListTensors`; empty: rows attend only to themselves.
    """

    cu_seqlens: Tensor
    cu_keys: Tensor
    key_indices: Tensor | None
    max_length: int
    blocks: Tensor
    lists: tuple[Tensor, ...] = ()

    @property
    def has_lists(self) -> bool:
        """Whether rows attend to the first tokens of the other rows of their list."""
        return bool(self.lists)


class PaddedRows(NamedTuple):
    """Rows for attention over padded tensors; on a CPU, for attention row by row.

    Args:
        layout: Layout of the tokens.
        dropout: Probability of dropping an attention weight.
    """

    layout: RaggedLayout
    dropout: float = 0.0

    @property
    def has_lists(self) -> bool:
        """Whether rows attend to the first tokens of the other rows of their list."""
        return self.layout.batch.lists is not None


def unpadded_unavailable(device: torch.device, dtype: torch.dtype) -> str:
    """Return why no attention kernel without padding can run here; empty if one can."""
    if device.type != "cuda":
        return f"the device is {device.type}, not cuda"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the precision is {dtype}, not bfloat16 or float16 (trainer.precision=bf16-mixed)"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    return ""


@cache  # cached, because it searches PATH and every forward pass calls it
def triton_unavailable() -> str:
    """Return why Triton's kernels can't run here; empty if they can."""
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
    """Compute attention with this package's kernel for short rows; arguments and result as in `library_attention`."""
    return operator.short_attention(qkv, rows.cu_seqlens, rows.cu_keys, rows.blocks)[0]


def library_attention(qkv: Tensor, rows: PackedRows, window: int | None = None) -> Tensor:
    """Compute attention with torch's variable-length kernel.

    Args:
        qkv: Queries, keys and values, [tokens, 3, heads, head size].
        rows: Row boundaries. With a window, all tokens must be attended to.
        window: Largest distance between a token and a token that it attends to; None: no limit.

    Returns:
        [tokens, heads, head size]
    """
    query, key, value = qkv.unbind(1)
    if rows.key_indices is not None:
        key, value = key.index_select(0, rows.key_indices), value.index_select(0, rows.key_indices)
    sides = (-1, -1) if window is None else (window, window)
    mixed: Any = varlen_attn(
        query, key, value, rows.cu_seqlens, rows.cu_keys, rows.max_length, rows.max_length, window_size=sides
    )
    return mixed


def padded_attention(qkv: Tensor, rows: PaddedRows, window: int | None = None) -> Tensor:
    """Compute attention with SDPA over groups of padded rows. Only this path has attention dropout.

    Args:
        qkv: Queries, keys and values, [tokens, 3, heads, head size].
        rows: Layout of the tokens, and dropout rate.
        window: Largest distance between a token and a token that it attends to; None: no limit.

    Returns:
        [tokens, heads, head size]
    """
    mixed = []
    for group in rows.layout.groups:
        query, key, value = (part.transpose(1, 2) for part in group.pad(qkv).unbind(2))
        mask, lonely = group.key_mask[:, None, None, :], None
        if window is not None and window < mask.shape[-1] - 1:
            mask = mask & band(mask.shape[-1], window, mask.device)
            # SDPA returns NaN for a query without keys: a padding token, or a token far behind the attended tokens
            lonely = ~mask.any(-1, keepdim=True)
            mask = mask | lonely
        padded = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=rows.dropout)
        if lonely is not None:
            padded = padded.masked_fill(lonely, 0.0)
        mixed.append(group.unpad(padded.transpose(1, 2)))
    return torch.cat(mixed).index_select(0, rows.layout.from_groups) if mixed else qkv[:, 2]


def band(length: int, window: int, device: torch.device) -> Tensor:
    """Return True where row index and column index are at most `window` apart, bool [length, length]."""
    positions = torch.arange(length, device=device)
    return (positions.unsqueeze(1) - positions).abs() <= window


def padded_average(states: Tensor, queries: Tensor, rows: PaddedRows) -> Tensor:
    """Average the states of each row with the attention weights of one query per row and head, without dropout.

    Args:
        states: [tokens, dim].
        queries: Queries multiplied by the key weights (`first_token_attention`), [rows, heads, dim].
        rows: Layout of the tokens.

    Returns:
        [rows, heads, dim]
    """
    scale, means = (queries.shape[2] // queries.shape[1]) ** -0.5, []
    for group in rows.layout.groups:
        padded, mask = group.pad(states).unsqueeze(1), group.key_mask[:, None, None, :]
        query = queries.index_select(0, group.rows).unsqueeze(1)
        means.append(
            functional.scaled_dot_product_attention(query, padded, padded, attn_mask=mask, scale=scale).squeeze(1)
        )
    if not means:  # the batch has no tokens
        return torch.zeros_like(queries)
    indices = torch.cat([group.rows for group in rows.layout.groups])
    return torch.zeros_like(queries).index_copy(0, indices, torch.cat(means))
