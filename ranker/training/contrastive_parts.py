"""Named tuples of contrastive training: gradients, and penalties on vectors."""

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
