"""Training steps of several tasks: ranking groups and rows of auxiliary tasks, in one ragged batch a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ranker.data.batching import Collator
from ranker.data.collection import Collection
from ranker.data.datamodule import RankData
from ranker.data.dataset import TrainSteps
from ranker.data.sampling import GroupSampler
from ranker.errors import ConfigError
from ranker.multitask.options import Head, TaskLabels, TaskSampling
from ranker.multitask.rows import TaskRows, label_tasks, to_rows
from ranker.multitask.sampling import TaskPlan
from ranker.probing.examples import ProbeTask
from ranker.probing.sequences import Sequences
from ranker.types import Movable, RankBatch, TokenBatch, TrainStep


@dataclass
class HeadBatch(Movable):
    """One auxiliary task's targets in a micro-batch.

    Args:
        task: Number of the head, from 0.
        tokens: Tokens of all parts that the head reads, places in the micro-batch's states, int64 [read tokens].
        owners: The part that each is of, int64 [read tokens]; target i has the parts i * parts to (i + 1) * parts.
        lengths: Tokens of each part, at least 1, int64 [targets * parts].
        labels: Class (int64) or number (float32) of each target [targets].
        num_targets: Targets of the task in the whole step, on all devices.
    """

    task: int
    tokens: Tensor
    owners: Tensor
    lengths: Tensor
    labels: Tensor
    num_targets: int


@dataclass
class TaskBatch(RankBatch):
    """A micro-batch of ranking groups and auxiliary rows; `pairs` holds the groups' rows first.

    Args:
        heads: The auxiliary tasks that have rows in it.
        num_rank_rows: Rows of ranking groups, a host number.
        num_rank_tokens: Their tokens.
    """

    heads: tuple[HeadBatch, ...] = ()
    num_rank_rows: int = 0
    num_rank_tokens: int = 0

    @property
    def rank_pairs(self) -> TokenBatch:
        """The ranking groups' rows."""
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
    """All of one optimizer step's work on this device.

    Args:
        rows: Rows of each task in the step, on all devices, ranking first; the same on every device.
    """

    rows: tuple[int, ...] = field(default=())


class TaskSteps(Dataset[TaskStep]):
    """This device's part of each optimizer step, by (epoch, step).

    Args:
        plan: What each step holds.
        sampler: Draws the docs of ranking groups.
        collator: Makes their token batches.
        sequences: The auxiliary tasks' rows.
        tasks: Which of them are whose, with labels.
        rank: This device.
        world: Number of devices.
    """

    def __init__(
        self, plan: TaskPlan, sampler: GroupSampler, collator: Collator, sequences: Sequences, tasks: Sequence[TaskRows], rank: int, world: int
    ) -> None:  # fmt: skip
        self.plan, self.sampler, self.collator, self.rank, self.world = plan, sampler, collator, rank, world
        self.sequences, self.tasks = sequences, tasks
        self._lengths, self._kinds = np.diff(sequences.starts), sequences.row_types

    def __getitem__(self, key: tuple[int, int]) -> TaskStep:
        epoch, index = key
        groups = self.plan.groups(epoch, index)
        doc_rows, labels = (
            self.sampler.draw(epoch, groups) if len(groups) else (np.zeros((0, 1), dtype=np.int64), np.zeros((0, 1)))
        )
        query_rows = self.sampler.query_rows[groups]
        sizes = self.collator.group_sizes(query_rows, doc_rows).tolist() if len(groups) else []
        drawn = self.plan.rows(epoch, index)
        # items of the step: its groups, then every task's rows
        task_of = np.repeat(np.arange(len(self.tasks)), np.array([len(own) for own in drawn], dtype=np.int64))
        number_of = np.concatenate([*drawn, np.zeros(0, dtype=np.int64)]).astype(np.int64)
        rows = self._rows(task_of, number_of)
        num_targets = [int(np.diff(task.targets)[own].sum()) for task, own in zip(self.tasks, drawn, strict=True)]
        micro_batches = []
        for part in self.plan.ranking.cut([*sizes, *self._lengths[rows].tolist()], self.rank, self.world):
            own = np.array([place for place in part if place < len(groups)], dtype=np.int64)
            others = np.array([place - len(groups) for place in part if place >= len(groups)], dtype=np.int64)
            ranked = None
            if len(own):
                ranked = self.collator.collate(query_rows[own], doc_rows[own], labels[own], own, len(own) / len(groups))
            micro_batches.append(self._with_rows(ranked, others, task_of[others], number_of[others], num_targets))
        num_docs = int((doc_rows >= 0).sum())
        return TaskStep(
            epoch,
            index,
            tuple(micro_batches),
            len(groups),
            num_docs + len(rows),
            rows=(num_docs, *(len(own) for own in drawn)),
        )

    def _rows(self, task_of: np.ndarray, number_of: np.ndarray) -> np.ndarray:
        """Rows in `sequences` of some tasks' pairs, int64."""
        pairs = zip(task_of.tolist(), number_of.tolist(), strict=True)
        return np.array([self.tasks[task].rows[number] for task, number in pairs], dtype=np.int64)

    def query_ids(self, epoch: int, index: int) -> list[str]:
        """The ranking queries of a step, over all devices."""
        rows = self.sampler.query_rows[self.plan.groups(epoch, index)]
        return [query_id.decode() for query_id in self.collator.queries.ids()[rows]]

    def _with_rows(
        self,
        ranked: RankBatch | None,
        places: np.ndarray,
        task_of: np.ndarray,
        number_of: np.ndarray,
        num_targets: Sequence[int],
    ) -> TaskBatch:
        """Put auxiliary rows, which stand at some places among the step's, behind the ranking groups' rows."""
        first = 0 if ranked is None or ranked.pairs is None else ranked.pairs.num_tokens
        rows = self._rows(task_of, number_of)
        blocks, order = self._lay_out(rows, -1 - places)
        lengths = self._lengths[rows]
        starts = np.zeros(len(rows), dtype=np.int64)
        starts[order] = first + np.cumsum(lengths[order]) - lengths[order]
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
        pairs = concatenate([ranked.pairs, *blocks])
        return TaskBatch(
            ranked.labels, ranked.doc_mask, ranked.places, ranked.share, pairs, heads=heads,
            num_rank_rows=ranked.pairs.num_rows, num_rank_tokens=ranked.pairs.num_tokens,
        )  # fmt: skip

    def _lay_out(self, rows: np.ndarray, names: np.ndarray) -> tuple[list[TokenBatch], np.ndarray]:
        """Token batches of some rows with their names, one a layout, and the order in which they hold the rows."""
        kinds = self._kinds[rows]
        blocks = [
            replace(self.sequences.take(rows[kinds == kind]), names=torch.from_numpy(names[kinds == kind]))
            for kind in np.unique(kinds)
        ]
        return blocks, np.argsort(kinds, kind="stable")


