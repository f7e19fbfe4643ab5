"""Arrange the scores of real docs in a [batch, docs] grid."""

from __future__ import annotations

from torch import Tensor


def to_grid(scores: Tensor, doc_mask: Tensor) -> Tensor:
    """Write each real doc's score into its cell of the grid.

    `masked_scatter` would make the host wait in the backward pass, where it reads a count from the device.

    Args:
        scores: One score per True cell of `doc_mask`, in row-major order, [rows].
        doc_mask: True for real docs, bool [batch, docs].

    Returns:
        [batch, docs], 0 where `doc_mask` is False.
    """
    cells = doc_mask.flatten().nonzero_static(size=len(scores))[:, 0]
    return scores.new_zeros(doc_mask.numel()).index_copy(0, cells, scores).view(doc_mask.shape)
