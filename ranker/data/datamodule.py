"""The data side of a run: source -> candidates -> token stores -> steps and scoring batches."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from ranker.data.batching import Collator, StepPlan, Template
from ranker.data.collection import Collection, Splits
from ranker.data.contrast import KnownPositives
from ranker.data.dataset import ScoreBatches, StepLoader, TrainSteps
from ranker.data.sampling import GroupSampler, JudgedGroups, TripleGroups
from ranker.data.splits import check_candidates
from ranker.data.token_store import TokenStore, token_store
from ranker.data.trec import read_candidates, read_run
from ranker.data.triples import triple_rows
from ranker.errors import ConfigError, DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchOptions:
    """How much goes into an optimizer step and a micro-batch.

    Args:
        queries: Query groups per optimizer step, over all devices.
        docs: Docs per group.
        max_tokens: Token budget of a micro-batch on one device.
        eval_max_tokens: Token budget of a scoring batch; None takes `max_tokens`.
        positives: Relevant docs per group.
        depth: Negatives are drawn from this many top candidates.
        min_micro_batches: At least so many micro-batches per device and step (`trainer.accumulate_grad_batches`).
        workers: Worker processes that collate ahead.
    """

    queries: int = 32
    docs: int = 8
    max_tokens: int = 16384
    eval_max_tokens: int | None = None
    positives: int = 1
    depth: int = 100
    min_micro_batches: int = 1
    workers: int = 0


@dataclass(frozen=True)
class TextLimits:
    """Longest texts, in word pieces; special tokens count in `pair` only."""

    query: int = 64
    doc: int = 256
    pair: int | None = None


class RankData(pl.LightningDataModule):
    """Loaders over one source's splits.

    Args:
        splits: What the source gave, with candidates.
        tokenizer: The encoder's fast tokenizer.
        reads: What the scorer reads, `pairs` or `texts`.
        positions: Longest sequence that the encoder takes.
        batch: Step and micro-batch sizes.
        limits: Text lengths.
        depth: Candidates per query that are re-ranked; None: all.
        seed: Seed of shuffles and draws.
        cache_dir: Folder of the token stores.
        negatives: A run of mined negatives, or None.
        teacher: A teacher's run whose scores are the labels, or None.
        random_negatives: Fill too small groups from the corpus.
        layouts: The scorer's layouts of a query and of a doc by themselves; None: the tokenizer's.
        in_batch: Whether a step's groups take each other's docs as negatives (`TrainStep.contrast`).
    """

    def __init__(
        self,
        splits: Splits,
        tokenizer: Any,
        reads: str,
        positions: int,
        batch: BatchOptions,
        limits: TextLimits,
        depth: int | None = 100,
        seed: int = 0,
        cache_dir: str | Path = ".cache",
        negatives: str | Path | None = None,
        teacher: str | Path | None = None,
        random_negatives: bool = False,
        layouts: tuple[Template, Template] | None = None,
        in_batch: bool = False,
    ) -> None:
        super().__init__()
        self.splits, self.tokenizer, self.reads, self.positions = splits, tokenizer, reads, positions
        self.batch, self.limits, self.depth, self.seed = batch, limits, depth, seed
        self.cache_dir = Path(cache_dir)
        self.negatives, self.teacher, self.random_negatives = negatives, teacher, random_negatives
        self.layouts, self.in_batch = layouts, in_batch
        self._stores: dict[str, TokenStore] = {}
        self._samplers: dict[int, GroupSampler] = {}

    # token stores
    # -----------------------------------------------------------------------------------------------------------------

    def _doc_store(self, collection: Collection) -> TokenStore:
        docs = collection.docs
        layout = self.layouts[1] if self.layouts is not None else None
        return self._store(
            "docs", lambda: ((doc.doc_id, doc.full_text) for doc in docs), docs.fingerprint, self.limits.doc, layout
        )

    def _query_store(self, collection: Collection) -> TokenStore:
        layout = self.layouts[0] if self.layouts is not None else None
        return self._store(
            "queries",
            lambda: iter(collection.queries.items()),
            _queries_fingerprint(collection),
            self.limits.query,
            layout,
        )

    def _store(
        self,
        name: str,
        texts: Callable[[], Iterable[tuple[str, str]]],
        fingerprint: str,
        max_tokens: int,
        layout: Template | None,
    ) -> TokenStore:
        """The store of some texts; where the layout has a prefix it stands before each text, and the store is another one."""
        prefix = layout.prefix if layout is not None else ""
        if layout is not None and prefix:
            fingerprint, max_tokens = f"{fingerprint} after {prefix!r}", max_tokens + layout.prefix_tokens
        key = f"{name} {fingerprint}"
        if key not in self._stores:
            self._stores[key] = token_store(
                self.cache_dir,
                name,
                lambda: ((text_id, prefix + text) for text_id, text in texts()),
                fingerprint,
                self.tokenizer,
                max_tokens,
            )
        return self._stores[key]

    def collator(self, collection: Collection) -> Collator:
        """The collator over a collection's token stores; builds or opens them."""
        return Collator.of(
            self.tokenizer, self.reads, self._query_store(collection), self._doc_store(collection),
            self.positions, self.limits.query, self.limits.doc, self.limits.pair, self.layouts,
        )  # fmt: skip

    # training
    # ---------------------------------------------------------------------------------------------------------------------

    def _sampler(self, collection: Collection, collator: Collator) -> GroupSampler:
        if collection.triples is not None and self.teacher is None and self.negatives is None:
            if self.batch.docs != 2 or self.batch.positives != 1:
                log.info(
                    "%s: a training group is a triple, one relevant doc and one other; batch.docs and batch.positives don't apply",
                    collection.name,
                )
            return TripleGroups(triple_rows(collection, collator.queries, collator.docs, self.cache_dir))
        negatives = read_candidates(Path(self.negatives)) if self.negatives else None
        if negatives is not None:
            check_candidates(replace(collection, candidates=negatives), str(self.negatives))
        teacher = read_run(Path(self.teacher), single=True) if self.teacher else None
        if teacher is not None and not any(query_id in teacher for query_id in collection.qrels):
            raise DataError(
                f"{self.teacher}: expected a teacher's scores for the training queries (ids as {next(iter(collection.qrels), None)!r}), "
                f"got none (the run has ids as {next(iter(teacher), None)!r}); make it with evaluate.py split=train"
            )
        return JudgedGroups(
            collection,
            collator.queries,
            collator.docs,
            self.batch.docs,
            self.batch.positives,
            self.batch.depth,
            self.seed,
            negatives,
            teacher,
            self.random_negatives,
            (collator.query.prefix_tokens, collator.doc.prefix_tokens),
        )

    def train_steps(self, rank: int = 0, world: int = 1) -> TrainSteps:
        """One device's training steps.

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
            groups, parts = min(len(self._samplers[id(collection)]), self.batch.queries), self.batch.min_micro_batches
            if parts > groups:
                rank_zero_only(log.warning)(
                    "trainer.accumulate_grad_batches: a step has %d query groups, so it is cut into %d micro-batches at most, not %d",
                    groups,
                    groups,
                    parts,
                )
        sampler = self._samplers[id(collection)]
        docs = 2 if isinstance(sampler, TripleGroups) else self.batch.docs
        largest = _largest_group(collator, docs)
        if largest > self.batch.max_tokens:
            raise ConfigError(
                f"batch.max_tokens: expected at least {largest}, the tokens of the largest possible group of {docs} docs, "
                f"got {self.batch.max_tokens}; raise it, or lower batch.docs or max_doc_tokens"
            )
        plan = StepPlan(
            len(sampler), self.batch.queries, self.batch.max_tokens, self.seed, self.batch.min_micro_batches
        )
        positives = KnownPositives.of(collection, collator.queries, collator.docs) if self.in_batch else None
        return TrainSteps(plan, sampler, collator, rank, world, positives)

    def train_dataloader(self) -> StepLoader:
        """Steps of this device; resumable."""
        assert self.trainer is not None
        steps = self.train_steps(self.trainer.global_rank, self.trainer.world_size)
        return StepLoader(steps, self.batch.workers, pin_memory=self.trainer.strategy.root_device.type == "cuda")

    # evaluation
    # -------------------------------------------------------------------------------------------------------------------

    def score_batches(self, collection: Collection, rank: int = 0, world: int = 1) -> ScoreBatches:
        """One device's share of the candidates of a collection."""
        budget = self.batch.eval_max_tokens or self.batch.max_tokens
        return ScoreBatches(collection, self.depth, self.collator(collection), budget, rank, world)

    def _loader(self, collection: Collection) -> DataLoader[Any]:
        assert self.trainer is not None
        batches = self.score_batches(collection, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(
            batches,
            batch_size=None,
            num_workers=self.batch.workers,
            pin_memory=self.trainer.strategy.root_device.type == "cuda",
        )

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """The validation set's candidates, or nothing."""
        return self._loader(self.splits.val) if self.splits.val is not None else []

    def test_dataloader(self) -> list[DataLoader[Any]]:
        """Each test set's candidates, in the order of `splits.tests`."""
        return [self._loader(collection) for collection in self.splits.tests.values()]


def _queries_fingerprint(collection: Collection) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for item in collection.queries.items():
        digest.update(repr(item).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _largest_group(collator: Collator, docs: int) -> int:
    """Upper bound of a group's tokens, from the longest query and doc that the stores hold."""
    query = min(int(collator.queries.lengths.max(initial=0)), collator.max_query_tokens)
    doc = min(int(collator.docs.lengths.max(initial=0)), collator.max_doc_tokens)
    if collator.reads == "pairs":
        return docs * min(query + doc + collator.pair.num_special, collator.max_pair_tokens)
    return int(collator.query.row_lengths(np.array(query)) + docs * collator.doc.row_lengths(np.array(doc)))
