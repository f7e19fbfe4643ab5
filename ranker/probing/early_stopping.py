"""Early stopping for each probe of a stack separately."""

from __future__ import annotations

import torch
from torch import Tensor

from ranker.probing.optimizer import Adam
from ranker.probing.training_options import TrainingOptions


class EarlyStopping:
    """Best weights, learning rate and patience of each member of a stack.

    Args:
        parameters: Initial parameters, float32 [members, parameters].
        uniform_loss: Loss of the uniform code, log k, which is the code of the initial weights (`EdgeProbe.initial`).
        options: Patience and rate factor.
    """

    def __init__(self, parameters: Tensor, uniform_loss: float, options: TrainingOptions) -> None:
        size = len(parameters)
        self.options = options
        self.best = parameters.clone()
        self.epochs = torch.zeros(size)
        self.members = torch.arange(size)  # indices of the members that are still in the optimizer
        # the initial weights are kept if training on few pairs gives a worse code than the uniform code
        self._lowest = torch.full((size,), uniform_loss, dtype=torch.float64)
        self._bad_rounds = torch.zeros(size, dtype=torch.int64)

    def count_epoch(self, epoch: int) -> None:
        """Record `epoch` as the number of epochs of the members that still train."""
        training = self._bad_rounds[self.members] < self.options.patience
        self.epochs[self.members] = torch.where(training, float(epoch), self.epochs[self.members])

    def keep_last(self, parameters: Tensor) -> None:
        """Keep the current weights [members in the optimizer, parameters], for a training without validation pairs."""
        self.best[self.members] = parameters

    def update(self, loss: Tensor, optimizer: Adam) -> Tensor:
        """Keep the weights of improved members; lower the learning rate of other members, to 0 if a member stops.

        Args:
            loss: Validation loss of each member in the optimizer, float64 [members].
            optimizer: The optimizer.

        Returns:
            True for members that stop, bool [members].
        """
        members, device = self.members, self.best.device
        training = self._bad_rounds[members] < self.options.patience
        better = (loss < self._lowest[members]) & training
        self._lowest[members] = torch.where(better, loss, self._lowest[members])
        chosen = better.nonzero().squeeze(1)
        self.best[members[chosen].to(device)] = optimizer.parameters[chosen.to(device)]
        self._bad_rounds[members] = torch.where(better, 0, self._bad_rounds[members] + training.long())
        optimizer.rates.mul_(torch.where(better, 1.0, self.options.lr_factor).to(device).unsqueeze(1))
        stopped = self._bad_rounds[members] >= self.options.patience
        if not stopped.all():
            optimizer.rates[stopped.to(device)] = 0.0
        return stopped
