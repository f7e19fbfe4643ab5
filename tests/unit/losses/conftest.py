"""Random ragged groups, and the comparison of a loss with a slow loop that computes the same value."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
GroupValue = Callable[[list[float], list[float]], float]


def _groups(rng: random.Random, grades: list[float]) -> list[tuple[list[float], list[float]]]:
    """Return groups of 0 to 7 docs in random order; in one group, all labels are equal."""
    sizes = [0, 1, 2, *(rng.randint(2, 7) for _ in range(6))]
    groups = [([rng.gauss(0, 2) for _ in range(size)], [rng.choice(grades) for _ in range(size)]) for size in sizes]
    groups.append(([rng.gauss(0, 2) for _ in range(4)], [0.0] * 4))
    rng.shuffle(groups)
    return groups


@pytest.fixture
def same_as_loop() -> Callable[..., None]:
    """Return `check(loss, group_value, grades)`, which checks that the loss is the mean of `group_value`."""

    def check(loss: Loss, group_value: GroupValue, grades: tuple[float, ...] = (0.0, 0.0, 1.0, 2.0, 3.0)) -> None:
        for seed in range(10):  # the values are float64
            groups = _groups(random.Random(seed), list(grades))
            expected = sum(group_value(scores, labels) for scores, labels in groups) / len(groups)
            shape = (len(groups), max(len(scores) for scores, _ in groups) + 1)
            scores, labels = (
                torch.full(shape, torch.nan, dtype=torch.float64),
                torch.full(shape, 5.0, dtype=torch.float64),
            )
            doc_mask = torch.zeros(shape, dtype=torch.bool)
            for row, (group_scores, group_labels) in enumerate(groups):
                # The real docs are at the end of the row, because a loss must not assume that padding comes after them.
                cells = slice(shape[1] - len(group_scores), None)
                scores[row, cells] = torch.tensor(group_scores, dtype=torch.float64)
                labels[row, cells] = torch.tensor(group_labels, dtype=torch.float64)
                doc_mask[row, cells] = True
            assert loss(scores, labels, doc_mask).item() == pytest.approx(expected, rel=1e-11, abs=1e-13)

    return check


@pytest.fixture
def value() -> Callable[..., float]:
    """Return `value(loss, [scores, ...], [labels, ...])`, the loss of ragged groups that are given as lists."""

    def compute(loss: Loss, scores: list[list[float]], labels: list[list[float]]) -> float:
        doc_mask = torch.tensor([[i < len(group) for i in range(max(map(len, scores)))] for group in scores])
        padded = [torch.zeros(doc_mask.shape) for _ in range(2)]
        for filled, lists in zip(padded, (scores, labels), strict=True):
            filled[doc_mask] = torch.tensor([number for group in lists for number in group], dtype=torch.float32)
        return loss(*padded, doc_mask).item()

    return compute
