"""Options of the training step that every Lightning module takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Optimization:
    """How a training optimizes.

    Args:
        optimizer: Returns the optimizer for parameter groups; None for a module that is only validated.
        schedule: Returns the factor on the learning rate for (step, counted from 1; total steps); None for a module
            that is only validated.
        total_steps: Optimizer steps of the whole training; None: Lightning's estimate. With the estimate, a training
            can't resume in the middle of an epoch: Lightning loads the data for the estimate, and then does not restore
            the loader's state.
        weight_decay: Weight decay of matrices; biases and norms are not decayed.
        max_norm: Largest gradient norm, to which gradients are clipped. None, 0 and negative values do not clip, as in
            Lightning.
        seed: Seed of dropout. Each step derives its own seed from it, so a resumed run repeats the same dropout.
    """

    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None
    schedule: Callable[[int, int], float] | None = None
    total_steps: int | None = None
    weight_decay: float = 0.01
    max_norm: float | None = 1.0
    seed: int = 0


@dataclass(frozen=True)
class NonFiniteOptions:
    """What to do at a step whose loss or gradient is NaN or infinite.

    Args:
        action: `stop` ends the training. `skip` changes neither weights nor optimizer state, but the step still counts
            towards `total_steps`.
        folder: Folder in which such a step is stored; `python -m ranker replay` repeats it. None: no step is stored.
    """

    action: str = "stop"
    folder: Path | None = None
