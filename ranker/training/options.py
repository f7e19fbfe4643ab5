"""Options of the training step that every Lightning module takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Optimization:
    """How a training optimises.

    Args:
        optimizer: Makes the optimizer from parameter groups; None for a module that is only validated.
        schedule: Returns the learning rate factor for (step, counted from 1; total steps); None for a module that is
            only validated.
        total_steps: Optimizer steps of the whole training; None: Lightning's estimate. With the estimate, a training
            can't be resumed in the middle of an epoch: Lightning loads the data to make the estimate, and then does not
            restore the loader's state.
        weight_decay: Decay of matrices; biases and norms are not decayed.
        max_norm: The gradient norm is clipped to this value; None, 0 and negative values do not clip, as in Lightning.
        seed: Seeds the dropout of each step, so that a resumed run repeats it.
    """

    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None
    schedule: Callable[[int, int], float] | None = None
    total_steps: int | None = None
    weight_decay: float = 0.01
    max_norm: float | None = 1.0
    seed: int = 0


@dataclass(frozen=True)
class NonFiniteOptions:
    """What happens at a step whose loss or gradient is not finite.

    Args:
        action: `stop` ends the training; `skip` changes no weight and no optimizer state, and the step still counts
            towards `total_steps`.
        folder: Folder in which such a step is stored; `python -m ranker replay` repeats it. None stores none.
    """

    action: str = "stop"
    folder: Path | None = None
