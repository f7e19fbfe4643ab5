"""Join ragged batches row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ranker.types import RankBatch, TokenBatch


def concatenate(batches: Sequence[TokenBatch]) -> TokenBatch:
    """Concatenate the rows of ragged batches; row ids, keys and windows are joined if all batches have them."""
    if len(batches) == 1:
        return batches[0]
    ends = np.cumsum([0, *(batch.num_tokens for batch in batches)])
    cu_seqlens = [
        batches[0].cu_seqlens[:1],
        *(batch.cu_seqlens[1:] + int(start) for batch, start in zip(batches, ends, strict=False)),
    ]
    row_ids = [batch.row_ids for batch in batches if batch.row_ids is not None]
    attended = [batch.attended for batch in batches if batch.attended is not None]
    windows = [batch.windows for batch in batches if batch.windows is not None]
    has_attended = len(attended) == len(batches)
    return TokenBatch(
        torch.cat([batch.tokens for batch in batches]),
        torch.cat([batch.segments for batch in batches]),
        torch.cat(cu_seqlens),
        max(batch.max_length for batch in batches),
        attended=torch.cat(attended) if has_attended else None,
        num_attended=sum(batch.num_attended for batch in batches) if has_attended else 0,
        row_ids=torch.cat(row_ids) if len(row_ids) == len(batches) else None,
        windows=torch.cat(windows) if len(windows) == len(batches) else None,
        max_windows=max(batch.max_windows for batch in batches),
    )


def join_groups(batches: Sequence[RankBatch], share: float) -> RankBatch:
    """Return one batch with the groups of several batches. All batches have the same number of docs per group.

    Args:
        batches: One or more batches for the same scorer, with labels [groups, docs] of the same width.
        share: Number of groups of the result divided by the number of groups of the whole step.
    """

    def rows(name: str) -> TokenBatch | None:
        parts = [getattr(batch, name) for batch in batches]
        return None if parts[0] is None else concatenate(parts)

    return replace(
        batches[0],
        labels=torch.cat([batch.labels for batch in batches]),
        doc_mask=torch.cat([batch.doc_mask for batch in batches]),
        group_ids=torch.cat([batch.group_ids for batch in batches]),
        share=share,
        pairs=rows("pairs"),
        queries=rows("queries"),
        docs=rows("docs"),
    )
