"""Share prefixes: tokens with which several rows begin are computed once, and all these rows attend to them.

In a causal model, the state of a token depends only on the tokens up to it. The prompts of a query's docs begin with
the same instruction and query, so the states of these tokens are equal. The batch is cut into segments: each prefix
that several rows share, and the rest of each row. The positions of a rest continue where its prefix ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ranker.data.ragged import ranges, row_offsets
from ranker.encoders.kernels.blocks import BLOCK
from ranker.types import TokenBatch

SHORTEST = 8  # least number of tokens that rows of different groups share
NEAR = 0.75  # a row joins other rows if it begins with at least this share of their prefix


@dataclass(frozen=True)
class SharedPrefixes:
    """A batch that is cut into segments.

    Args:
        batch: The segments as rows; each token occurs once. `max_length` is the length of the longest whole row.
        starts: Position of each segment's first token in its row, int64 [segments].
        key_indices: Indices of the tokens to which each segment attends: those of its prefix, then its own, int64
            [keys].
        cu_keys: Cumulative numbers of these indices, int32 [segments + 1].
        blocks: Blocks of up to `BLOCK` tokens of a segment, for the attention kernel, int32 [blocks, 5]: segment,
            position of the block's first token in the segment, index of the first token of the segment's prefix,
            number of the prefix's tokens (0 without a prefix), and index after the last token that attends to the
            segment.
        lengths: Number of tokens of each segment, on the host.
        key_counts: Number of tokens to which each segment attends, on the host.
        last: Index of the last token of each whole row, int64 [rows].
    """

    batch: TokenBatch
    starts: Tensor
    key_indices: Tensor
    cu_keys: Tensor
    blocks: Tensor
    lengths: list[int]
    key_counts: list[int]
    last: Tensor

    @classmethod
    def of(cls, batch: TokenBatch, sizes: Sequence[int], across: bool = False) -> SharedPrefixes:
        """Cut a batch into segments. On a GPU, the host waits for the tokens of a batch without `host`.

        Args:
            batch: The rows.
            sizes: Number of rows of each group. Only the rows of a group share a prefix.
            across: Whether adjacent rows of different groups may share a prefix, too. Dropout masks would then depend
                on how the step is split into batches.
        """
        known = batch.host or batch
        tokens, offsets = known.tokens.cpu().numpy(), known.cu_seqlens.cpu().numpy().astype(np.int64)
        rows = [tokens[start:end] for start, end in pairwise(offsets)]
        runs = _joined(rows) if across else _of_groups(rows, sizes)
        # for each segment: index of its first token, length, row of its dropout masks, position, prefix (-1: none)
        found: list[tuple[int, int, int, int, int]] = []
        last = np.zeros(len(rows), dtype=np.int64)
        for run, shared in runs:
            prefix = -1
            if shared:
                prefix = len(found)
                found.append((offsets[run[0]], shared, run[0], 0, -1))
            for row in run:
                last[row] = len(found)
                found.append((offsets[row] + shared, len(rows[row]) - shared, row, shared, prefix))
        first, sizes_of, owners, starts, prefixes = np.array(found, dtype=np.int64).reshape(-1, 5).T
        ends = row_offsets(sizes_of)
        # the keys of a segment are two ranges of new tokens: its prefix, which may be empty, and its own tokens
        widths = np.stack([np.where(prefixes >= 0, sizes_of[prefixes], 0), sizes_of], axis=1)
        begins = np.stack([ends[:-1][prefixes], ends[:-1]], axis=1)
        counts = widths.sum(axis=1)

        def on_device(array: np.ndarray) -> Tensor:
            part = torch.from_numpy(np.ascontiguousarray(array))
            # a copy from other than page-locked memory would wait for the device
            return part.pin_memory().to(batch.tokens.device, non_blocking=True) if batch.tokens.is_cuda else part

        source = on_device(ranges(first, sizes_of))
        row_ids = torch.arange(len(rows), device=source.device) if batch.row_ids is None else batch.row_ids
        segments = replace(
            batch,
            tokens=batch.tokens[source],
            segments=batch.segments[source],
            cu_seqlens=on_device(ends.astype(np.int32)),
            row_ids=row_ids[on_device(owners)],
        )
        return cls(
            segments,
            on_device(starts),
            on_device(ranges(begins.ravel(), widths.ravel())),
            on_device(row_offsets(counts).astype(np.int32)),
            on_device(_blocks(sizes_of, prefixes)),
            sizes_of.tolist(),
            counts.tolist(),
            on_device(ends[1:][last] - 1),
        )


def _blocks(sizes: np.ndarray, prefixes: np.ndarray) -> np.ndarray:
    """Return `SharedPrefixes.blocks`. Prefixes come first: their keys are read by most tokens, which takes longest.

    Args:
        sizes: Number of tokens of each segment, int64 [segments].
        prefixes: Segment that is the prefix of each segment; -1: none.
    """
    ends, follows = row_offsets(sizes), prefixes >= 0
    readers = ends[1:].copy()
    np.maximum.at(readers, prefixes[follows], ends[1:][follows])
    table = np.stack([
        np.arange(len(sizes)), np.zeros(len(sizes), dtype=np.int64), np.where(follows, ends[:-1][prefixes], 0),
        np.where(follows, sizes[prefixes], 0), readers,
    ], axis=1)  # fmt: skip
    counts = -(-sizes // BLOCK)
    blocks = np.repeat(table, counts, axis=0)
    blocks[:, 1] = ranges(np.zeros_like(counts), counts) * BLOCK
    shared = np.isin(blocks[:, 0], prefixes)
    return np.concatenate([blocks[shared], blocks[~shared]]).astype(np.int32)


def attend_segments(
    states: Sequence[Tensor],
    prefixes: SharedPrefixes,
    attend: Callable[[list[Tensor], Tensor | None], Tensor],
    window: int | None,
) -> Tensor:
    """Compute causal attention segment by segment, to the segment's prefix and to the segment itself.

    Args:
        states: Queries, keys and values [tokens, heads, head size].
        prefixes: The segments.
        attend: Function of queries, keys and values, each [1, heads, length, head size], and a mask [queries, keys]; if
            the mask is None, it attends causally.
        window: Tokens attend to tokens nearer than this; None: no limit.

    Returns:
        [tokens, heads, head size]
    """
    query, *others = states
    keys, values = (part.index_select(0, prefixes.key_indices).split(prefixes.key_counts) for part in others)
    mixed = []
    for parts in zip(query.split(prefixes.lengths), keys, values, strict=True):
        length, count = len(parts[0]), len(parts[1])
        mask = None
        if length < count or (window is not None and window < count):
            columns = torch.arange(count, device=query.device)
            distance = columns[count - length :].unsqueeze(1) - columns
            mask = (distance >= 0) & (distance < (window or count + 1))
        mixed.append(attend([part.transpose(0, 1).unsqueeze(0) for part in parts], mask)[0].transpose(0, 1))
    return torch.cat(mixed)


def _of_groups(rows: list[np.ndarray], sizes: Sequence[int]) -> list[tuple[list[int], int]]:
    """Return the rows of each group, and the length of their common prefix; each row keeps a token after it."""
    found, start = [], 0
    for size in sizes:
        run = list(range(start, start + size))
        shared = min((_common(rows[run[0]], rows[row]) for row in run[1:]), default=0)
        if run:
            found.append((run, shared))
        start += size
    return found


def _joined(rows: list[np.ndarray]) -> list[tuple[list[int], int]]:
    """Return runs of adjacent rows with a common prefix, and the length of this prefix; 0 for a single row."""
    found: list[tuple[list[int], int]] = []
    for row, tokens in enumerate(rows):
        if found:
            run, shared = found[-1]
            common = _common(rows[run[0]], tokens)
            if common >= max(SHORTEST, NEAR * shared):
                found[-1] = ([*run, row], min(common, shared) if shared else common)
                continue
        found.append(([row], 0))
    return found


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Return the length of the longest common prefix after which both rows still have a token."""
    length = max(0, min(len(one), len(other)) - 1)
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length
