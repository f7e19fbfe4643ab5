"""Training steps of several tasks. A micro-batch has ranking groups and rows of auxiliary tasks in a ragged batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ranker.data.collate import Collator
from ranker.data.join import concatenate
from ranker.data.ragged import ranges
from ranker.data.sampling import GroupSampler
from ranker.data.training_steps import TrainSteps
from ranker.multitask.rows import TaskRows
from ranker.multitask.sampling import TaskPlan
from ranker.probing.sequences import Sequences
from ranker.types import Movable, RankBatch, TokenBatch, TrainStep


@dataclass
class HeadBatch(Movable):
    """The targets of one auxiliary task in a micro-batch.

    A head reads the same number of token spans for every target. The spans of a target are consecutive.

    Args:
        task: Index of the head.
        tokens: Indices of the tokens of all spans in the states of the micro-batch, int64 [read tokens].
        owners: Span of each of these tokens, int64 [read tokens].
        lengths: Number of tokens of each span, at least 1, int64 [targets * spans].
        labels: Class (int64) or number (float32) of each target [targets].
        num_targets: Number of targets of the task in the whole step, over all devices.
    """

    task: int
    tokens: Tensor
    owners: Tensor
    lengths: Tensor
    labels: Tensor
    num_targets: int


@dataclass
class TaskBatch(RankBatch):
    """A micro-batch of ranking groups and auxiliary rows; in `pairs`, the rows of ranking groups come first.

    Args:
        heads: The auxiliary tasks that have rows in the micro-batch.
        num_rank_rows: Number of rows of ranking groups, stored on the host.
        num_rank_tokens: Number of tokens of these rows, stored on the host.
    """

    heads: tuple[HeadBatch, ...] = ()
    num_rank_rows: int = 0
    num_rank_tokens: int = 0

    @property
    def rank_pairs(self) -> TokenBatch:
        """Return the rows of ranking groups."""
        assert self.pairs is not None
        rows, tokens = self.num_rank_rows, self.num_rank_tokens
        return TokenBatch(
            self.pairs.tokens[:tokens],
            self.pairs.segments[:tokens],
            self.pairs.cu_seqlens[: rows + 1],
            self.pairs.max_length,
        )


@dataclass
class TaskStep(TrainStep):
    """This device's part of one optimizer step.

    Args:
        rows: Number of rows of each task in the whole step, over all devices; ranking is the first task. The value is
            the same on every device.
    """

    rows: tuple[int, ...] = field(default=())


class TaskSteps(TrainSteps):
    """This device's part of each optimizer step, indexed by (epoch, step).

    Args:
        plan: Groups and rows of each step.
        sampler: Draws the docs of ranking groups.
        collator: Makes the token batches of ranking groups.
        sequences: Token rows of the auxiliary tasks.
        tasks: Rows and labels of each auxiliary task.
        rank: Number of this device.
        world: Number of devices.
    """

    plan: TaskPlan  # type: ignore[assignment]

    def __init__(
        self,
        plan: TaskPlan,
        sampler: GroupSampler,
        collator: Collator,
        sequences: Sequences,
        tasks: Sequence[TaskRows],
        rank: int,
        world: int,
    ) -> None:
        super().__init__(plan, sampler, collator, rank, world)  # type: ignore[arg-type]
        self.sequences, self.tasks = sequences, tasks
        self._lengths, self._layouts = np.diff(sequences.starts), sequences.row_types

    def __getitem__(self, key: tuple[int, int]) -> TaskStep:
        epoch, index = key
        groups = self.plan.groups(epoch, index)
        num_groups = len(groups)
        if num_groups:
            doc_rows, labels = self.sampler.draw(epoch, groups)
        else:
            doc_rows, labels = np.zeros((0, 1), dtype=np.int64), np.zeros((0, 1))
        query_rows = self.sampler.query_rows[groups]
        sizes = self.collator.group_sizes(query_rows, doc_rows).tolist() if num_groups else []
        task_rows = self.plan.rows(epoch, index)
        # The items of a step are its ranking groups, then the rows of the first task, of the second task, ...
        task_of = np.repeat(np.arange(len(self.tasks)), np.array([len(rows) for rows in task_rows], dtype=np.int64))
        number_of = np.concatenate([*task_rows, np.zeros(0, dtype=np.int64)]).astype(np.int64)
        rows = self._rows(task_of, number_of)
        num_targets = [
            int(np.diff(task.target_starts)[rows].sum()) for task, rows in zip(self.tasks, task_rows, strict=True)
        ]
        micro_batches = []
        for items in self.plan.ranking.micro_batches([*sizes, *self._lengths[rows].tolist()], self.rank, self.world):
            groups_here = np.array([item for item in items if item < num_groups], dtype=np.int64)
            rows_here = np.array([item - num_groups for item in items if item >= num_groups], dtype=np.int64)
            ranked = None
            if len(groups_here):
                share = len(groups_here) / num_groups
                ranked = self.collator.collate(
                    query_rows[groups_here], doc_rows[groups_here], labels[groups_here], groups_here, share
                )
            micro_batches.append(
                self._with_rows(ranked, rows_here, task_of[rows_here], number_of[rows_here], num_targets)
            )
        num_docs = int((doc_rows >= 0).sum())
        return TaskStep(
            epoch,
            index,
            tuple(micro_batches),
            num_groups,
            num_docs + len(number_of),
            rows=(num_docs, *(len(rows) for rows in task_rows)),
        )

    def _rows(self, task_of: np.ndarray, number_of: np.ndarray) -> np.ndarray:
        """Return the index in `sequences` of each auxiliary row, int64 [rows], from its task and number in the task."""
        pairs = zip(task_of.tolist(), number_of.tolist(), strict=True)
        return np.array([self.tasks[task].rows[number] for task, number in pairs], dtype=np.int64)

    def _with_rows(
        self,
        ranked: RankBatch | None,
        items: np.ndarray,
        task_of: np.ndarray,
        number_of: np.ndarray,
        num_targets: Sequence[int],
    ) -> TaskBatch:
        """Append auxiliary rows to the rows of the ranking groups of a micro-batch.

        Args:
            ranked: The micro-batch of ranking groups; None if there are no ranking groups.
            items: Index of each auxiliary row in the whole step, which decides the row's id [rows].
            task_of: Task of each auxiliary row [rows].
            number_of: Number of each auxiliary row within its task [rows].
            num_targets: Number of targets of each task in the whole step.
        """
        num_rank_tokens = 0 if ranked is None or ranked.pairs is None else ranked.pairs.num_tokens
        rows = self._rows(task_of, number_of)
        blocks, order = self._lay_out(rows, -1 - items)  # negative ids, which ranking's rows do not have
        lengths = self._lengths[rows]
        starts = np.zeros(len(rows), dtype=np.int64)
        starts[order] = num_rank_tokens + np.cumsum(lengths[order]) - lengths[order]
        heads = tuple(
            _head_batch(task, self.tasks[task], number_of[task_of == task], starts[task_of == task], num_targets[task])
            for task in np.unique(task_of).tolist()
        )
        if ranked is None:
            empty = torch.zeros(0, 1)
            return TaskBatch(
                empty, empty.bool(), torch.zeros(0, dtype=torch.int64), 0.0, concatenate(blocks), heads=heads
            )
        assert ranked.pairs is not None
        return TaskBatch(
            ranked.labels,
            ranked.doc_mask,
            ranked.group_ids,
            ranked.share,
            concatenate([ranked.pairs, *blocks]),
            heads=heads,
            num_rank_rows=ranked.pairs.num_rows,
            num_rank_tokens=ranked.pairs.num_tokens,
        )

    def _lay_out(self, rows: np.ndarray, row_ids: np.ndarray) -> tuple[list[TokenBatch], np.ndarray]:
        """Lay out auxiliary rows.

        Args:
            rows: Rows in `sequences` [rows].
            row_ids: Id of each row within the step [rows].

        Returns:
            A token batch for each layout, and the order of the rows in these batches, int64 [rows]: entry i is the
            index in `rows` of the i-th row of the concatenated batches.
        """
        layouts = self._layouts[rows]
        blocks = [
            replace(self.sequences.take(rows[layouts == layout]), row_ids=torch.from_numpy(row_ids[layouts == layout]))
            for layout in np.unique(layouts)
        ]
        return blocks, np.argsort(layouts, kind="stable")


def _head_batch(task: int, rows: TaskRows, numbers: np.ndarray, starts: np.ndarray, num_targets: int) -> HeadBatch:
    """Make the batch of a head: the tokens and labels of the task's rows in a micro-batch.

    Args:
        task: Index of the head.
        rows: Rows and labels of the task.
        numbers: Numbers of the task's rows in the micro-batch [rows].
        starts: First token of each of these rows in the micro-batch [rows].
        num_targets: Targets of the task in the whole step.
    """
    counts = np.diff(rows.target_starts)[numbers]
    targets = ranges(rows.target_starts[numbers], counts)
    spans = rows.spans[targets] + np.repeat(starts, counts)[:, None, None]
    spans = spans.reshape(-1, 2)  # [targets * spans, 2]
    lengths = spans[:, 1] - spans[:, 0]
    return HeadBatch(
        task,
        torch.from_numpy(ranges(spans[:, 0], lengths)),
        torch.from_numpy(np.repeat(np.arange(len(spans)), lengths)),
        torch.from_numpy(np.maximum(lengths, 1)),
        torch.from_numpy(rows.labels[targets]),
        num_targets,
    )
