"""The items of a training's loader: this device's part of each optimizer step, in order and from any step on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

from ranker.data.collate import Collator
from ranker.data.contrast import KnownPositives, contrast, own_docs
from ranker.data.sampling import GroupSampler
from ranker.data.step_plan import StepPlan
from ranker.errors import CheckpointError
from ranker.hashing import digest
from ranker.types import Contrast, TrainStep


class TrainSteps(Dataset[TrainStep]):
    """This device's part of each optimizer step, indexed by (epoch, step).

    Every worker and every device computes the same split of a step, without communication.

    Args:
        plan: Decides the groups of each step, and how a step is split.
        sampler: Draws the docs of each group.
        collator: Makes the token batches.
        rank: Number of this device.
        world: Number of devices.
        positives: If given, the groups of a step use each other's docs as negatives.
        whole_step: Whether steps have `contrast` even without `positives`; then each group ranks its own docs.
    """

    def __init__(
        self,
        plan: StepPlan,
        sampler: GroupSampler,
        collator: Collator,
        rank: int,
        world: int,
        positives: KnownPositives | None = None,
        whole_step: bool = False,
    ) -> None:
        self.plan, self.sampler, self.collator, self.rank, self.world = plan, sampler, collator, rank, world
        self.positives, self.whole_step = positives, whole_step
        self.never_idle = False  # whether a device without groups gets a copy of the smallest group, with share 0

    def __getitem__(self, key: tuple[int, int]) -> TrainStep:
        epoch, index = key
        groups = self.plan.groups(epoch, index)
        doc_rows, labels = self.sampler.draw(epoch, groups)
        query_rows = self.sampler.query_rows[groups]
        sizes = self.collator.group_sizes(query_rows, doc_rows)
        parts = self.plan.micro_batches(sizes.tolist(), self.rank, self.world)
        stand_in = [[int(sizes.argmin())]] if self.never_idle and not parts else []
        micro_batches = tuple(
            self.collator.collate(
                query_rows[chosen],
                doc_rows[chosen],
                labels[chosen],
                np.asarray(chosen),
                0.0 if stand_in else len(chosen) / len(groups),
            )
            for chosen in (parts or stand_in)
        )
        step_contrast = self.contrast(query_rows, doc_rows, labels)
        return TrainStep(epoch, index, micro_batches, len(groups), int((doc_rows >= 0).sum()), step_contrast)

    def contrast(self, query_rows: np.ndarray, doc_rows: np.ndarray, labels: np.ndarray) -> Contrast | None:
        """Return which docs of a step each of its groups ranks; None if the training scores each group alone.

        Args:
            query_rows: Rows of the groups' queries [groups].
            doc_rows: Rows of their docs [groups, docs], -1 where a group has no doc.
            labels: Labels of their docs [groups, docs].
        """
        if self.positives is not None:
            return contrast(self.collator, query_rows, doc_rows, labels, self.positives)
        return own_docs(doc_rows, labels) if self.whole_step else None

    def query_ids(self, epoch: int, index: int) -> list[str]:
        """Return the ids of a step's queries, over all devices."""
        return self.ids_of(self.plan.groups(epoch, index))

    def ids_of(self, groups: np.ndarray) -> list[str]:
        """Return the query ids of some groups."""
        return [query_id.decode() for query_id in self.collator.queries.ids()[self.sampler.query_rows[groups]]]

    def identity(self) -> str:
        """Return a hash of the training data; the same for any number of devices and any token budget."""
        texts = f"{self.collator.queries.meta['texts']} {self.collator.docs.meta['texts']}".encode()
        return digest(texts, self.sampler.fingerprint().encode())


class StepLoader:
    """Loader of training steps in order, which can resume in the middle of an epoch.

    `done` is the number of steps that this process has yielded, without the steps that workers have prefetched. The
    length is the number of steps of the whole epoch. Lightning saves and loads the loader's state. Lightning also calls
    `set_epoch` on `.sampler` after `iter()`, so `__iter__` must be lazy.

    Args:
        steps: The steps.
        workers: Number of worker processes that prefetch steps; 0: this process collates. The data is the same for any
            number.
        pin_memory: Whether to copy batches into page-locked memory.
    """

    def __init__(self, steps: TrainSteps, workers: int = 0, pin_memory: bool = False) -> None:
        self.steps, self.workers, self.pin_memory = steps, workers, pin_memory
        self.epoch, self.done = 0, 0
        self.waited = 0.0  # seconds that the training loop has waited for steps
        self.sampler = self

    def __len__(self) -> int:
        return len(self.steps.plan)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch; do nothing if the epoch is the current one, so that a resumed epoch continues."""
        if epoch != self.epoch:
            self.epoch, self.done = epoch, 0

    def __iter__(self) -> Iterator[TrainStep]:
        if self.done >= len(self):  # the checkpoint was written at the end of the epoch
            return
        keys = [(self.epoch, index) for index in range(self.done, len(self))]
        loader: Any = DataLoader(
            self.steps, sampler=keys, batch_size=None, num_workers=self.workers, pin_memory=self.pin_memory
        )  # type: ignore[arg-type]
        steps, before = iter(loader), time.perf_counter()
        for step in steps:
            self.waited += time.perf_counter() - before
            self.done += 1
            yield step
            before = time.perf_counter()

    def query_ids(self, epoch: int, index: int) -> list[str]:
        """Return the ids of a step's queries, over all devices."""
        return self.steps.query_ids(epoch, index)

    @cached_property
    def _source(self) -> dict[str, int | str]:
        """Return the identity of the training data; it is the same for any number of devices and any token budget."""
        return {"seed": self.steps.plan.seed, "steps": len(self), "data": self.steps.identity()}

    def state_dict(self) -> dict[str, int | str]:
        """Return the position in the training data and the data's identity; both are the same on every device."""
        return {"epoch": self.epoch, "done": self.done, **self._source}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a saved state.

        Raises:
            CheckpointError: The state has another seed, another number of steps or other data, so the rest of its epoch
                is not available.
        """
        names = {"seed": "seed", "steps": "steps an epoch", "data": "a fingerprint of queries, docs and candidates"}
        differences = [
            f"{names[key]} {value!r}, not {state[key]!r}"
            for key, value in self._source.items()
            if state.get(key, value) != value
        ]
        if differences:
            raise CheckpointError(
                f"data: expected the training data of the run that is resumed, got other ({'; '.join(differences)}); "
                "put its files back, or start a new run without resume=true"
            )
        self.epoch, self.done = state["epoch"], state["done"]
