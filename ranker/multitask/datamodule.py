"""The data of a multitask training: ranking groups, and labelled rows of auxiliary tasks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranker.data.collate import Collator
from ranker.data.collection import Collection
from ranker.data.datamodule import RankData
from ranker.data.scorer_inputs import TextLimits
from ranker.data.training_steps import TrainSteps
from ranker.errors import ConfigError
from ranker.multitask.options import TaskLabels, TaskSampling
from ranker.multitask.rows import AuxiliaryTask, TaskRows, label_tasks, to_rows
from ranker.multitask.sampling import TaskPlan
from ranker.multitask.steps import TaskSteps
from ranker.probing.sequences import Sequences


class TaskData(RankData):
    """Data loaders of a multitask training; validation and tests are for ranking only.

    Args:
        ranking: The ranking data; its options are used for all tasks.
        tasks: The auxiliary tasks, with their heads.
        labels: Options of the labelled pairs.
        sampling: How often each task is trained on.
        max_epochs: Number of epochs of the whole training, for annealing; None: as many as `max_steps` need.
        max_steps: Number of steps of the whole training; -1: no limit.
    """

    def __init__(
        self,
        ranking: RankData,
        tasks: Sequence[AuxiliaryTask],
        labels: TaskLabels,
        sampling: TaskSampling,
        max_epochs: int | None = None,
        max_steps: int = -1,
    ) -> None:
        super().__init__(
            ranking.splits,
            ranking.inputs,
            ranking.batch_options,
            ranking.limits,
            ranking.depth,
            ranking.seed,
            ranking.cache_dir,
            ranking.train_docs,
        )
        self.tasks, self.label_options, self.sampling = tasks, labels, sampling
        self.max_epochs, self.max_steps = max_epochs, max_steps
        self._rows: tuple[Sequences, list[TaskRows]] | None = None

    def train_steps(self, rank: int = 0, world: int = 1) -> TrainSteps:
        """Return one device's training steps.

        Raises:
            ConfigError: See `RankData.train_steps`; or an auxiliary row is larger than the token budget.
            DataError: A labelled query is in the validation set or a test set.
        """
        ranking = super().train_steps(rank, world)
        assert self.splits.train is not None
        if self._rows is None:
            self._rows = self._label(self.splits.train, ranking.collator)
        sequences, rows = self._rows
        longest = int(np.diff(sequences.starts).max(initial=0))
        if longest > self.batch_options.max_tokens:
            raise ConfigError(
                f"batch.max_tokens: expected at least {longest}, the tokens of the longest auxiliary row, "
                f"got {self.batch_options.max_tokens}"
            )
        docs = 2 if self.trains_on_triples else self.batch_options.docs
        plan = TaskPlan(ranking.plan, docs, tuple(map(len, rows)), self.sampling).until(self.max_epochs, self.max_steps)
        return TaskSteps(plan, ranking.sampler, ranking.collator, sequences, rows, rank, world)

    def _label(self, train: Collection, collator: Collator) -> tuple[Sequences, list[TaskRows]]:
        held_out = dict(self.splits.tests) | ({} if self.splits.val is None else {"val": self.splits.val})
        tasks = [task.task for task in self.tasks]
        examples = label_tasks(train, tasks, self.label_options, held_out, self.seed, self.cache_dir)
        limits = TextLimits(collator.max_query_tokens, collator.max_doc_tokens, collator.max_pair_tokens)
        return to_rows(self.tasks, examples, self.inputs.tokenizer, limits)
