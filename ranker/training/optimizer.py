"""The optimizer of a training, and its learning rate at each optimizer step."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ranker.training.options import Optimization

log = logging.getLogger(__name__)


def new_optimizer(module: nn.Module, options: Optimization) -> torch.optim.Optimizer:
    """Return the optimizer of a module's trained parameters, with groups for weight decay."""
    for parameter in module.parameters():
        # on a CPU, torch's fused kernels read weights, gradients and moments as blocks of memory without gaps
        if parameter.requires_grad and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    decayed = [p for p in module.parameters() if p.requires_grad and p.ndim >= 2]
    others = [p for p in module.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    assert options.optimizer is not None
    return options.optimizer([group for group in groups if group["params"]])


def new_scheduler(optimizer: torch.optim.Optimizer, options: Optimization, total_steps: int) -> LambdaLR:
    """Return the schedule of the learning rate over the optimizer steps of the whole training."""
    schedule = options.schedule
    assert schedule is not None
    return LambdaLR(optimizer, lambda done: schedule(done + 1, total_steps))


def set_learning_rate(scheduler: Any, warn: bool) -> None:
    """Set the next step's learning rate from this run's schedule.

    The checkpoint has the learning rate of the run that wrote it. That run may have another number of steps.

    Args:
        scheduler: This run's `LambdaLR`.
        warn: Whether to warn of a learning rate of 0, and of one that differs from the checkpoint's.
    """
    if warn and not any(scheduler.base_lrs):
        log.warning("optim.lr: 0, so the training changes no weight")
    groups = scheduler.optimizer.param_groups
    stored = [float(group["lr"]) for group in groups]
    for group, base, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = base * factor(scheduler.last_epoch)
    if warn and any(float(group["lr"]) != before for group, before in zip(groups, stored, strict=True)):
        log.warning(
            "training: the learning rate of step %d is %g, but %g in the checkpoint: the earlier run had another "
            "schedule or another number of steps",
            scheduler.last_epoch + 1,
            groups[0]["lr"],
            stored[0],
        )
