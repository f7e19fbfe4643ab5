"""Data of contrastive training: numbers of vectors, parts of the score matrix, gradients, penalties on vectors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Texts(NamedTuple):
    """Some texts of a step.

    Attributes:
        rows: Indices of the texts in the step, int64 [texts].
        vectors: Indices of their vectors among all vectors of the step's texts, int64 [vectors].
    """

    rows: Tensor
    vectors: Tensor


class Part(NamedTuple):
    """A part of the score matrix: some queries with some docs of a block.

    Attributes:
        queries: The queries.
        docs: Indices of the docs in the step, int64 [docs].
        in_block: The same docs, with indices among the block's docs and vectors; None: all docs of the block.
    """

    queries: Texts
    docs: Tensor
    in_block: Texts | None


class Block(NamedTuple):
    """A block of docs.

    Attributes:
        docs: The docs.
        parts: The parts of the score matrix that this device computes for the block.
    """

    docs: Texts
    parts: list[Part]


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


def vector_totals(*texts: tuple[Tensor | None, int]) -> list[tuple[int, int]]:
    """Return, for each set of texts, its number of vectors and the largest number of one text.

    The host waits for the device at most once.

    Args:
        texts: For each set of texts, which is not empty: the number of vectors of each text, int64 [texts], or None if
            each text has one vector; and the number of texts.

    >>> vector_totals((torch.tensor([3, 5, 2]), 3), (None, 4))
    [(10, 5), (4, 1)]
    """
    several = [torch.stack([counts.sum(), counts.max()]) for counts, _ in texts if counts is not None]
    found = iter(torch.stack(several).tolist() if several else ())
    totals = []
    for counts, number in texts:
        total, longest = (number, 1) if counts is None else next(found)
        totals.append((total, longest))
    return totals
