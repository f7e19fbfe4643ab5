"""Scores of real docs, put where their docs stand."""

from __future__ import annotations

from torch import Tensor


def to_grid(scores: Tensor, doc_mask: Tensor) -> Tensor:
    """Put scores [rows], one for each True of `doc_mask` [batch, docs] in its order, there; 0 elsewhere.

    Unlike `masked_scatter`, whose backward pass asks the device how many there are, nothing waits for the device.
    """
    cells = doc_mask.flatten().nonzero_static(size=len(scores))[:, 0]
    return scores.new_zeros(doc_mask.numel()).index_copy(0, cells, scores).view(doc_mask.shape)
