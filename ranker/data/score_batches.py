"""The items of an evaluation's loader: batches of candidates to score."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ranker.data.collate import Collator
from ranker.data.collection import Candidates, Collection
from ranker.data.ragged import ranges, row_offsets
from ranker.data.step_plan import fill
from ranker.types import Movable, RankBatch, Run


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
