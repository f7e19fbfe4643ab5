"""Named tuples of contrastive training: gradients, penalties, and a direction of the loss."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


class Gradients(NamedTuple):
    """This device's part of a step's loss, and the gradients of this part.

    Attributes:
        total: The part of the loss, a scalar.
        by_queries: Gradient with respect to each query vector of the step, [query vectors, dim].
        by_docs: Gradient with respect to each doc vector of the step, [doc vectors, dim].
        parameters: Trained parameters of the loss and of the scoring, each with its gradient.
    """

    total: Tensor
    by_queries: Tensor
    by_docs: Tensor
    parameters: list[tuple[nn.Parameter, Tensor]]


class Penalties(NamedTuple):
    """A part of the loss that depends on the vectors themselves and not on scores, and its gradients.

    Attributes:
        value: The part of the loss, a scalar.
        by_queries: Gradient with respect to each query vector, [queries, dim], or [1, dim] if all gradients are equal.
        by_docs: Gradient with respect to each doc vector, [docs, dim], or [1, dim] if all gradients are equal.
    """

    value: Tensor
    by_queries: Tensor
    by_docs: Tensor


class Direction(NamedTuple):
    """One of the two directions of the loss: queries rank docs, or positive docs rank queries.

    Attributes:
        anchors: Indices of the rows of `scores` whose rankings this device computes, int64 [anchors].
        num_anchors: Number of anchors on all devices.
        anchor_groups: Group of each row, int64 [rows].
        candidate_groups: Group of each column, int64 [columns].
        labels: Label of each column in rows of its own group, [columns]; in other rows the label is 0.
        scores: Scores; a row ranks the columns, [rows, columns].
        gradients: Gradient of the loss with respect to `scores`, [rows, columns]. Gradients are added to it in place.
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
