"""Optimizer steps of a pretraining: the groups of each step, and the micro-batches on this device.

A group is the rows drawn from one doc, or from one block. Blocks are the parts of nearly equal length into which a long
doc is cut.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import lightning.pytorch as pl
import numpy as np
from torch.utils.data import Dataset

from ranker.data.step_plan import StepPlan
from ranker.data.training_steps import StepLoader
from ranker.errors import ConfigError
from ranker.types import Contrast, RankBatch, TrainStep


class StepRows(Protocol):
    """All rows of a step. Every device draws all of them, so they are the same on all devices.

    Attributes:
        sizes: Number of tokens of each group's rows, int64 [groups].
        contrast: Which texts of the whole step are compared with each other; None: the objective compares no texts.
    """

    sizes: np.ndarray
    contrast: Contrast | None

    def batch(self, chosen: np.ndarray) -> RankBatch:
        """Return the micro-batch of some groups of the step."""
        ...


class Draws(Protocol):
    """Random draws of an objective: the rows of each step, drawn from the texts."""

    def __len__(self) -> int:
        """Return the number of groups in an epoch."""
        ...

    def largest(self) -> int:
        """Return the largest number of tokens that the rows of a group can have."""
        ...

    def step(self, epoch: int, groups: np.ndarray) -> StepRows:
        """Return the rows of a step's groups. They depend only on the seed, the epoch and the groups."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of everything that the draws depend on, except the seed."""
        ...


class PretrainSteps(Dataset[TrainStep]):
    """This device's part of each optimizer step, indexed by (epoch, step). `TrainSteps` is the same for rankings.

    Args:
        plan: The groups of each step, and how the step is split.
        draws: Draws the rows of a step.
        rank: Index of this device.
        world: Number of devices.
    """

    def __init__(self, plan: StepPlan, draws: Draws, rank: int, world: int) -> None:
        self.plan, self.draws, self.rank, self.world = plan, draws, rank, world
        self.never_idle = False  # as in `TrainSteps`

    def __getitem__(self, key: tuple[int, int]) -> TrainStep:
        epoch, index = key
        groups = self.plan.groups(epoch, index)
        rows = self.draws.step(epoch, groups)
        parts = self.plan.micro_batches(rows.sizes.tolist(), self.rank, self.world)
        micro_batches = tuple(rows.batch(np.asarray(chosen)) for chosen in parts)
        if self.never_idle and not parts:
            micro_batches = (replace(rows.batch(np.array([rows.sizes.argmin()])), share=0.0),)
        return TrainStep(epoch, index, micro_batches, len(groups), len(groups), rows.contrast)

    def query_ids(self, epoch: int, index: int) -> list[str]:
        """Return names of the step's groups, for messages."""
        return [f"block {group}" for group in self.plan.groups(epoch, index)]

    def identity(self) -> str:
        """Return a hash of the training data; the same for any number of devices and any token budget."""
        return self.draws.fingerprint()


class PretrainData(pl.LightningDataModule):
    """Data module of a pretraining, which gives each device its part of each step.

    Args:
        draws: Draws the rows.
        groups: Groups per optimizer step, over all devices.
        max_tokens: Token budget of a micro-batch on one device; None: `default_tokens`, or more if one group has more.
        seed: Seed of the order of groups.
        min_micro_batches: Smallest number of micro-batches per device and step.
        workers: Number of worker processes that prepare steps.
        default_tokens: The budget if `max_tokens` is None and no group needs more.

    Raises:
        ConfigError: There are no groups, or a group can have more tokens than the budget.
    """

    def __init__(
        self,
        draws: Draws,
        groups: int,
        max_tokens: int | None = None,
        seed: int = 0,
        min_micro_batches: int = 1,
        workers: int = 0,
        default_tokens: int = 8192,
    ) -> None:
        super().__init__()
        if not len(draws):
            raise ConfigError("data: expected docs that are long enough for this objective, got none; use longer docs")
        if max_tokens is not None and max_tokens < draws.largest():
            raise ConfigError(
                f"batch.max_tokens: expected at least {draws.largest()}, the largest number of tokens of a group of "
                f"this objective, got {max_tokens}; raise it, or lower max_doc_tokens"
            )
        budget = max(default_tokens, draws.largest()) if max_tokens is None else max_tokens
        self.draws, self.workers = draws, workers
        self.plan = StepPlan(len(draws), groups, budget, seed, min_micro_batches)

    def train_steps(self, rank: int = 0, world: int = 1) -> PretrainSteps:
        """Return one device's steps."""
        return PretrainSteps(self.plan, self.draws, rank, world)

    def train_dataloader(self) -> StepLoader:
        """Return the loader of this device's steps; it can resume in the middle of an epoch."""
        trainer: Any = self.trainer
        steps: Any = self.train_steps(trainer.global_rank, trainer.world_size)
        steps.never_idle = getattr(trainer.strategy, "never_idle", False)
        return StepLoader(steps, self.workers, pin_memory=trainer.strategy.root_device.type == "cuda")
