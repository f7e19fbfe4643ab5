"""Mean squared error on a teacher's scores, doc by doc."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ranker.errors import ConfigError
from ranker.losses._groups import mean_in_groups, real_cells, require_positive


class MSE(nn.Module):
    r"""Squared error between a mapped score and its label, which is a teacher's score.

    .. math:: \ell(s, y) = \mathrm{mean}_{groups} \mathrm{mean}_i (a s_i + b - y_i)^2

    With fixed a = 1 and b = 0, the student also learns the teacher's scale and offset. With `affine`, a and b are
    trained with the model. The optimizer updates log a and b, so a stays positive, and mapped scores have the order of
    the scores. The map belongs to the loss: the scores that the model returns are not mapped. `margin_mse` and `kl`
    ignore the offset. A group without docs has loss 0; a group with a single doc has a loss.

    Source: Ba and Caruana, "Do Deep Nets Really Need to be Deep?", NIPS 2014 (regression to a teacher's logits).

    Args:
        affine: Whether a and b are trained.
        scale: a, above 0; with `affine` its initial value.
        offset: b; with `affine` its initial value.

    >>> import torch
    >>> scores, labels = torch.tensor([[1.0, 0.0]]), torch.tensor([[8.0, 1.0]])
    >>> MSE()(scores, labels, torch.ones(1, 2, dtype=torch.bool))  # (49 + 1) / 2
    tensor(25.)
    >>> MSE(scale=5.0, offset=2.0)(scores, labels, torch.ones(1, 2, dtype=torch.bool))  # ((7 - 8)^2 + (2 - 1)^2) / 2
    tensor(1.)
    """

    pairwise = False
    needs_negatives = False

    def __init__(self, affine: bool = False, scale: float = 1.0, offset: float = 0.0) -> None:
        super().__init__()
        self.scale, self.offset = require_positive("loss.scale", scale), offset
        if not math.isfinite(offset):
            raise ConfigError(
                f"loss.offset: expected a finite number, got {offset!r}; set loss.offset to one, such as 0.0"
            )
        # the trained parameters are log a and b
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale))) if affine else None
        self.shift = nn.Parameter(torch.tensor(float(offset))) if affine else None

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the mean over groups of each group's mean over docs (0 without docs). All inputs are [batch, docs]."""
        scores, labels = real_cells(scores, labels, doc_mask)
        if self.log_scale is not None and self.shift is not None:
            mapped = scores * self.log_scale.to(scores.dtype).exp() + self.shift.to(scores.dtype)
        else:
            mapped = scores * self.scale + self.offset
        return mean_in_groups((mapped - labels).square(), doc_mask)
