"""List attention for short rows in Triton: a token attends to its own row and to the first token of each other row.

`short_attention` computes the attention, and `short_attention_backward` the gradients of queries, and those of keys and
values by the queries of their own row. All rows of a list contribute to the gradients of a first token; the kernels
here sum the contributions in a fixed order and add them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ranker.encoders.kernels.blocks import BLOCK
from ranker.encoders.kernels.lists import ListTensors, key_block
from ranker.encoders.kernels.short_attention import LOG2E, attend
from ranker.encoders.kernels.short_attention_backward import AttendedStates, row_gradients
from ranker.encoders.kernels.sums import column_sums

SPLITS = 8  # number of Triton programs that share the queries of a list to compute the gradient of its first tokens
TENSORS = {"SIZE": 128, "num_warps": 1}
# launch settings for each `key_block`, measured on an H200, see docs/listwise.md
LAUNCHES = {
    32: {"SIZE": BLOCK // 2, "KEYS": 32, "num_warps": 4, "num_stages": 3},
    64: {"SIZE": BLOCK, "KEYS": 64, "num_warps": 4, "num_stages": 2},
}


@triton.jit(do_not_specialize=["num_lists", "num_rows", "num_blocks", "max_list"])
def _list_tensors(
    lists, first_rows, end_rows, key_blocks, biases, cells, num_lists, num_rows, num_blocks, max_list, others,
    SCALED: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write the tensors of one list; the last program writes the rows after the last list and the unused blocks."""
    number = tl.program_id(0)
    before, blocks_before = 0, 0
    for begin in range(0, number, SIZE):
        i = begin + tl.arange(0, SIZE)
        sizes = tl.load(lists + i, mask=i < number, other=0).to(tl.int32)
        before += tl.sum(sizes)
        blocks_before += tl.sum((sizes + KEYS - 1) // KEYS)
    if number < num_lists:
        size = tl.load(lists + number).to(tl.int32)
        for begin in range(0, max_list, SIZE):
            j = begin + tl.arange(0, SIZE)
            row, cell, is_row = before + j, number.to(tl.int64) * max_list + j, j < size
            tl.store(cells + cell, tl.where(is_row, row, -1), mask=j < max_list)
            tl.store(first_rows + row, before + j * 0, mask=is_row)
            tl.store(end_rows + row, before + size + j * 0, mask=is_row)
            bias = tl.zeros([SIZE], tl.float32)
            if SCALED:
                bias += tl.where(size > 1, tl.log2(others / tl.maximum(size - 1, 1)), 0.0)
            tl.store(biases + row, bias, mask=is_row)
            is_block = j < (size + KEYS - 1) // KEYS
            tl.store(key_blocks + (blocks_before + j) * 2, before + j * 0, mask=is_block)
            tl.store(key_blocks + (blocks_before + j) * 2 + 1, j * KEYS, mask=is_block)
    else:
        for begin in range(before, num_rows, SIZE):
            row = begin + tl.arange(0, SIZE)
            tl.store(first_rows + row, row, mask=row < num_rows)
            tl.store(end_rows + row, row + 1, mask=row < num_rows)
            tl.store(biases + row, tl.zeros([SIZE], tl.float32), mask=row < num_rows)
        for begin in range(blocks_before, num_blocks, SIZE):
            i = begin + tl.arange(0, SIZE)
            tl.store(key_blocks + i * 2, i * 0 - 1, mask=i < num_blocks)


def list_tensors(
    lists: Tensor, max_list: int, cu_seqlens: Tensor, token_rows: Tensor, list_size: int | None
) -> ListTensors:
    """Return the rows of each list, computed on the device. Rows after the last list form lists of one row each.

    Args:
        lists: Number of rows of each list, int64 [lists].
        max_list: Largest number in `lists`.
        cu_seqlens: Cumulative row lengths, int32 [rows + 1].
        token_rows: Row of each token, int64 [tokens].
        list_size: See `ranker.encoders.list_attention.list_bias`; None: nothing is added to logits.
    """
    rows, device, keys = cu_seqlens.shape[0] - 1, lists.device, key_block(max_list)
    blocks = rows // keys + lists.shape[0]
    first_rows, end_rows = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2))
    key_blocks = torch.empty(blocks, 2, dtype=torch.int32, device=device)
    biases = torch.empty(rows, dtype=torch.float32, device=device)
    cells = torch.empty(lists.shape[0], max_list, dtype=torch.int64, device=device)
    with torch.cuda.device_of(lists):  # Triton launches on the current device
        _list_tensors[(lists.shape[0] + 1,)](
            lists, first_rows, end_rows, key_blocks, biases, cells, lists.shape[0], rows, blocks, max_list,
            float((list_size or 1) - 1), SCALED=list_size is not None, KEYS=keys, **TENSORS,
        )  # fmt: skip
    first_tokens = cu_seqlens[:-1].long().clamp(max=token_rows.shape[0] - 1)
    return ListTensors(first_tokens, first_rows, end_rows, token_rows, key_blocks, biases, cells)


