"""The named tuples of contrastive training: gradients, penalties, and the two directions of the loss."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


class Gradients(NamedTuple):
    """This device's part of a step's loss, and its gradients.

    Attributes:
        total: This part of the loss, [].
        by_queries: Gradient with respect to each query vector of the step, [query vectors, dim].
        by_docs: Gradient with respect to each doc vector of the step, [doc vectors, dim].
        parameters: Parameters of the loss and of the scoring, each with its gradient.
    """

    total: Tensor
    by_queries: Tensor
    by_docs: Tensor
    parameters: list[tuple[nn.Parameter, Tensor]]


class Penalties(NamedTuple):
    """A part of the loss that depends on the vectors directly, and its gradients.

    Attributes:
        value: The part of the loss, [].
        by_queries: Gradient with respect to each query vector, [queries, dim], or [1, dim] if all are equal.
        by_docs: Gradient with respect to each doc vector, [docs, dim] or [1, dim].
    """

    value: Tensor
    by_queries: Tensor
    by_docs: Tensor


class Direction(NamedTuple):
    """One of the two directions of the loss: queries rank docs, or positive docs rank queries.

    Attributes:
        anchors: Rows of `scores` whose rankings this device computes; each row ranks the columns. int64 [anchors].
        num_anchors: Number of such rows on all devices.
        anchor_groups: Each row's group, int64 [rows].
        candidate_groups: Each column's group, int64 [columns].
        labels: Label of each column for rows of its own group, [columns]; for other rows the label is 0.
        scores: [rows, columns].
        gradients: The loss's gradient with respect to `scores`, added up in place, [rows, columns].
        mask: True where a column is a candidate of a row, bool [rows, columns].
    """

    anchors: Tensor
    num_anchors: int
    anchor_groups: Tensor
    candidate_groups: Tensor
    labels: Tensor
    scores: Tensor
    gradients: Tensor
    mask: Tensor