def _head_batch(task: int, rows: TaskRows, numbers: np.ndarray, starts: np.ndarray, num_targets: int) -> HeadBatch:
    """What a head reads, from the first tokens of its rows."""
    counts = np.diff(rows.targets)[numbers]
    targets = np.concatenate([np.arange(rows.targets[number], rows.targets[number + 1]) for number in numbers])
    spans = rows.spans[targets] + np.repeat(starts, counts)[:, None, None]
    spans = spans.reshape(-1, 2)  # [targets * parts, 2]
    lengths = spans[:, 1] - spans[:, 0]
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return HeadBatch(
        task,
        torch.from_numpy(np.repeat(spans[:, 0], lengths) + within),
        torch.from_numpy(np.repeat(np.arange(len(spans)), lengths)),
        torch.from_numpy(np.maximum(lengths, 1)),
        torch.from_numpy(rows.labels[targets]),
        num_targets,
    )


def concatenate(batches: Sequence[TokenBatch]) -> TokenBatch:
    """Put ragged batches one after another."""
    if len(batches) == 1:
        return batches[0]
    ends = np.cumsum([0, *(batch.num_tokens for batch in batches)])
    seqlens = [
        batches[0].cu_seqlens[:1],
        *(batch.cu_seqlens[1:] + int(start) for batch, start in zip(batches, ends, strict=False)),
    ]
    names = [batch.names for batch in batches if batch.names is not None]
    return TokenBatch(
        torch.cat([batch.tokens for batch in batches]),
        torch.cat([batch.segments for batch in batches]),
        torch.cat(seqlens),
        max(batch.max_length for batch in batches),
        names=torch.cat(names) if len(names) == len(batches) else None,
    )


class TaskData(RankData):
    """Loaders of a multitask training; evaluation is ranking's.

    Args:
        options: As RankData.
        heads: The auxiliary heads.
        tasks: The probing task of each.
        poolings: What each reads.
        labels: How many labelled pairs.
        sampling: How often each task is trained on.
        max_epochs: Epochs of the whole training, for annealing; None: as many as `max_steps` need.
        max_steps: Steps of the whole training.
        named: As RankData.
    """

    def __init__(
        self, *options: Any, heads: Sequence[Head], tasks: Sequence[ProbeTask], poolings: Sequence[str], labels: TaskLabels,
        sampling: TaskSampling, max_epochs: int | None = None, max_steps: int = -1, **named: Any,
    ) -> None:  # fmt: skip
        super().__init__(*options, **named)
        self.heads, self.tasks, self.poolings = heads, tasks, poolings
        self.label_options, self.sampling, self.max_epochs, self.max_steps = labels, sampling, max_epochs, max_steps
        self._rows: tuple[Sequences, list[TaskRows]] | None = None

    def train_steps(self, rank: int = 0, world: int = 1) -> TrainSteps:
        """One device's training steps.

        Raises:
            ConfigError: As RankData; or an auxiliary row is larger than the token budget.
            DataError: Labels on queries that are evaluated on.
        """
        ranking = super().train_steps(rank, world)
        assert self.splits.train is not None
        if self._rows is None:
            self._rows = self._label(self.splits.train, ranking.collator)
        sequences, rows = self._rows
        longest = int(np.diff(sequences.starts).max(initial=0))
        if longest > self.batch.max_tokens:
            raise ConfigError(
                f"batch.max_tokens: expected at least {longest}, the tokens of the longest auxiliary row, got {self.batch.max_tokens}"
            )
        docs = self.batch.docs if self.splits.train.triples is None or self.teacher or self.negatives else 2
        plan = TaskPlan(ranking.plan, docs, tuple(map(len, rows)), self.sampling).until(self.max_epochs, self.max_steps)
        steps: Any = TaskSteps(plan, ranking.sampler, ranking.collator, sequences, rows, rank, world)
        return steps

    def _label(self, train: Collection, collator: Collator) -> tuple[Sequences, list[TaskRows]]:
        held_out = dict(self.splits.tests) | ({} if self.splits.val is None else {"val": self.splits.val})
        examples = label_tasks(train, self.tasks, self.label_options, held_out, self.seed, self.cache_dir)
        return to_rows(
            self.heads, self.tasks, examples, self.poolings, self.tokenizer, collator.max_pair_tokens,
            collator.max_query_tokens, collator.max_doc_tokens,
        )  # fmt: skip
