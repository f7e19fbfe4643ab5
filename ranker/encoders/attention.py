"""Self-attention over ragged token sequences: kernels without padding on CUDA in half precision, padded SDPA elsewhere."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from ranker.encoders.kernels.blocks import BLOCK
from ranker.types import TokenBatch

try:  # Triton comes with torch's CUDA builds
    from ranker.encoders.kernels import short_attention as short
except ImportError:
    short = None  # type: ignore[assignment]

TAIL = 64  # see with_tail


@dataclass(frozen=True)
class RaggedLayout:
    """Where each token of a ragged batch stands, worked out once per forward and read by every layer.

    Args:
        batch: The batch.
        rows: Row of each token, int64 [tokens].
        positions: Place of each token in its row, int64 [tokens].
        keys: Places of the attended tokens, int64 [keys]; None: all tokens are.
        cu_keys: Cumulative counts of attended tokens, int32 [rows + 1].
    """

    batch: TokenBatch
    rows: Tensor
    positions: Tensor
    keys: Tensor | None
    cu_keys: Tensor

    @classmethod
    def of(cls, batch: TokenBatch) -> RaggedLayout:
        """Work out the layout of `batch` on its own device, without waiting for it."""
        starts, lengths = batch.cu_seqlens[:-1].long(), batch.cu_seqlens.diff().long()
        rows = torch.repeat_interleave(
            torch.arange(batch.num_rows, device=starts.device), lengths, output_size=batch.num_tokens
        )
        positions = torch.arange(batch.num_tokens, device=starts.device) - starts[rows]
        keys, cu_keys = None, batch.cu_seqlens
        if batch.attended is not None:
            cu_keys = functional.pad(batch.attended.cumsum(0), (1, 0)).int()
            shift = (starts - cu_keys[:-1]).repeat_interleave(batch.attended, output_size=batch.num_attended)
            keys = torch.arange(batch.num_attended, device=starts.device) + shift
        return cls(batch, rows, positions, keys, cu_keys)

    @property
    def blocks(self) -> Tensor:
        """Row, and place in it, where each block of up to `BLOCK` tokens starts, int32 [blocks, 2]; row -1 for blocks that are too many.

        As many as there may be for this number of rows and tokens, since their real number is known to the device
        alone.
        """
        counts = (self.batch.cu_seqlens.diff().long() + BLOCK - 1) // BLOCK
        ends = counts.cumsum(0)
        numbers = torch.arange(self.batch.num_tokens // BLOCK + self.batch.num_rows, device=ends.device)
        rows = torch.searchsorted(ends, numbers, right=True)
        known = rows.clamp(max=self.batch.num_rows - 1)
        places = (numbers - (ends - counts)[known]) * BLOCK
        return torch.stack([torch.where(rows < self.batch.num_rows, rows, -1), places], 1).int()

    @cached_property
    def _places(self) -> Tensor:
        return torch.arange(self.batch.max_length, device=self.rows.device)

    @cached_property
    def cells(self) -> Tensor:
        """Place of each token in a flat [rows * max_length] grid, int64 [tokens]."""
        return self.rows * self.batch.max_length + self.positions

    @cached_property
    def mask(self) -> Tensor:
        """True where the grid holds a token, bool [rows, max_length]."""
        return self._places < self.batch.cu_seqlens.diff().unsqueeze(1)

    @cached_property
    def key_mask(self) -> Tensor:
        """True where the grid holds a token that is attended to, bool [rows, max_length]."""
        return self.mask if self.batch.attended is None else self._places < self.batch.attended.unsqueeze(1)

    def pad(self, flat: Tensor) -> Tensor:
        """[tokens, ...] -> [rows, max_length, ...], zeros where no token is."""
        grid = flat.new_zeros(self.mask.numel(), *flat.shape[1:]).index_copy(0, self.cells, flat)
        return grid.view(*self.mask.shape, *flat.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        """[rows, max_length, ...] -> [tokens, ...]."""
        return padded.reshape(self.mask.numel(), *padded.shape[2:]).index_select(0, self.cells)


def with_tail(batch: TokenBatch, multiple: int = TAIL, row_multiple: int = 1) -> TokenBatch:
    """The batch with last rows of filling, so that its tokens are a multiple of `multiple`, itself one of `TAIL`, and its rows of `row_multiple`.

    Matrix products take full tiles then, and compiled code meets few shapes. Rows of filling have up to `TAIL` tokens,
    or none; there is one for each `TAIL` in `multiple`, and as many more as complete the rows. The maximum length
    becomes a multiple of `TAIL`, too.
    """
    tail = -batch.num_tokens % multiple
    rows = multiple // TAIL
    rows += -(batch.num_rows + rows) % row_multiple
    filled = torch.arange(rows + 1, dtype=torch.int32, device=batch.tokens.device).mul_(TAIL).clamp_(max=tail)
    return TokenBatch(
        functional.pad(batch.tokens, (0, tail)),
        functional.pad(batch.segments, (0, tail)),
        torch.cat([batch.cu_seqlens, filled[1:] + batch.num_tokens]),
        -(-batch.max_length // TAIL) * TAIL,
        None if batch.attended is None else torch.cat([batch.attended, filled.diff()]),
        batch.num_attended + tail if batch.attended is not None else 0,
        None if batch.names is None else functional.pad(batch.names, (0, rows), value=-1),
    )


def unpadded_missing(device: torch.device, dtype: torch.dtype) -> str:
    """Why no kernel without padding serves, in words; empty when one does."""
    if device.type != "cuda":
        return f"the device is {device.type}, not cuda"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the precision is {dtype}, not bfloat16 or float16 (trainer.precision=bf16-mixed)"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    return ""


@cache  # it looks through PATH, and each forward asks
def triton_missing() -> str:
    """Why Triton's kernels can't run, in words; empty when they can."""
    if short is None:
        return "Triton is not installed"
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return "Triton needs a C compiler (gcc), and none is installed"
    return ""


def short_missing(head_size: int, max_length: int) -> str:
    """Why the short-row kernel doesn't serve, in words; empty when it does."""
    if triton_missing():
        return triton_missing()
    if head_size not in short.HEAD_SIZES:
        return f"heads have {head_size} numbers, not {', '.join(map(str, short.HEAD_SIZES))}"
    if max_length > short.MAX_LENGTH:
        return f"rows have up to {max_length} tokens, more than {short.MAX_LENGTH}"
    return ""


