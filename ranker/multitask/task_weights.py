"""What each task's loss counts in a step: fixed, by classes or rows, or learned; the state of what is learned."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ranker.multitask.options import TaskWeighting

LARGEST = 5.0  # of |ln sigma^2|
SMALLEST = 1e-2  # of GradNorm's weights, which a step could make negative


class TaskWeights(nn.Module):
    r"""Coefficients c_t of the total loss, the sum of c_t L_t; ranking is the first task.

    - `static`: the heads' own weights w_t.
    - `log_k`: w_t / ln k_t for k_t classes, 1 / ln 2 for ranking and for numbers (MUPPET; Aghajanyan et al., 2021,
      arXiv:2101.11038).
    - `row_mean`: w_t times the task's share of the step's rows, so that each row counts the same and a rare task is not
      noisy.
    - `uncertainty` (Kendall et al., 2018, arXiv:1705.07115): with s_t = ln sigma_t^2, clamped to -5 .. 5, a task adds
      exp(-s) L + s / 2, one of numbers 0.5 exp(-s) L + s / 2.
    - `gradnorm` (Chen et al., 2018, arXiv:1711.02257): weights whose gradient norms on the last shared layer follow the
      tasks' training rates.

    What is learned moves by plain gradient steps of its own rate, without weight decay. It lies in buffers, so that a
    checkpoint has it.

    Args:
        options: Mode and its numbers.
        given: The tasks' own weights w_t.
        classes: k_t; 2 for ranking and for numbers.
        regression: Which tasks are about numbers.
    """

    def __init__(
        self, options: TaskWeighting, given: Sequence[float], classes: Sequence[int], regression: Sequence[bool]
    ) -> None:
        super().__init__()
        self.options = options
        fixed = [w / math.log(k) if options.mode == "log_k" else w for w, k in zip(given, classes, strict=True)]
        self.register_buffer("fixed", torch.tensor(fixed), persistent=False)
        self.register_buffer("halved", torch.tensor([0.5 if own else 1.0 for own in regression]), persistent=False)
        self.register_buffer("log_variance", torch.zeros(len(fixed)))
        self.register_buffer("learned", torch.ones(len(fixed)))
        self.register_buffer("first_losses", torch.full((len(fixed),), -1.0))  # below 0: not seen yet
        self.fixed: Tensor
        self.halved: Tensor
        self.log_variance: Tensor
        self.learned: Tensor
        self.first_losses: Tensor

    def coefficients(self, rows: Sequence[int]) -> Tensor:
        """Return c_t [tasks]; 0 for tasks without rows in the step."""
        counts = self.fixed.new_tensor(rows)
        weights = self.fixed * (counts > 0)
        mode = self.options.mode
        if mode == "row_mean":
            return weights * counts / counts.sum().clamp(min=1)
        if mode == "uncertainty":
            return weights * self.halved * torch.exp(-self.log_variance)
        return weights * self.learned if mode == "gradnorm" else weights

    def total(self, losses: Tensor, rows: Sequence[int]) -> Tensor:
        """Return the step's loss of the tasks' losses [tasks], uncertainty's s / 2 included."""
        total = (self.coefficients(rows).to(losses.dtype) * losses).sum()
        if self.options.mode == "uncertainty":
            total = total + (self.log_variance * (self.fixed.new_tensor(rows) > 0)).sum().to(losses.dtype) / 2
        return total

    def learn(
        self, losses: Tensor, rows: Sequence[int], norms: Tensor | None = None, finite: Tensor | bool = True
    ) -> None:
        """Take a step of what is learned; the same on every device. Losses and norms that are not finite teach nothing.

        Args:
            losses: The step's losses L_t [tasks].
            rows: Rows of each task.
            norms: Of gradnorm, norms of each L_t's gradient on the last shared layer, not weighted [tasks].
            finite: Whether anything is to be learned, bool [].
        """
        losses = losses.to(self.fixed.dtype)
        present = (self.fixed.new_tensor(rows) > 0) & losses.isfinite() & finite
        losses = torch.where(present, losses, torch.zeros_like(losses))
        if self.options.mode == "uncertainty":
            slopes = 0.5 - self.fixed * self.halved * torch.exp(-self.log_variance) * losses
            self.log_variance.sub_(self.options.lr * slopes * present).clamp_(-LARGEST, LARGEST)
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
            moved = (self.learned - self.options.lr * slopes).clamp(min=SMALLEST)
            self.learned.copy_(torch.where(present.any(), moved * len(moved) / moved.sum(), self.learned))


def gradnorm_slopes(
    weights: Tensor, norms: Tensor, losses: Tensor, first: Tensor, present: Tensor, alpha: float
) -> Tensor:
    r"""Slopes of :math:`\sum_t |G_t - \bar G r_t^\alpha|` by the weights w_t, the targets held constant; 0 for tasks that are not present.

    Norms and losses of those are not looked at: they may be anything.

    :math:`G_t = w_t \lVert \nabla L_t \rVert`, :math:`r_t = \frac{L_t / L_t(0)}{\mathrm{mean}_u L_u / L_u(0)}`.

    Args:
        weights: w_t [tasks].
        norms: Gradient norms of the losses without w_t [tasks].
        losses: L_t [tasks].
        first: L_t(0) [tasks].
        present: Tasks that count, bool [tasks].
        alpha: How strongly slow tasks are favoured.

    >>> two = torch.ones(2)
    >>> gradnorm_slopes(two, torch.tensor([3.0, 1.0]), two, two, two.bool(), alpha=1.5)  # both targets are 2
    tensor([ 3., -1.])
    """
    count = present.sum().clamp(min=1)
    norms = torch.where(present, norms, torch.zeros_like(norms))  # 0 times infinity would be NaN
    own = weights * norms
    ratios = torch.where(present, losses / first.clamp(min=torch.finfo(first.dtype).tiny), torch.zeros_like(losses))
    rates = ratios / (ratios.sum() / count).clamp(min=torch.finfo(first.dtype).tiny)
    targets = own.sum() / count * rates**alpha
    return torch.sign(own - targets) * norms
