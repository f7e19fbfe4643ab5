"""The items of data loaders: optimizer steps for training, and batches to score for evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ranker.data.collate import Collator
from ranker.data.collection import Candidates, Collection
from ranker.data.contrast import KnownPositives, contrast, own_docs
from ranker.data.ragged import ranges, row_offsets
from ranker.data.sampling import GroupSampler
from ranker.data.step_plan import StepPlan, fill
from ranker.errors import CheckpointError
from ranker.hashing import digest
from ranker.types import Contrast, Movable, RankBatch, Run, TrainStep


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


@dataclass
class ScoreBatch(Movable):
    """A batch of candidates to score.

    Args:
        batch: Token batches of the candidates.
        slots: Index of each real doc of `batch` among all candidates, int64 [docs]; -1: the doc's score is ignored.
    """

    batch: RankBatch
    slots: Tensor


class ScoreBatches(Dataset[ScoreBatch]):
    """This device's batches of a collection's candidates, within a token budget.

    Over all devices, each candidate is in exactly one batch.

    Args:
        collection: A collection with candidates.
        depth: Candidates per query; None: all.
        collator: Makes the token batches.
        max_tokens: Token budget of a batch.
        rank: Number of this device.
        world: Number of devices.
        order: Seed of a random order of each query's candidates, for a listwise model; None: the order of the
            candidates.
    """

    def __init__(
        self,
        collection: Collection,
        depth: int | None,
        collator: Collator,
        max_tokens: int,
        rank: int = 0,
        world: int = 1,
        order: int | None = None,
    ) -> None:
        assert collection.candidates is not None
        self.collator, self.max_tokens, self.order = collator, max_tokens, order
        self.candidates = top_candidates(collection, depth)
        counts = np.diff(self.candidates.offsets)
        self.query_rows = np.repeat(collator.queries.rows(self.candidates.query_ids), counts)
        self.doc_rows = collator.docs.rows(self.candidates.doc_ids)
        self.num_slots = len(self.doc_rows)
        if collator.whole_lists:
            batches = self._list_batches()
        else:
            batches = self._pair_batches() if collator.reads == "pairs" else self._query_batches()
        mine = batches[rank::world]
        # Without a batch, this device would skip the evaluation loop, while other devices wait in collective calls. So
        # this device scores a copy of the first batch, and these scores are ignored.
        self.stand_in = not mine and bool(batches)
        self.batches = mine or batches[:1]

    def _pair_batches(self) -> list[np.ndarray]:
        """Return batches of pairs: query by query, or sorted by length to keep padding small."""
        query_lengths = self.collator.query_lengths(self.query_rows)
        sizes = self.collator.doc_sizes(self.collator.doc_lengths(self.doc_rows, query_lengths), query_lengths)
        order = np.arange(len(sizes)) if self.collator.by_query else np.argsort(-sizes, kind="stable")
        return fill(order, sizes[order], self.max_tokens)

    def _query_batches(self) -> list[np.ndarray]:
        """Return batches of whole queries in order; a query over the budget fills several batches."""
        query_lengths = self.collator.query_lengths(self.query_rows)
        sizes = self.collator.doc_sizes(self.collator.doc_lengths(self.doc_rows, query_lengths), query_lengths)
        first = np.zeros(self.num_slots, dtype=np.int64)
        starts = self.candidates.offsets[:-1][np.diff(self.candidates.offsets) > 0]
        first[starts] = self.collator.query.row_lengths(query_lengths[starts])
        return fill(np.arange(self.num_slots), sizes + first, self.max_tokens)

    def _list_batches(self) -> list[np.ndarray]:
        """Return batches of whole queries in order; a query over the budget is a batch of its own."""
        counts = np.diff(self.candidates.offsets)
        lists = np.flatnonzero(counts)
        if not len(lists):
            return []
        sizes = np.array([self._list_tokens(number) for number in lists.tolist()])
        slots = np.split(np.arange(self.num_slots), self.candidates.offsets[lists[1:]])
        if self.order is not None:
            seed = self.order
            slots = [np.random.default_rng([seed, i]).permutation(of_list) for i, of_list in enumerate(slots)]
        return [
            np.concatenate([slots[number] for number in batch])
            for batch in fill(np.arange(len(lists)), sizes, self.max_tokens)
        ]

    def _list_tokens(self, number: int) -> int:
        start, end = self.candidates.offsets[number : number + 2]
        return int(self.collator.group_sizes(self.query_rows[start : start + 1], self.doc_rows[None, start:end])[0])

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> ScoreBatch:
        slots = self.batches[index]
        if self.collator.reads == "pairs" and not self.collator.whole_lists:
            query_rows, doc_rows, groups = self.query_rows[slots], self.doc_rows[slots][:, None], slots
        else:
            query_of_slot = np.searchsorted(self.candidates.offsets, slots, side="right") - 1
            _, row = np.unique(query_of_slot, return_inverse=True)
            starts = np.flatnonzero(np.diff(row, prepend=-1))
            column = np.arange(len(slots)) - starts[row]
            doc_rows = np.full((len(starts), int(column.max()) + 1), -1, dtype=np.int64)
            doc_rows[row, column] = self.doc_rows[slots]
            query_rows, groups = self.query_rows[slots[starts]], query_of_slot[starts]
        labels = np.zeros(doc_rows.shape, dtype=np.float32)
        batch = self.collator.collate(query_rows, doc_rows, labels, groups, share=1.0)
        return ScoreBatch(batch, torch.from_numpy(np.full_like(slots, -1) if self.stand_in else slots.copy()))

    def run(self, scores: np.ndarray) -> Run:
        """Return the run of the candidates with these scores, float32 [candidates]."""
        ids, offsets = self.candidates.doc_ids, self.candidates.offsets
        return {
            query_id: dict(
                zip((doc_id.decode() for doc_id in ids[start:end]), scores[start:end].tolist(), strict=True)
            )
            for query_id, start, end in zip(self.candidates.query_ids, offsets[:-1], offsets[1:], strict=True)
            if end > start
        }  # fmt: skip


def top_candidates(collection: Collection, depth: int | None) -> Candidates:
    """Return the candidates that are scored: the first `depth` of each judged query that has a text.

    If no query is judged, the candidates of every query are returned.

    Args:
        collection: A collection with candidates.
        depth: Candidates per query; None: all.
    """
    candidates = collection.candidates
    assert candidates is not None
    wanted = collection.qrels or collection.queries
    query_ids = candidates.query_ids
    kept = [i for i, query_id in enumerate(query_ids) if query_id in wanted and query_id in collection.queries]
    queries = np.array(kept, dtype=np.int64)
    counts = np.diff(candidates.offsets)[queries]
    if depth is not None:
        counts = np.minimum(counts, depth)
    flat = ranges(candidates.offsets[queries], counts)
    return Candidates(
        [query_ids[i] for i in kept], row_offsets(counts), candidates.doc_ids[flat], candidates.scores[flat]
    )
