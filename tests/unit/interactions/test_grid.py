"""Scores are put at their docs' places in the grid as by torch's masked_scatter, forward and backward."""

import torch

from ranker.interactions.grid import to_grid


def test_it_is_masked_scatter():
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, False]])
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    weights = torch.arange(9.0).view(3, 3)
    expected = torch.zeros(3, 3).masked_scatter(mask, scores)
    assert torch.equal(to_grid(scores, mask), expected)
    (to_grid(scores, mask) * weights).sum().backward()
    assert torch.equal(scores.grad, torch.tensor([0.0, 2.0, 6.0, 7.0]))
