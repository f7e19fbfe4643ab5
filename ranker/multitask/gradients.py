"""The gradients of a step for each task: summed over devices, compared, and weighted into the parameters."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranker.multitask.gradient_surgery import combine, cosine


class Gradients:
    """The gradients of one step with respect to a module's parameters, with a row per task.

    Args:
        module: The module; parameters of its `scorer.encoder` are shared, and any other parameter belongs to one task.
        num_tasks: Number of rows.
    """

    def __init__(self, module: nn.Module, num_tasks: int) -> None:
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        shared = [item for item in trained if item[0].startswith("scorer.encoder.")]
        unshared = [item for item in trained if not item[0].startswith("scorer.encoder.")]
        self.names, self.parameters = zip(*shared, *unshared, strict=True)
        self.sizes = [p.numel() for p in self.parameters]
        self.num_shared = sum(p.numel() for _, p in shared)
        dtype = torch.promote_types(self.parameters[0].dtype, torch.float32)
        self.values = torch.zeros(num_tasks, sum(self.sizes), dtype=dtype, device=self.parameters[0].device)
        # Which parameter tensors have a gradient, bool [tasks, parameter tensors], on the host for `assign`
        self.reached = torch.zeros(num_tasks, len(self.sizes), dtype=torch.bool)

    def add(self, loss: Tensor, task: int, keep_graph: bool = False) -> None:
        """Add the gradient of a loss to the gradient of a task."""
        gradients = torch.autograd.grad(loss, self.parameters, retain_graph=keep_graph, allow_unused=True)
        for number, (view, gradient) in enumerate(zip(self.values[task].split(self.sizes), gradients, strict=True)):
            if gradient is not None:
                view += gradient.flatten()
                self.reached[task, number] = True

    def sum_over_devices(self) -> None:
        """Sum the gradients over devices."""
        if dist.is_initialized():
            dist.all_reduce(self.values)
            reached = self.reached.to(self.values)
            dist.all_reduce(reached)
            self.reached = reached.cpu() > 0

    def reach(self, task: int) -> Tensor:
        """Return for which shared parameters a task has a gradient, bool [shared]."""
        reached, sizes = (values.to(self.values.device) for values in (self.reached[task], torch.tensor(self.sizes)))
        return reached.repeat_interleave(sizes, output_size=self.values.shape[1])[: self.num_shared]

    def cosine(self, task: int) -> Tensor:
        """Return the cosine of the gradients of ranking and a task over the shared parameters that the task reaches."""
        shared = self.values[:, : self.num_shared]
        return cosine(shared[0], shared[task], self.reach(task))

    def norms(self, pattern: re.Pattern[str]) -> Tensor:
        """Return the norm of each task's gradient [tasks] over the parameters whose name matches."""
        views = [
            view
            for name, view in zip(self.names, self.values.split(self.sizes, dim=1), strict=True)
            if pattern.search(name)
        ]
        return torch.cat(views, dim=1).norm(dim=1)

    def assign(self, coefficients: Tensor, surgery: str, seed: int = 0) -> None:
        """Write the weighted sum into the `grad` of the parameters; None for a parameter without any gradient.

        Args:
            coefficients: Weight of each task [tasks].
            surgery: How conflicts are removed from the gradients of shared parameters, see `combine`.
            seed: Seed of the surgery.
        """
        weights = coefficients.to(self.values)
        if surgery == "none":
            total = weights @ self.values
        else:
            shared = self.values[:, : self.num_shared] * weights.unsqueeze(1)
            reach = torch.stack([self.reach(task) for task in range(len(weights))])
            total = torch.cat([combine(shared, reach, surgery, seed), weights @ self.values[:, self.num_shared :]])
        reached = self.reached.any(0).tolist()
        for parameter, view, is_reached in zip(self.parameters, total.split(self.sizes), reached, strict=True):
            parameter.grad = view.view_as(parameter).to(parameter.dtype) if is_reached else None
