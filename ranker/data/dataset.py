"""What the loaders yield: one optimizer step per training item, one scoring batch per evaluation item."""

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

from ranker.data.batching import Collator, StepPlan, fill
from ranker.data.collection import Candidates, Collection
from ranker.data.contrast import KnownPositives, contrast
from ranker.data.sampling import GroupSampler, digest
from ranker.errors import CheckpointError
from ranker.types import Movable, RankBatch, Run, TrainStep


class TrainSteps(Dataset[TrainStep]):
    """This device's part of each optimizer step, by (epoch, step); every worker and device works out the same cut by itself."""

    def __init__(
        self,
        plan: StepPlan,
        sampler: GroupSampler,
        collator: Collator,
        rank: int,
        world: int,
        positives: KnownPositives | None = None,
    ) -> None:
        self.plan, self.sampler, self.collator, self.rank, self.world = plan, sampler, collator, rank, world
        self.positives = positives  # given: the groups of a step take each other's docs as negatives

    def __getitem__(self, key: tuple[int, int]) -> TrainStep:
        epoch, index = key
        groups = self.plan.groups(epoch, index)
        doc_rows, labels = self.sampler.draw(epoch, groups)
        query_rows = self.sampler.query_rows[groups]
        sizes = self.collator.group_sizes(query_rows, doc_rows)
        cut = self.plan.cut(sizes.tolist(), self.rank, self.world)
        micro_batches = tuple(
            self.collator.collate(
                query_rows[part], doc_rows[part], labels[part], np.asarray(part), len(part) / len(groups)
            )
            for part in cut
        )
        whole = (
            contrast(self.collator, query_rows, doc_rows, labels, self.positives)
            if self.positives is not None
            else None
        )
        return TrainStep(epoch, index, micro_batches, len(groups), int((doc_rows >= 0).sum()), whole)


class StepLoader:
    """Training steps in order, resumable in the middle of an epoch.

    `done` counts the steps handed out in this process, never those that workers have prefetched; the length is the
    whole epoch. Lightning saves and loads the state by itself, and calls `set_epoch` on `.sampler` after `iter()`, so
    `__iter__` must be lazy.

    Args:
        steps: The steps.
        workers: Worker processes that collate ahead; 0 collates here. The data is the same for any number.
        pin_memory: Whether to copy batches into page-locked memory.
    """

    def __init__(self, steps: TrainSteps, workers: int = 0, pin_memory: bool = False) -> None:
        self.steps, self.workers, self.pin_memory = steps, workers, pin_memory
        self.epoch, self.done = 0, 0
        self.waited = 0.0  # seconds in which a training waited for its steps
        self.sampler = self

    def __len__(self) -> int:
        return len(self.steps.plan)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; the same epoch again changes nothing, so that a resumed one goes on where it stood."""
        if epoch != self.epoch:
            self.epoch, self.done = epoch, 0

    def __iter__(self) -> Iterator[TrainStep]:
        if self.done >= len(self):  # the epoch was complete when it was saved
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
        """The queries of a step, over all devices."""
        rows = self.steps.sampler.query_rows[self.steps.plan.groups(epoch, index)]
        return [query_id.decode() for query_id in self.steps.collator.queries.ids()[rows]]

    @cached_property
    def _source(self) -> dict[str, int | str]:
        """What the steps are drawn from; the same on every device and layout."""
        collator, sampler = self.steps.collator, self.steps.sampler
        texts = f"{collator.queries.meta['texts']} {collator.docs.meta['texts']}".encode()
        return {"seed": self.steps.plan.seed, "steps": len(self), "data": digest(texts, sampler.fingerprint().encode())}

    def state_dict(self) -> dict[str, int | str]:
        """Where the training stands, and in which data; the same on every device and layout."""
        return {"epoch": self.epoch, "done": self.done, **self._source}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where a saved training stood.

        Raises:
            CheckpointError: It was trained with another seed, other steps or other data: the rest of its epoch is not
                here.
        """
        names = {"seed": "seed", "steps": "steps an epoch", "data": "a fingerprint of queries, docs and candidates"}
        others = [
            f"{names[key]} {own!r}, not {state[key]!r}"
            for key, own in self._source.items()
            if state.get(key, own) != own
        ]
        if others:
            raise CheckpointError(
                f"data: expected the training data of the run that is resumed, got other ({'; '.join(others)}); "
                "put its files back, or start a new run without resume=true"
            )
        self.epoch, self.done = state["epoch"], state["done"]


@dataclass
class ScoreBatch(Movable):
    """Candidates to score: `slots` [docs] says which candidate each real doc of `batch` is; -1 is a stand-in that counts for nothing."""

    batch: RankBatch
    slots: Tensor