def short_attention(
    qkv: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, keys: Tensor | None, max_length: int, blocks: Tensor  # noqa: ARG001
) -> Tensor:  # fmt: skip
    """Attend by the kernel for short rows; arguments as `library_attention`."""
    return short.short_attention(qkv, cu_seqlens, cu_keys, blocks)[0]


def library_attention(
    qkv: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, keys: Tensor | None, max_length: int, blocks: Tensor  # noqa: ARG001
) -> Tensor:  # fmt: skip
    """Attend by torch's variable-length kernel.

    Args:
        qkv: [tokens, 3, heads, dim].
        cu_seqlens: Cumulative row lengths, int32 [rows + 1].
        cu_keys: Cumulative counts of attended tokens, int32 [rows + 1].
        keys: Places of the attended tokens; None: all are.
        max_length: Longest row.
        blocks: `RaggedLayout.blocks`, which our kernels go by.

    Returns:
        [tokens, heads, dim]
    """
    query, key, value = qkv.unbind(1)
    if keys is not None:
        key, value = key.index_select(0, keys), value.index_select(0, keys)
    mixed: Any = varlen_attn(query, key, value, cu_seqlens, cu_keys, max_length, max_length)
    return mixed


def padded_attention(qkv: Tensor, layout: RaggedLayout, dropout: float = 0.0) -> Tensor:
    """Attend by padded SDPA, the only path with attention dropout; [tokens, 3, heads, dim] -> [tokens, heads, dim]."""
    query, key, value = (layout.pad(part).transpose(1, 2) for part in qkv.unbind(1))
    padded = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=layout.key_mask[:, None, None, :], dropout_p=dropout
    )
    return layout.unpad(padded.transpose(1, 2))


def padded_average(states: Tensor, reach: Tensor, layout: RaggedLayout, _: float = 0.0) -> Tensor:
    """Means of each row's states by the attention that one query a row and head pays to them.

    Args:
        states: [tokens, dim].
        reach: Queries, taken through the keys' weights, [rows, heads, dim].
        layout: Of the tokens.

    Returns:
        [rows, heads, dim]
    """
    padded, scale = layout.pad(states).unsqueeze(1), (reach.shape[2] // reach.shape[1]) ** -0.5
    mask = layout.key_mask[:, None, None, :]
    return functional.scaled_dot_product_attention(
        reach.unsqueeze(1), padded, padded, attn_mask=mask, scale=scale
    ).squeeze(1)