@triton.jit
def _first_keys(qkv, cu_seqlens, rows, is_row, head, kind, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Load the keys (kind 1) or values (kind 2) of rows' first tokens, [rows, DIM]; 0 where `is_row` is False."""
    tokens = tl.load(cu_seqlens + rows, mask=is_row, other=0).to(tl.int64)
    pointers = qkv + tokens[:, None] * (3 * HEADS * DIM) + (kind * HEADS + head) * DIM + tl.arange(0, DIM)[None, :]
    return tl.load(pointers, mask=is_row[:, None], other=0.0)


@triton.jit
def _keys_backward(
    grad_out, qkv, sums, means, partial, cu_seqlens, key_blocks, end_rows, token_rows, biases, num_rows,
    num_tokens,
    SCALE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of keys and values of up to KEYS first tokens, over a part of the list's queries.

    The results are written to `partial`, float32 [SPLITS, rows, 2, HEADS, DIM].
    """
    number, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    split = tl.program_id(1)
    first = tl.load(key_blocks + number * 2)
    if first >= 0:
        end, bias = tl.load(end_rows + first), tl.load(biases + first)
        j = first + tl.load(key_blocks + number * 2 + 1) + tl.arange(0, KEYS)
        is_row, dims = j < end, tl.arange(0, DIM)
        key = _first_keys(qkv, cu_seqlens, j, is_row, head, 1, HEADS, DIM)
        value = _first_keys(qkv, cu_seqlens, j, is_row, head, 2, HEADS, DIM)
        grad_key = tl.zeros([KEYS, DIM], tl.float32)
        grad_value = tl.zeros([KEYS, DIM], tl.float32)
        start, stop = tl.load(cu_seqlens + first), tl.load(cu_seqlens + end)
        for begin in range(start + split * SIZE, stop, SPLITS * SIZE):
            i = (begin + tl.arange(0, SIZE)).to(tl.int64)
            is_token = i < stop
            query_pointers = qkv + i[:, None] * (3 * HEADS * DIM) + head * DIM + dims[None, :]
            query = tl.load(query_pointers, mask=is_token[:, None], other=0.0)
            out_offsets = i[:, None] * (HEADS * DIM) + head * DIM + dims[None, :]
            upstream = tl.load(grad_out + out_offsets, mask=is_token[:, None], other=0.0)
            totals = head.to(tl.int64) * num_tokens + i
            log_sum = tl.load(sums + totals, mask=is_token, other=float("inf"))
            mean = tl.load(means + totals, mask=is_token, other=0.0)
            row = tl.load(token_rows + i, mask=is_token, other=-1)
            reads = is_row[:, None] & is_token[None, :] & (j[:, None] != row[None, :])
            logits = tl.dot(key, tl.trans(query)) * (SCALE * LOG2E) + bias
            weights = tl.exp2(tl.where(reads, logits, float("-inf")) - log_sum[None, :])
            grad_value += tl.dot(weights.to(value.dtype), upstream)
            slope = (weights * (tl.dot(value, tl.trans(upstream)) - mean[None, :])).to(query.dtype)
            grad_key += tl.dot(slope, query)
        offsets = ((split.to(tl.int64) * num_rows + j)[:, None] * (2 * HEADS) + head) * DIM + dims[None, :]
        tl.store(partial + offsets, grad_key * SCALE, mask=is_row[:, None])
        tl.store(partial + offsets + HEADS * DIM, grad_value, mask=is_row[:, None])


@triton.jit
def _add_to_first(
    partial, grad, parts, cu_seqlens, first_rows, end_rows, num_rows, HEADS: tl.constexpr, DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Add the sums of `_keys_backward` to the gradients of one row's first token (its key and value of one head).

    The kernel adds them to `parts`, the partial sums of the gradients, too.
    """
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    dims = tl.arange(0, DIM)
    if tl.load(end_rows + row) > tl.load(first_rows + row) + 1:
        token = tl.load(cu_seqlens + row).to(tl.int64)
        for kind in tl.static_range(2):
            total = tl.zeros([DIM], tl.float32)
            for split in tl.static_range(SPLITS):
                place = (split * num_rows + row).to(tl.int64) * 2 + kind
                total += tl.load(partial + (place * HEADS + head) * DIM + dims)
            columns = ((kind + 1) * HEADS + head) * DIM + dims
            pointers = grad + token * (3 * HEADS * DIM) + columns
            tl.store(pointers, (tl.load(pointers).to(tl.float32) + total).to(grad.dtype.element_ty))
            pointers = parts + row.to(tl.int64) * (3 * HEADS * DIM) + columns
            tl.store(pointers, tl.load(pointers) + total)


def attend_lists(
    qkv: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, blocks: Tensor, *lists: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute attention within lists; `lists` are `ListTensors`, all else is as in `short_attention.attend`."""
    return attend(qkv, cu_seqlens, cu_keys, blocks, lists=ListTensors(*lists))


def attend_lists_backward(
    grad_out: Tensor, qkv: Tensor, out: Tensor, sums: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, blocks: Tensor,
    *lists: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of `attend_lists`, with the arguments and results of `attend_backward` for rows."""
    tokens, _, heads, dim = qkv.shape
    rows, of = cu_seqlens.shape[0] - 1, ListTensors(*lists)
    grad_out, qkv = grad_out.contiguous(), qkv.contiguous()
    states = AttendedStates(grad_out, out, qkv, sums)
    grad, parts, means = row_gradients(states, cu_seqlens, cu_keys, blocks, lambda kernel: kernel, lists=of)
    partial = sums.new_empty(SPLITS, rows, 2, heads, dim)
    with torch.cuda.device_of(qkv):
        _keys_backward[(of.key_blocks.shape[0] * heads, SPLITS)](
            grad_out, qkv, sums, means, partial, cu_seqlens, of.key_blocks, of.end_rows, of.token_rows, of.biases, rows,
            tokens, SCALE=dim**-0.5, HEADS=heads, DIM=dim, SPLITS=SPLITS, **LAUNCHES[of.key_block],
        )  # fmt: skip
        _add_to_first[(rows * heads,)](
            partial, grad, parts, cu_seqlens, of.first_rows, of.end_rows, rows, HEADS=heads, DIM=dim, SPLITS=SPLITS,
            num_warps=1,
        )  # fmt: skip
    return grad, column_sums(parts)
