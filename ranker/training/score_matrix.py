"""The loss of a step's score matrix [groups, docs], in which each query ranks its own docs and other queries' docs."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ranker.types import Contrast, Loss

log = logging.getLogger(__name__)

# Upper bound of the [queries, docs, docs] values of a pairwise loss, 64 MiB in float32. The loss gets as many queries
# at a time as fit into it.
BLOCK_PAIRS = 2**24


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


def loss_of_matrix(
    loss: Loss, scores: Tensor, contrast: Contrast, mine: Tensor | None = None, symmetric: bool = False
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return this device's part of the loss (a scalar), and its gradients for scores [groups, docs] and parameters.

    A query's own docs have their labels; docs of other queries have label 0. The loss is a mean over rankings, that is,
    rows of the score matrix. It is computed for blocks of rows; each block is weighted by its share of the rows of the
    step.

    Args:
        loss: The loss; the parameters are its `trained_parameters`.
        scores: [groups, docs]; only the scores that this device's rankings use are filled in.
        contrast: Labels and masks of the step.
        mine: This device's queries. The device computes their rankings and those of their positive docs. None: all.
        symmetric: See `ContrastiveModule`.
    """
    if scores.shape[1] == 1:
        log.warning(
            "in-batch negatives: a step with one doc has no negatives, so nothing is learnt; "
            "raise batch.queries or batch.docs"
        )
    groups, parameters = torch.arange(len(scores), device=scores.device), trained_parameters(loss)
    total_loss, grad_scores = scores.new_zeros(()), torch.zeros_like(scores)
    grad_loss_parameters = [torch.zeros_like(p) for p in parameters]
    mine = groups if mine is None else mine
    directions = [
        Direction(mine, len(groups), groups, contrast.owners, contrast.labels, scores, grad_scores, contrast.mask)
    ]
    positive = contrast.positive.nonzero().squeeze(1) if symmetric else groups[:0]
    if len(positive):
        ones = torch.ones_like(groups, dtype=scores.dtype)
        anchors = positive[torch.isin(contrast.owners[positive], mine)]
        directions.append(
            Direction(anchors, len(positive), contrast.owners, groups, ones, scores.T, grad_scores.T, contrast.mask.T)
        )
    for direction in directions:
        pairwise = getattr(loss, "pairwise", True)
        block = max(1, BLOCK_PAIRS // direction.scores.shape[1] ** 2) if pairwise else len(direction.anchors)
        for rows in direction.anchors.split(max(1, block)) if len(direction.anchors) else ():
            same_group = direction.anchor_groups[rows].unsqueeze(1) == direction.candidate_groups
            labels = torch.where(same_group, direction.labels.to(scores.dtype), 0.0)
            block_scores = direction.scores[rows].requires_grad_(True)
            with torch.enable_grad():
                part = loss(block_scores, labels, direction.mask[rows])
                part = part * (len(rows) / direction.num_anchors / len(directions))
                by_scores, *by_parameters = torch.autograd.grad(part, [block_scores, *parameters])
            total_loss += part.detach()
            direction.gradients[rows] += by_scores
            for total, gradient in zip(grad_loss_parameters, by_parameters, strict=True):
                total += gradient
    return total_loss, grad_scores, grad_loss_parameters


def trained_parameters(loss: Any) -> list[nn.Parameter]:
    """Return the trained parameters of a loss; none if the loss is no module."""
    return [p for p in loss.parameters() if p.requires_grad] if isinstance(loss, nn.Module) else []
