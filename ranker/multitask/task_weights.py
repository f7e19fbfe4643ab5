"""The weights of the tasks' losses: fixed, computed from numbers of classes or rows, or learned."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ranker.multitask.options import TaskWeighting

MAX_LOG_VARIANCE = 5.0  # largest |ln sigma^2|
MIN_WEIGHT = 1e-2  # lower bound of GradNorm's weights, which could otherwise become negative


class TaskWeights(nn.Module):
    r"""Coefficients c_t of the total loss :math:`\sum_t c_t L_t`; ranking is the first task.

    - `static`: the configured weights w_t.
    - `log_k`: w_t / ln k_t for k_t classes, with k_t = 2 for ranking and for numbers (MUPPET; Aghajanyan et al., 2021,
      arXiv:2101.11038).
    - `row_mean`: w_t times the task's share of the step's rows, so that all rows have the same weight and a rare task
      adds little noise.
    - `uncertainty` (Kendall et al., 2018, arXiv:1705.07115): with s_t = ln sigma_t^2, clamped to -5 .. 5, a
      classification task adds exp(-s) L + s / 2 and a regression task adds 0.5 exp(-s) L + s / 2.
    - `gradnorm` (Chen et al., 2018, arXiv:1711.02257): weights that make the gradient norms on the last shared layer
      follow the tasks' training rates.

    Learned weights are updated by plain gradient steps with their own learning rate and without weight decay. Learned
    weights are buffers, so that checkpoints contain them.

    Args:
        options: The mode and its parameters.
        head_weights: Configured weight of each task, w_t.
        classes: Number of classes of each task, k_t; 2 for ranking and for regression tasks.
        regression: Whether each task is a regression task.
    """

    def __init__(
        self, options: TaskWeighting, head_weights: Sequence[float], classes: Sequence[int], regression: Sequence[bool]
    ) -> None:
        super().__init__()
        self.options = options
        fixed = [w / math.log(k) if options.mode == "log_k" else w for w, k in zip(head_weights, classes, strict=True)]
        self.register_buffer("fixed", torch.tensor(fixed), persistent=False)
        self.register_buffer(
            "halved", torch.tensor([0.5 if is_number else 1.0 for is_number in regression]), persistent=False
        )
        self.register_buffer("log_variance", torch.zeros(len(fixed)))
        self.register_buffer("learned", torch.ones(len(fixed)))
        self.register_buffer("first_losses", torch.full((len(fixed),), -1.0))  # below 0: there is no loss yet
        self.fixed: Tensor
        self.halved: Tensor
        self.log_variance: Tensor
        self.learned: Tensor
        self.first_losses: Tensor

    def coefficients(self, rows: Sequence[int]) -> Tensor:
        """Return c_t [tasks]; 0 for tasks without rows in the step. `rows` has the number of rows of each task."""
        counts = self.fixed.new_tensor(rows)
        weights = self.fixed * (counts > 0)
        mode = self.options.mode
        if mode == "row_mean":
            return weights * counts / counts.sum().clamp(min=1)
        if mode == "uncertainty":
            return weights * self.halved * torch.exp(-self.log_variance)
        return weights * self.learned if mode == "gradnorm" else weights

    def total(self, losses: Tensor, rows: Sequence[int]) -> Tensor:
        """Return the total loss of a step from the tasks' losses [tasks]; in mode uncertainty, this includes s / 2."""
        total = (self.coefficients(rows).to(losses.dtype) * losses).sum()
        if self.options.mode == "uncertainty":
            total = total + (self.log_variance * (self.fixed.new_tensor(rows) > 0)).sum().to(losses.dtype) / 2
        return total

    def update(
        self, losses: Tensor, rows: Sequence[int], norms: Tensor | None = None, finite: Tensor | bool = True
    ) -> None:
        """Update the learned weights, equally on every device. Losses and norms that are not finite are ignored.

        Args:
            losses: The step's losses L_t [tasks].
            rows: Number of rows of each task.
            norms: For gradnorm: gradient norms [tasks] of the losses L_t, without weights, on the last shared layer.
            finite: A bool scalar; if it is False, no weight changes.
        """
        losses = losses.to(self.fixed.dtype)
        present = (self.fixed.new_tensor(rows) > 0) & losses.isfinite() & finite
        losses = torch.where(present, losses, torch.zeros_like(losses))
        if self.options.mode == "uncertainty":
            slopes = 0.5 - self.fixed * self.halved * torch.exp(-self.log_variance) * losses
            self.log_variance.sub_(self.options.lr * slopes * present).clamp_(-MAX_LOG_VARIANCE, MAX_LOG_VARIANCE)
        elif self.options.mode == "gradnorm":
            assert norms is not None
            present = present & norms.isfinite()
            unseen = present & (self.first_losses < 0)
            self.first_losses.copy_(torch.where(unseen, losses, self.first_losses))
            slopes = gradnorm_slopes(
                self.learned,
                self.fixed * norms.to(self.fixed.dtype),
                losses,
                self.first_losses,
                present,
                self.options.alpha,
            )
            moved = (self.learned - self.options.lr * slopes).clamp(min=MIN_WEIGHT)
            self.learned.copy_(torch.where(present.any(), moved * len(moved) / moved.sum(), self.learned))


def gradnorm_slopes(
    weights: Tensor, norms: Tensor, losses: Tensor, first: Tensor, present: Tensor, alpha: float
) -> Tensor:
    r"""Return the derivatives of :math:`\sum_t |G_t - \bar G r_t^\alpha|` by the weights w_t [tasks].

    The targets :math:`\bar G r_t^\alpha` are treated as constants.

    The derivative is 0 for tasks that are not present, whose norms and losses may have any value.

    :math:`G_t = w_t \lVert \nabla L_t \rVert`, :math:`r_t = \frac{L_t / L_t(0)}{\mathrm{mean}_u L_u / L_u(0)}`.

    Args:
        weights: w_t [tasks].
        norms: Gradient norms [tasks] of the losses L_t, without weights.
        losses: L_t [tasks].
        first: L_t(0) [tasks].
        present: Whether the step has rows of the task, bool [tasks].
        alpha: How strongly slowly learning tasks are favoured.

    >>> two = torch.ones(2)
    >>> gradnorm_slopes(two, torch.tensor([3.0, 1.0]), two, two, two.bool(), alpha=1.5)  # both targets are 2
    tensor([ 3., -1.])
    """
    count = present.sum().clamp(min=1)
    norms = torch.where(present, norms, torch.zeros_like(norms))  # 0 times infinity would be NaN
    weighted_norms = weights * norms
    ratios = torch.where(present, losses / first.clamp(min=torch.finfo(first.dtype).tiny), torch.zeros_like(losses))
    rates = ratios / (ratios.sum() / count).clamp(min=torch.finfo(first.dtype).tiny)
    targets = weighted_norms.sum() / count * rates**alpha
    return torch.sign(weighted_norms - targets) * norms
