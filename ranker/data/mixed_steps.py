"""The training steps of a mix of several sets; each set has its own stores, text limits and draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch.utils.data import Dataset

from ranker.data.collate import Collator
from ranker.data.join import join_groups
from ranker.data.mixed_plan import MixedPlan
from ranker.data.training_steps import TrainSteps
from ranker.hashing import digest
from ranker.types import RankBatch, TrainStep


@dataclass(frozen=True)
class _Drawn:
    """The groups of one set in a step: rows of the set's stores, and labels."""

    set_index: int
    collator: Collator
    query_rows: np.ndarray  # [groups]
    doc_rows: np.ndarray  # [groups, docs], -1 where a group has no doc
    labels: np.ndarray  # [groups, docs]


class MixedSteps(Dataset[TrainStep]):
    """This device's part of each optimizer step, indexed by (epoch, step).

    The groups of a step are in the order of the sets. All sets have the same number of cells per group; if the groups
    of a set have fewer docs, their last cells are empty.

    Args:
        plan: Groups of each step.
        sets: Set name -> the steps of a training on this set alone, in the order of the plan's sets.
    """

    def __init__(self, plan: MixedPlan, sets: Mapping[str, TrainSteps]) -> None:
        self.plan, self.sets = plan, dict(sets)
        self._parts = list(self.sets.values())
        self.rank, self.world = self._parts[0].rank, self._parts[0].world

    def __getitem__(self, key: tuple[int, int]) -> TrainStep:
        epoch, index = key
        drawn = self._draw(epoch, index)
        sizes = np.concatenate([part.collator.group_sizes(part.query_rows, part.doc_rows) for part in drawn])
        micro_batches = tuple(
            self._collate(drawn, np.asarray(chosen), len(sizes))
            for chosen in self.plan.micro_batches(sizes.tolist(), self.rank, self.world)
        )
        set_groups = [0] * len(self._parts)
        for part in drawn:
            set_groups[part.set_index] += len(part.query_rows)
        step = TrainStep(
            epoch,
            index,
            micro_batches,
            len(sizes),
            sum(int((part.doc_rows >= 0).sum()) for part in drawn),
            set_groups=tuple(set_groups),
        )
        steps = self._parts[drawn[0].set_index]
        if steps.positives is None and not steps.whole_step:
            return step
        (only,) = drawn  # with batches=one_set
        return replace(step, contrast=steps.contrast(only.query_rows, only.doc_rows, only.labels))

    def _draw(self, epoch: int, index: int) -> list[_Drawn]:
        """Return the groups of a step, with an entry for each set."""
        found: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
        for part in self.plan.parts(epoch, index):
            sampler = self._parts[part.set_index].sampler
            rows = (sampler.query_rows[part.groups], *sampler.draw(part.draw, part.groups))
            found.setdefault(part.set_index, []).append(rows)
        width = max(doc_rows.shape[1] for rows in found.values() for _, doc_rows, _ in rows)
        return [
            _Drawn(
                i,
                self._parts[i].collator,
                np.concatenate([query_rows for query_rows, _, _ in rows]).astype(np.int64),
                _widened(np.concatenate([doc_rows for _, doc_rows, _ in rows]), width, -1),
                _widened(np.concatenate([labels for _, _, labels in rows]), width, 0),
            )
            for i, rows in found.items()
        ]

    def _collate(self, drawn: Sequence[_Drawn], chosen: np.ndarray, num_groups: int) -> RankBatch:
        """Make the micro-batch of some groups of the step.

        Args:
            drawn: All groups of the step.
            chosen: Indices of the chosen groups in the step, ascending [groups].
            num_groups: Number of groups of the step.
        """
        batches, start = [], 0
        set_sizes = [0] * len(self._parts)
        for part in drawn:
            end = start + len(part.query_rows)
            mine = chosen[(chosen >= start) & (chosen < end)]
            if len(mine):
                set_sizes[part.set_index] = len(mine)
                rows = mine - start
                batches.append(
                    part.collator.collate(part.query_rows[rows], part.doc_rows[rows], part.labels[rows], mine, 0.0)
                )
            start = end
        return replace(join_groups(batches, len(chosen) / num_groups), set_sizes=tuple(set_sizes))

    def query_ids(self, epoch: int, index: int) -> list[str]:
        """Return the ids of a step's queries, over all devices, each as SET/ID."""
        names = list(self.sets)
        return [
            f"{names[part.set_index]}/{query_id}"
            for part in self.plan.parts(epoch, index)
            for query_id in self._parts[part.set_index].ids_of(part.groups)
        ]

    def identity(self) -> str:
        """Return a hash of the sets' data and of each set's number of groups in an epoch."""
        parts = [part.identity() for part in self._parts]
        return digest(repr((list(self.sets), parts, self.plan.counts, self.plan.one_set)).encode())


def _widened(values: np.ndarray, width: int, filling: float) -> np.ndarray:
    """Return `values` [groups, docs], filled up to `width` columns with `filling`."""
    lacking = width - values.shape[1]
    return values if not lacking else np.pad(values, ((0, 0), (0, lacking)), constant_values=filling)
