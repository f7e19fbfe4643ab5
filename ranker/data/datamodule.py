"""The data of a run: it turns a source's splits into token stores, training steps and scoring batches."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from ranker.data.collate import Collator
from ranker.data.collection import Collection, Splits
from ranker.data.contrast import KnownPositives
from ranker.data.novelty import NovelGroups
from ranker.data.options import BatchOptions, TrainDocs
from ranker.data.refreshed import RefreshedSteps, Rounds
from ranker.data.row_groups import RowGroups
from ranker.data.sampling import GroupOptions, GroupSampler
from ranker.data.score_batches import ScoreBatches
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.step_plan import StepPlan
from ranker.data.text_stores import TextStores
from ranker.data.training_groups import sampler_of, takes_triples
from ranker.data.training_steps import StepLoader, TrainSteps
from ranker.data.triples import TripleGroups
from ranker.data.window_rows import check_room
from ranker.errors import ConfigError

log = logging.getLogger(__name__)


class RankData(pl.LightningDataModule):
    """Data loaders over the splits of one source.

    Args:
        splits: The source's splits, with candidates.
        inputs: The form of the batches that the scorer reads.
        batch_options: Sizes of steps and micro-batches.
        limits: Maximum text lengths in tokens.
        depth: Candidates per query that are re-ranked in validation and tests; None: all.
        seed: Seed of shuffles and draws.
        cache_dir: Folder of the token stores.
        train_docs: Sources of the docs and labels of training groups; None: the collection.

    Attributes:
        rounds: Mined negatives that replace the negatives of the data during the training; None: the data's negatives
            stay.
    """

    def __init__(
        self,
        splits: Splits,
        inputs: ScorerInputs,
        batch_options: BatchOptions,
        limits: TextLimits,
        depth: int | None = 100,
        seed: int = 0,
        cache_dir: str | Path = ".cache",
        train_docs: TrainDocs | None = None,
    ) -> None:
        super().__init__()
        longest_query = limits.query
        if inputs.instructed is not None:
            limits = replace(limits, query=limits.query + inputs.instructed.extra_tokens(inputs.tokenizer))
        check_room(inputs, limits)
        self.splits, self.inputs, self.batch_options, self.limits = splits, inputs, batch_options, limits
        self.depth, self.seed, self.cache_dir = depth, seed, Path(cache_dir)
        self.train_docs = train_docs or TrainDocs()
        self.rounds: Rounds | None = None
        self._stores = TextStores(inputs, limits, longest_query, self.cache_dir)
        self._samplers: dict[int, GroupSampler] = {}
        self._logged_budget = False

    def collator(self, collection: Collection) -> Collator:
        """Return the collator over a collection's token stores, which are opened, or built if they are missing."""
        queries, docs = self._stores.queries(collection), self._stores.docs(collection)
        return Collator.of(self.inputs, queries, docs, self.limits, self._stores.title_lengths(collection))

    # training
    # ------------------------------------------------------------------------------------------------------------------

    @property
    def trains_on_triples(self) -> bool:
        """Return whether training groups are the triples of the training set, with two docs each."""
        return self.splits.train is not None and takes_triples(self.splits.train, self.train_docs)

    def _sampler(self, collection: Collection, collator: Collator) -> GroupSampler:
        options = GroupOptions(
            self.batch_options.docs,
            self.batch_options.positives,
            self.batch_options.depth,
            self.seed,
            self.train_docs.random_negatives,
        )
        return sampler_of(collection, collator, options, self.train_docs, self.cache_dir)

    def train_steps(self, rank: int = 0, world: int = 1) -> TrainSteps:
        """Return one device's training steps.

        Args:
            rank: Number of the device.
            world: Number of devices.

        Raises:
            ConfigError: There is no training data, or a group may be larger than the token budget.
        """
        if self.splits.train is None:
            raise ConfigError(
                "data: expected a training set, got a source without one; use evaluate.py, or name training data"
            )
        collection = self.splits.train
        collator = self.collator(collection)
        if id(collection) not in self._samplers:
            self._samplers[id(collection)] = self._sampler(collection, collator)
            self._warn_of_few_groups(len(self._samplers[id(collection)]))
        sampler = self._samplers[id(collection)]
        docs = 2 if isinstance(sampler, TripleGroups) else self.batch_options.docs
        plan = StepPlan(
            len(sampler),
            self.batch_options.queries,
            self._budget(_largest_group(collator, docs), docs),
            self.seed,
            self.batch_options.min_micro_batches,
        )
        in_batch = self.train_docs.in_batch
        novelty = self.batch_options.novelty
        if novelty is not None:
            if isinstance(sampler, RowGroups) and collection.rows is not None and collection.rows.scores is not None:
                raise ConfigError(
                    "batch.novelty: expected null with rows that have a teacher's scores: a doc that repeats another "
                    "gets the label 0, which must be the lowest one, and a teacher's scores may be below 0; "
                    f"got {novelty}"
                )
            sampler = NovelGroups(sampler, collator.docs, novelty, collator.prefix_tokens[1])
        positives = KnownPositives.of(collection, collator.queries, collator.docs) if in_batch else None
        arguments = (plan, sampler, collator, rank, world, positives, self.train_docs.whole_step)
        return TrainSteps(*arguments) if self.rounds is None else RefreshedSteps(*arguments, rounds=self.rounds)

    def _budget(self, largest: int, docs: int) -> int:
        """Return the token budget of a micro-batch, at least `largest`: the tokens of the largest group."""
        budget = self.batch_options.max_tokens
        if largest <= budget:
            return budget
        if not self.batch_options.grows:
            raise ConfigError(
                f"batch.max_tokens: expected at least {largest}, the tokens of the largest possible group of {docs} "
                f"docs, got {budget}; raise it, or lower batch.docs or max_doc_tokens"
            )
        if not self._logged_budget:
            self._logged_budget = True
            rank_zero_only(log.info)(
                "batch.max_tokens: raised from %d to %d, the tokens of the largest possible group of %d docs; for less "
                "memory, lower batch.docs or max_doc_tokens",
                budget,
                largest,
                docs,
            )
        return largest

    def _warn_of_few_groups(self, num_groups: int) -> None:
        groups = min(num_groups, self.batch_options.queries)
        if self.batch_options.min_micro_batches > groups:
            rank_zero_only(log.warning)(
                "trainer.accumulate_grad_batches: a step has %d query groups, so it is split into %d micro-batches at "
                "most, not %d",
                groups,
                groups,
                self.batch_options.min_micro_batches,
            )

    def train_dataloader(self) -> StepLoader:
        """Return the loader of this device's steps; it can resume in the middle of an epoch."""
        assert self.trainer is not None
        steps = self.train_steps(self.trainer.global_rank, self.trainer.world_size)
        steps.never_idle = getattr(self.trainer.strategy, "never_idle", False)
        return StepLoader(
            steps, self.batch_options.workers, pin_memory=self.trainer.strategy.root_device.type == "cuda"
        )

    # evaluation
    # ------------------------------------------------------------------------------------------------------------------

    def score_batches(
        self, collection: Collection, rank: int = 0, world: int = 1, order: int | None = None
    ) -> ScoreBatches:
        """Return one device's share of a collection's candidates.

        Args:
            collection: A collection with candidates.
            rank: Number of the device.
            world: Number of devices.
            order: See `ScoreBatches`.
        """
        budget = self.batch_options.eval_max_tokens or self.batch_options.max_tokens
        return ScoreBatches(collection, self.depth, self.collator(collection), budget, rank, world, order)

    def _loader(self, collection: Collection) -> DataLoader[Any]:
        assert self.trainer is not None
        return DataLoader(
            self.score_batches(collection, self.trainer.global_rank, self.trainer.world_size),
            batch_size=None,
            num_workers=self.batch_options.workers,
            pin_memory=self.trainer.strategy.root_device.type == "cuda",
        )

    @property
    def val_sets(self) -> dict[str, Collection]:
        """Return the validation sets by name; a single set has the name "". Empty if there is none."""
        return self.splits.suite or ({"": self.splits.val} if self.splits.val is not None else {})

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Return the loader of each validation set's candidates, in the order of `val_sets`."""
        loaders = [self._loader(collection) for collection in self.val_sets.values()]
        return loaders[0] if len(loaders) == 1 else loaders

    def test_dataloader(self) -> list[DataLoader[Any]]:
        """Return the loader of each test set's candidates, in the order of `splits.tests`."""
        return [self._loader(collection) for collection in self.splits.tests.values()]


def _largest_group(collator: Collator, docs: int) -> int:
    """Return an upper bound of a group's tokens, from the longest query and the longest doc of the stores."""
    query = np.array(min(int(collator.queries.lengths.max(initial=0)), collator.max_query_tokens))
    doc = np.array(min(int(collator.docs.lengths.max(initial=0)), collator.max_doc_tokens))
    if collator.list_rows is not None:
        grid = np.ones((1, docs), dtype=bool)
        return int(collator.list_rows.tokens(query[None], np.full((1, docs), doc), grid)[0])
    if collator.reads != "pairs":
        return int(collator.query.row_lengths(query) + docs * collator.doc_sizes(doc, query))
    size = int(collator.doc_sizes(doc, query))
    return docs * (size if collator.windows is not None else min(size, collator.max_pair_tokens))
