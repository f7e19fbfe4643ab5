"""Average the last k copies of the weights of a training. The mean is validated, and stored as the model."""

from __future__ import annotations

from collections import deque
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor

from ranker.errors import ConfigError


class LastK(WeightAveraging):
    """Average copies of the weights, taken every `every_n_steps` steps (Vaswani et al., 2017, section 6.1).

    Validation, the `state_dict` of checkpoints, and `model/` use the mean of the last k copies, or the trained weights
    before the first copy. Checkpoints also contain the trained weights and the copies, so a resume is exact, but a
    checkpoint is more than k times as large as the model.

    Args:
        k: Number of copies.
        every_n_steps: Optimizer steps between two copies.

    Raises:
        ConfigError: A value is out of range.
    """

    def __init__(self, k: int = 5, every_n_steps: int = 100) -> None:
        for key, value in (("k", k), ("every_n_steps", every_n_steps)):
            if value < 1:
                raise ConfigError(f"callbacks.last_k.{key}: expected at least 1, got {value}")
        super().__init__(use_buffers=False)  # the models have no buffers that change in training
        self.k, self.every_n_steps = k, every_n_steps
        self._last: deque[list[Tensor]] = deque(maxlen=k)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Every `every_n_steps` steps, copy the weights and compute the mean again."""
        step = trainer.global_step
        if step > self._latest_update_step and step % self.every_n_steps == 0:
            self._latest_update_step = step
            self._last.append([weight.detach().clone() for weight in _trained(pl_module)])
            self._average()

    def _average(self) -> None:
        """Write the mean of the copies, computed in float64, to the averaged model."""
        assert self._average_model is not None
        for place, weight in enumerate(_trained(self._average_model.module)):
            kept = torch.stack([weights[place].to(weight.device, torch.float64) for weights in self._last])
            weight.data.copy_(kept.mean(0))

    def _without_any(self, module: pl.LightningModule) -> None:
        """Before the first copy, use the trained weights as the mean."""
        if not self._last and self._average_model is not None:
            for mean, weight in zip(self._average_model.module.parameters(), module.parameters(), strict=True):
                mean.data.copy_(weight.data)

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Swap the trained weights and the mean."""
        self._without_any(pl_module)
        super().on_validation_epoch_start(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace the trained weights by the mean."""
        self._without_any(pl_module)
        super().on_train_end(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Store the mean as `state_dict`, and the trained weights under another key."""
        self._without_any(pl_module)
        super().on_save_checkpoint(trainer, pl_module, checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """Return the copies of the weights, oldest first."""
        return {**super().state_dict(), "last": [list(weights) for weights in self._last]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the copies of the weights from a checkpoint."""
        super().load_state_dict(state_dict)
        self._last = deque(state_dict["last"], maxlen=self.k)


def _trained(module: Any) -> list[Tensor]:
    return [weight for weight in module.parameters() if weight.requires_grad]
