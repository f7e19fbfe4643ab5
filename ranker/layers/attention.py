"""Self-attention over ragged token sequences: the library's variable-length kernel on CUDA in half precision, padded SDPA elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from ranker.types import TokenBatch



@dataclass(frozen=True)
class RaggedLayout:
    """Where each token of a ragged batch stands, worked out once per forward and read by every layer.

    Args:
        cu_seqlens: Cumulative row lengths, int32 [rows + 1].
        max_length: Longest row.
        positions: Place of each token in its row, int64 [tokens].
        cells: Place of each token in a flat [rows * max_length] grid, int64 [tokens].
        mask: True where the grid holds a token, bool [rows, max_length].
        key_mask: True where the grid holds a token that is attended to, bool [rows, max_length].
        keys: Places of the attended tokens, int64 [keys]; None: all tokens are.
        cu_keys: Cumulative counts of attended tokens, int32 [rows + 1].
    """

    cu_seqlens: Tensor
    max_length: int
    positions: Tensor
    cells: Tensor
    mask: Tensor
    key_mask: Tensor
    keys: Tensor | None
    cu_keys: Tensor

    @classmethod
    def of(cls, batch: TokenBatch) -> RaggedLayout:
        """Work out the layout of `batch` on its own device, without waiting for it."""
        starts, lengths = batch.cu_seqlens[:-1].long(), batch.cu_seqlens.diff().long()
        rows = torch.repeat_interleave(torch.arange(batch.num_rows, device=starts.device), lengths, output_size=batch.num_tokens)
        positions = torch.arange(batch.num_tokens, device=starts.device) - starts[rows]
        places = torch.arange(batch.max_length, device=starts.device)
        mask = places < lengths.unsqueeze(1)
        key_mask, keys, cu_keys = mask, None, batch.cu_seqlens
        if batch.attended is not None:
            key_mask = places < batch.attended.unsqueeze(1)
            cu_keys = functional.pad(batch.attended.cumsum(0), (1, 0)).int()
            shift = (starts - cu_keys[:-1]).repeat_interleave(batch.attended, output_size=batch.num_attended)
            keys = torch.arange(batch.num_attended, device=starts.device) + shift
        return cls(batch.cu_seqlens, batch.max_length, positions, rows * batch.max_length + positions, mask, key_mask, keys, cu_keys)

    def pad(self, flat: Tensor) -> Tensor:
        """[tokens, ...] -> [rows, max_length, ...], zeros where no token is."""
        grid = flat.new_zeros(self.mask.numel(), *flat.shape[1:]).index_copy(0, self.cells, flat)
        return grid.view(*self.mask.shape, *flat.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        """[rows, max_length, ...] -> [tokens, ...]."""
        return padded.reshape(self.mask.numel(), *padded.shape[2:]).index_select(0, self.cells)


def varlen_missing(query: Tensor) -> str:
    """Why the variable-length kernel can't serve `query` [tokens, heads, dim], in words; empty when it can."""
    if query.device.type != "cuda":
        return f"the device is {query.device.type}, not cuda"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"the precision is {query.dtype}, not bfloat16 or float16 (trainer.precision=bf16-mixed)"
    return ""


def ragged_attention(query: Tensor, key: Tensor, value: Tensor, layout: RaggedLayout, dropout: float = 0.0) -> Tensor:
    """Attend within each row of a ragged batch.

    Args:
        query: [tokens, heads, dim]; key and value likewise.
        key: Keys.
        value: Values.
        layout: The rows.
        dropout: Attention dropout, in the padded path only: the variable-length kernel has none.

    Returns:
        [tokens, heads, dim]
    """
    if not varlen_missing(query):
        if layout.keys is not None:
            key, value = key.index_select(0, layout.keys), value.index_select(0, layout.keys)
        mixed: Any = varlen_attn(query, key, value, layout.cu_seqlens, layout.cu_keys, layout.max_length, layout.max_length)
        return mixed
    padded = functional.scaled_dot_product_attention(
        layout.pad(query).transpose(1, 2),
        layout.pad(key).transpose(1, 2),
        layout.pad(value).transpose(1, 2),
        attn_mask=layout.key_mask[:, None, None, :],
        dropout_p=dropout,
    )
    return layout.unpad(padded.transpose(1, 2))