class ScoreBatches(Dataset[ScoreBatch]):
    """A collection's candidates in batches under a token budget, this device's share of them; each candidate exactly once.

    Args:
        collection: Has candidates.
        depth: Candidates per query; None: all.
        collator: Makes the token batches.
        max_tokens: Token budget of a batch.
        rank: This device.
        world: Number of devices.
    """

    def __init__(
        self,
        collection: Collection,
        depth: int | None,
        collator: Collator,
        max_tokens: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        assert collection.candidates is not None
        self.collator, self.max_tokens = collator, max_tokens
        self.candidates = _cut(collection, depth)
        counts = np.diff(self.candidates.offsets)
        self.query_rows = np.repeat(collator.queries.rows(self.candidates.query_ids), counts)
        self.doc_rows = collator.docs.rows(self.candidates.doc_ids)
        self.num_slots = len(self.doc_rows)
        batches = self._pair_batches() if collator.reads == "pairs" else self._query_batches()
        mine = batches[rank::world]
        # a device without a batch would skip the evaluation loop and leave the others waiting: it scores one as a
        # stand-in
        self.stand_in = not mine and bool(batches)
        self.batches = mine or batches[:1]

    def _pair_batches(self) -> list[np.ndarray]:
        """Pairs in order of length, so that no row waits for a longer one where a batch has to be padded."""
        query_lengths = self.collator.query_lengths(self.query_rows)
        sizes = query_lengths + self.collator.doc_lengths(self.doc_rows, query_lengths) + self.collator.pair.num_special
        order = np.argsort(-sizes, kind="stable")
        return fill(order, sizes[order], self.max_tokens)

    def _query_batches(self) -> list[np.ndarray]:
        """Whole queries in order while they fit, a query with many docs by itself in parts."""
        query_lengths = self.collator.query_lengths(self.query_rows)
        sizes = self.collator.doc.row_lengths(self.collator.doc_lengths(self.doc_rows, query_lengths))
        first = np.zeros(self.num_slots, dtype=np.int64)
        starts = self.candidates.offsets[:-1][np.diff(self.candidates.offsets) > 0]
        first[starts] = self.collator.query.row_lengths(query_lengths[starts])
        return fill(np.arange(self.num_slots), sizes + first, self.max_tokens)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> ScoreBatch:
        slots = self.batches[index]
        if self.collator.reads == "pairs":
            query_rows, doc_rows, places = self.query_rows[slots], self.doc_rows[slots][:, None], slots
        else:
            owner = np.searchsorted(self.candidates.offsets, slots, side="right") - 1
            _, group = np.unique(owner, return_inverse=True)
            starts = np.flatnonzero(np.diff(group, prepend=-1))
            within = np.arange(len(slots)) - starts[group]
            doc_rows = np.full((len(starts), int(within.max()) + 1), -1, dtype=np.int64)
            doc_rows[group, within] = self.doc_rows[slots]
            query_rows, places = self.query_rows[slots[starts]], owner[starts]
        labels = np.zeros(doc_rows.shape, dtype=np.float32)
        batch = self.collator.collate(query_rows, doc_rows, labels, places, share=1.0)
        return ScoreBatch(batch, torch.from_numpy(np.full_like(slots, -1) if self.stand_in else slots.copy()))

    def run(self, scores: np.ndarray) -> Run:
        """Put the scores of all slots, float32 [slots], into a run."""
        ids, offsets = self.candidates.doc_ids, self.candidates.offsets
        return {
            query_id: dict(
                zip((doc_id.decode() for doc_id in ids[start:end]), scores[start:end].tolist(), strict=True)
            )
            for query_id, start, end in zip(self.candidates.query_ids, offsets[:-1], offsets[1:], strict=True)
            if end > start
        }  # fmt: skip


def _cut(collection: Collection, depth: int | None) -> Candidates:
    """The first `depth` candidates of each judged query that has a text; of every query where none is judged."""
    candidates = collection.candidates
    assert candidates is not None
    wanted = collection.qrels or collection.queries
    kept = [query_id for query_id in candidates.query_ids if query_id in wanted and query_id in collection.queries]
    parts = [(query_id, candidates.ids(query_id)[:depth], candidates.scores_of(query_id)[:depth]) for query_id in kept]
    ids = [part[1] for part in parts]
    return Candidates(
        kept,
        np.concatenate([[0], np.cumsum([len(part) for part in ids])]).astype(np.int64),
        np.concatenate(ids) if ids else np.array([], dtype="S1"),
        np.concatenate([part[2] for part in parts]) if parts else np.array([], dtype=np.float32),
    )
