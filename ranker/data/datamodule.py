"""The data side of a run: a source's splits -> token stores -> training steps and scoring batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from ranker.data.collate import Collator, ScorerInputs, TextLimits
from ranker.data.collection import Candidates, Collection, Splits
from ranker.data.contrast import KnownPositives
from ranker.data.dataset import ScoreBatches, StepLoader, TrainSteps
from ranker.data.instructions import refuse_instructions
from ranker.data.novelty import NovelGroups
from ranker.data.refreshed import RefreshedSteps, Rounds
from ranker.data.row_groups import RowGroups
from ranker.data.sampling import GroupOptions, GroupSampler, JudgedGroups, TripleGroups
from ranker.data.splits import check_candidates
from ranker.data.step_plan import StepPlan
from ranker.data.template import Affixes
from ranker.data.token_store import TokenStore, token_store
from ranker.data.trec import read_candidates, read_run
from ranker.data.triples import triple_rows
from ranker.data.window_rows import check_room
from ranker.errors import ConfigError, DataError
from ranker.hashing import fingerprint_texts
from ranker.types import Run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchOptions:
    """Sizes of optimizer steps and micro-batches.

    Args:
        queries: Query groups per optimizer step, over all devices.
        docs: Docs per group.
        max_tokens: Token budget of a micro-batch on one device.
        eval_max_tokens: Token budget of a scoring batch; None: `max_tokens`.
        positives: Relevant docs per group.
        depth: Negatives are drawn from this many top candidates.
        min_micro_batches: Smallest number of micro-batches per device and step (`trainer.accumulate_grad_batches`).
        workers: Worker processes that prefetch batches.
        grows: Whether a training raises `max_tokens` to the tokens of the largest group, where that is more.
        novelty: Docs that repeat a better one of their group to this extent have label 0 (`NovelGroups`); None: none.
    """

    queries: int = 32
    docs: int = 8
    max_tokens: int = 16384
    eval_max_tokens: int | None = None
    positives: int = 1
    depth: int = 100
    min_micro_batches: int = 1
    workers: int = 0
    grows: bool = False
    novelty: float | None = None


@dataclass(frozen=True)
class TrainDocs:
    """Sources of docs and labels for training groups that replace or extend the collection's candidates and judgements.

    Args:
        negatives: Path of a run of mined negatives, drawn in place of the candidates; None: the candidates.
        teacher: Path of a teacher's run whose scores are the labels; None: the judgements.
        random_negatives: Fill groups that have too few negatives with random docs of the corpus.
        in_batch: Whether a step's groups use each other's docs as negatives (`TrainStep.contrast`).
        whole_step: Whether steps have `contrast` without these negatives, too, for a loss over all texts of a step.
    """

    negatives: str | Path | None = None
    teacher: str | Path | None = None
    random_negatives: bool = False
    in_batch: bool = False
    whole_step: bool = False


class RankData(pl.LightningDataModule):
    """Data loaders over the splits of one source.

    Args:
        splits: The source's splits, with candidates.
        inputs: What the scorer reads.
        batch_options: Sizes of steps and micro-batches.
        limits: Maximum text lengths in tokens.
        depth: Candidates per query that are re-ranked in validation and tests; None: all.
        seed: Seed of shuffles and draws.
        cache_dir: Folder of the token stores.
        train_docs: Where the docs and labels of training groups come from.

    Attributes:
        rounds: Negatives that replace those of the data during the training; None: none do.
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
        train_docs: TrainDocs = TrainDocs(),
    ) -> None:
        super().__init__()
        self._longest_query = limits.query
        if inputs.instructed is not None:
            limits = replace(limits, query=limits.query + inputs.instructed.extra_tokens(inputs.tokenizer))
        check_room(inputs, limits)
        self.splits, self.inputs, self.batch_options, self.limits = splits, inputs, batch_options, limits
        self.depth, self.seed, self.cache_dir, self.train_docs = depth, seed, Path(cache_dir), train_docs
        self.rounds: Rounds | None = None
        self._stores: dict[str, TokenStore] = {}
        self._samplers: dict[int, GroupSampler] = {}
        self._logged_budget = False

    # token stores
    # -----------------------------------------------------------------------------------------------------------------

    def _doc_store(self, collection: Collection) -> TokenStore:
        docs = collection.docs
        return self._store(
            "docs",
            lambda: ((doc.doc_id, doc.full_text) for doc in docs),
            docs.fingerprint,
            self.limits.doc,
            self.inputs.affixes(1),
        )

    def _query_store(self, collection: Collection) -> TokenStore:
        queries, rows = collection.queries, collection.rows
        fingerprint = fingerprint_texts(queries.items()) if rows is None else rows.queries.fingerprint
        texts: Callable[[], Iterable[tuple[str, str]]] = queries.items
        instructed, instructions = self.inputs.instructed, collection.instructions
        if instructed is None:
            refuse_instructions({collection.name: collection})
        if instructed is not None:
            tokenizer, longest = self.inputs.tokenizer, self._longest_query
            given: Mapping[str, str] = {} if instructions is None else instructions
            fingerprint += f" with {instructed!r} {longest} {fingerprint_texts(given.items()) if rows is None else ''}"

            def texts() -> Iterable[tuple[str, str]]:
                for query_id, query in queries.items():
                    yield query_id, instructed.text(tokenizer, given.get(query_id, ""), query, longest)

        return self._store("queries", texts, fingerprint, self.limits.query, self.inputs.affixes(0))

    def _store(
        self,
        name: str,
        texts: Callable[[], Iterable[tuple[str, str]]],
        fingerprint: str,
        max_tokens: int,
        affixes: Affixes,
    ) -> TokenStore:
        """Open or build the store of some texts.

        If there are affixes, each text is tokenized with them, and these texts are stored separately from those
        without.
        """
        if affixes.prefix:
            fingerprint = f"{fingerprint} after {affixes.prefix!r}"
        if affixes.suffix:
            fingerprint = f"{fingerprint} before {affixes.suffix!r}"
        key = f"{name} {fingerprint}"
        if key not in self._stores:
            self._stores[key] = token_store(
                self.cache_dir,
                name,
                lambda: ((text_id, affixes.around(text)) for text_id, text in texts()),
                fingerprint,
                self.inputs.tokenizer,
                affixes.stored_tokens(max_tokens),
            )
        return self._stores[key]

    def _title_lengths(self, collection: Collection) -> np.ndarray | None:
        """Return the tokens of each doc's title in the order of the doc store, if windows repeat it."""
        windows, docs = self.inputs.windows, collection.docs
        if windows is None or not windows.title:
            return None

        def titles() -> Iterable[tuple[str, str]]:
            return ((doc.doc_id, doc.title) for doc in docs)

        return self._store("titles", titles, docs.fingerprint, windows.title, Affixes()).lengths

    def collator(self, collection: Collection) -> Collator:
        """Return the collator over a collection's token stores; builds the stores or opens them."""
        queries, docs = self._query_store(collection), self._doc_store(collection)
        return Collator.of(self.inputs, queries, docs, self.limits, self._title_lengths(collection))

    # training
    # ------------------------------------------------------------------------------------------------------------------

    @property
    def trains_on_triples(self) -> bool:
        """Whether training groups are the training set's triples, each with two docs."""
        train = self.splits.train
        return (
            train is not None
            and train.triples is not None
            and not self.train_docs.teacher
            and not self.train_docs.negatives
        )

    def _sampler(self, collection: Collection, collator: Collator) -> GroupSampler:
        if self.trains_on_triples:
            if self.batch_options.docs != 2 or self.batch_options.positives != 1:
                log.info(
                    "%s: a training group is a triple, one relevant doc and one other; batch.docs and batch.positives "
                    "don't apply",
                    collection.name,
                )
            return TripleGroups(triple_rows(collection, collator.queries, collator.docs, self.cache_dir))
        options = GroupOptions(
            self.batch_options.docs,
            self.batch_options.positives,
            self.batch_options.depth,
            self.seed,
            self.train_docs.random_negatives,
        )
        prompt_tokens = collator.prefix_tokens
        if collection.rows is not None and not self.train_docs.teacher and not self.train_docs.negatives:
            if collection.rows.scores is not None and self.train_docs.in_batch:
                raise ConfigError(
                    "model.in_batch_negatives: expected false with rows that have a teacher's scores, "
                    "which has none for other queries' docs"
                )
            return RowGroups(collection.rows, collator.queries, collator.docs, options, collection.alike, prompt_tokens)
        return JudgedGroups(
            collection,
            collator.queries,
            collator.docs,
            options,
            _read_negatives(self.train_docs.negatives, collection) if self.train_docs.negatives else None,
            _read_teacher(self.train_docs.teacher, collection) if self.train_docs.teacher else None,
            prompt_tokens,
        )

    def train_steps(self, rank: int = 0, world: int = 1) -> TrainSteps:
        """Return one device's training steps.

        Args:
            rank: Number of the device.
            world: Number of devices.

        Raises:
            ConfigError: No training data, or a group may be larger than the token budget.
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
                    "batch.novelty: expected null with rows that have a teacher's scores, which may be below 0, the "
                    f"label of a doc that repeats another; got {novelty}"
                )
            sampler = NovelGroups(sampler, collator.docs, novelty, collator.prefix_tokens[1])
        positives = KnownPositives.of(collection, collator.queries, collator.docs) if in_batch else None
        arguments = (plan, sampler, collator, rank, world, positives, self.train_docs.whole_step)
        return TrainSteps(*arguments) if self.rounds is None else RefreshedSteps(*arguments, rounds=self.rounds)

    def _budget(self, largest: int, docs: int) -> int:
        """Return the token budget of a micro-batch, which has room for the largest possible group of `docs` docs."""
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
                "batch.max_tokens: %d in place of %d, the tokens of the largest possible group of %d docs; for less "
                "memory lower batch.docs or max_doc_tokens",
                largest,
                budget,
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
        """The validation sets by name; a single one has the name "". Empty without a validation set."""
        return self.splits.suite or ({"": self.splits.val} if self.splits.val is not None else {})

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Return the loader of each validation set's candidates, in the order of `val_sets`."""
        loaders = [self._loader(collection) for collection in self.val_sets.values()]
        return loaders[0] if len(loaders) == 1 else loaders

    def test_dataloader(self) -> list[DataLoader[Any]]:
        """Return the loader of each test set's candidates, in the order of `splits.tests`."""
        return [self._loader(collection) for collection in self.splits.tests.values()]


def _read_negatives(path: str | Path, collection: Collection) -> Candidates:
    negatives = read_candidates(Path(path))
    check_candidates(replace(collection, candidates=negatives), str(path))
    return negatives


def _read_teacher(path: str | Path, collection: Collection) -> Run:
    teacher = read_run(Path(path), single=True)
    if not any(query_id in teacher for query_id in collection.qrels):
        raise DataError(
            f"{path}: expected a teacher's scores for the training queries (ids as "
            f"{next(iter(collection.qrels), None)!r}), got none (the run has ids as {next(iter(teacher), None)!r}); "
            "make it with evaluate.py split=train"
        )
    return teacher


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
