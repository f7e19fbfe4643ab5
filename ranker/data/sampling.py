"""Which docs a training group holds.

A draw depends on (seed, epoch, group) alone, never on workers, devices or earlier draws.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from ranker.data.collection import Candidates, Collection
from ranker.data.query_docs import same_text
from ranker.data.ragged import row_offsets
from ranker.data.token_store import TokenStore
from ranker.errors import DataError
from ranker.hashing import digest, mix
from ranker.types import Run

log = logging.getLogger(__name__)

_ATTEMPTS = 100  # random docs that are tried for one free cell of a group


class GroupSampler(Protocol):
    """Training groups, numbered from 0; each is one query and some docs."""

    query_rows: np.ndarray  # row of each group's query in the query store, integers [groups]

    def __len__(self) -> int: ...

    def draw(self, epoch: int, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw the docs of some groups.

        Returns:
            Rows of the doc store, int64 [groups, docs], -1 where a group has fewer docs; and labels, float32
            [groups, docs].
        """
        ...

    def fingerprint(self) -> str:
        """Return a string that changes whenever the data that groups are drawn from changes."""
        ...


@dataclass(frozen=True)
class GroupOptions:
    """Size of a training group and where its docs are drawn from.

    Args:
        num_docs: Docs per group.
        positives: Relevant docs per group; the rest are negatives.
        depth: Negatives are drawn from this many top candidates.
        seed: Seed of all draws.
        random_negatives: Fill groups that have too few negatives with random docs of the corpus.
    """

    num_docs: int = 8
    positives: int = 1
    depth: int = 100
    seed: int = 0
    random_negatives: bool = False


@dataclass(frozen=True)
class Pool:
    """Docs to draw from, ragged: group g has `rows[starts[g]:starts[g] + sizes[g]]`, with their labels.

    Args:
        starts: int64 [groups].
        sizes: int64 [groups].
        rows: Rows of the doc store, int32 [docs]; may be a memory-mapped file that also has docs outside the pool.
        labels: Numbers [docs].
    """

    starts: np.ndarray
    sizes: np.ndarray
    rows: np.ndarray
    labels: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[np.ndarray], labels: Sequence[np.ndarray]) -> Pool:
        """Build from the rows and labels of each group."""
        sizes = np.array([len(part) for part in rows], dtype=np.int64)
        return cls(
            row_offsets(sizes)[:-1],
            sizes,
            np.concatenate(rows).astype(np.int32),
            np.concatenate(labels).astype(np.float32),
        )

    def group(self, group: int) -> np.ndarray:
        """Return the rows of a group."""
        return self.rows[self.starts[group] : self.starts[group] + self.sizes[group]]

    def draw(self, groups: np.ndarray, count: int, *seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw `count` docs of each group without replacement: the docs with the smallest hashes.

        Returns:
            Doc rows, int64 [groups, count], -1 where the pool is smaller; and labels, float32 [groups, count].
        """
        sizes = self.sizes[groups]
        width = max(int(sizes.max(initial=0)), count)
        positions = np.arange(width)
        mask = positions < sizes[:, None]
        keys = np.where(mask, mix(*seed, groups[:, None], positions[None, :]), np.uint64(2**64 - 1))
        if count < width:
            chosen = np.argpartition(keys, count - 1, axis=1)[:, :count]
        else:
            chosen = np.broadcast_to(positions, keys.shape)
        chosen = np.take_along_axis(chosen, np.take_along_axis(keys, chosen, 1).argsort(1, kind="stable"), 1)
        chosen_mask = np.take_along_axis(mask, chosen, 1)
        if not len(self.rows):
            return np.full(chosen.shape, -1, dtype=np.int64), np.zeros(chosen.shape, dtype=np.float32)
        flat = np.where(chosen_mask, self.starts[groups][:, None] + chosen, 0)
        rows = np.where(chosen_mask, self.rows[flat].astype(np.int64), -1)
        return rows, np.where(chosen_mask, self.labels[flat], 0).astype(np.float32)


@dataclass(frozen=True)
class _Group:
    """A query with its relevant docs and its negatives, by id, and their labels."""

    query_id: str
    positive_ids: list[str]
    negative_ids: list[str]
    label_of: Callable[[str], float]

    def labels(self, doc_ids: list[str]) -> np.ndarray:
        return np.array([self.label_of(doc_id) for doc_id in doc_ids], dtype=np.float32)


class PooledGroups(ABC):
    """Groups of docs from two pools: relevant docs, and negatives.

    Args:
        options: Size of a group and of its pools.
        query_rows: Row of each group's query, integers [groups].
        positives: Relevant docs of each group.
        negatives: Other docs of each group.
        corpus_size: Number of docs in the store.
        query_doc_rows: Row of the doc whose id is the query's own, -1 if there is none, integers [groups]. Only random
            negatives need it; None without them.

    Attributes:
        negatives: See above; other ones may be set.
        takes_other_negatives: Whether docs that are not in `negatives` would have a label.
    """

    takes_other_negatives = True

    def __init__(
        self,
        options: GroupOptions,
        query_rows: np.ndarray,
        positives: Pool,
        negatives: Pool,
        corpus_size: int,
        query_doc_rows: np.ndarray | None,
    ) -> None:
        self.options, self.query_rows, self.corpus_size = options, query_rows, corpus_size
        self._positives, self.negatives, self._query_doc_rows = positives, negatives, query_doc_rows

    def __len__(self) -> int:
        return len(self.query_rows)

    def draw(self, epoch: int, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw doc rows [groups, docs], relevant docs first, and their labels [groups, docs]; see `GroupSampler`."""
        options = self.options
        num_negatives = options.num_docs - options.positives
        positive_rows, positive_labels = self._positives.draw(groups, options.positives, options.seed, epoch, 1)
        negative_rows, negative_labels = self.negatives.draw(groups, num_negatives, options.seed, epoch, 2)
        rows = np.concatenate([positive_rows, self._usable(groups, negative_rows)], axis=1)
        if options.random_negatives:
            self._fill(rows, epoch, groups)
        return rows, np.concatenate([positive_labels, negative_labels], axis=1)

    def _usable(self, groups: np.ndarray, rows: np.ndarray) -> np.ndarray:  # noqa: ARG002
        """Return the drawn negatives [groups, docs], with -1 for those that may not be used."""
        return rows

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a string that changes whenever the data that groups are drawn from changes."""

    @abstractmethod
    def _has_query_text(self, query_rows: np.ndarray, doc_rows: np.ndarray) -> np.ndarray:
        """Return which docs have the text of their query, bool [pairs]."""

    def _fill(self, rows: np.ndarray, epoch: int, groups: np.ndarray) -> None:
        """Put random docs of the corpus into the free cells of `rows`, in place.

        Relevant docs, the query itself and docs that are already in the group are not used.
        """
        assert self._query_doc_rows is not None
        for i, slot in zip(*np.nonzero(rows < 0), strict=True):
            group = int(groups[i])
            excluded = {*rows[i].tolist(), *self._positives.group(group).tolist(), int(self._query_doc_rows[group])}
            for attempt in range(_ATTEMPTS):
                row = int(mix(self.options.seed, epoch, 3, group, int(slot), attempt)) % self.corpus_size
                query_row = self.query_rows[group : group + 1]
                if row not in excluded and not self._has_query_text(query_row, np.array([row]))[0]:
                    rows[i, slot] = row
                    break


class JudgedGroups(PooledGroups):
    """One group per training query: relevant docs from the qrels, negatives from the candidates.

    A doc whose grade reaches `collection.relevance` is never drawn as a negative. Other judged docs may be drawn as
    negatives; their label (without a teacher) is their grade, or 0 if the grade is negative. A doc with the query's own
    id or text is never a negative either. No doc is repeated: a group with too few negatives has free cells (row -1).

    Args:
        collection: Queries, qrels and candidates.
        queries: Token store of the queries.
        docs: Token store of the docs.
        options: Size of a group and of its pools.
        negatives: Mined negatives, drawn in place of the candidates.
        teacher: A teacher's run: only docs that it scores are drawn, and its scores are the labels.
        prompt_tokens: Number of prompt tokens that the stores hold before each query and before each doc.

    Raises:
        DataError: No query has a relevant doc. Without `random_negatives` there are two more cases: all queries with a
            relevant doc lack a negative; or one of them has none among its candidates, and neither `negatives` nor
            `teacher` is given. If one of these is given, queries without negatives are left out.
    """

    def __init__(
        self,
        collection: Collection,
        queries: TokenStore,
        docs: TokenStore,
        options: GroupOptions,
        negatives: Candidates | None = None,
        teacher: Run | None = None,
        prompt_tokens: tuple[int, int] = (0, 0),
    ) -> None:
        groups, num_without_negatives = _groups_of(collection, options, negatives, teacher)
        query_rows = queries.rows([group.query_id for group in groups])
        negative_rows = _rows(docs, [group.negative_ids for group in groups])
        allowed = _has_other_text(queries, docs, query_rows, negative_rows, prompt_tokens) if groups else []
        kept = [i for i, mask in enumerate(allowed) if mask.any() or options.random_negatives]
        num_without_negatives += len(groups) - len(kept)
        _check_number(collection, len(kept), num_without_negatives)

        kept_groups = [groups[i] for i in kept]
        self.query_ids = [group.query_id for group in kept_groups]
        self._stores, self._prompt_tokens = (queries, docs), prompt_tokens
        self.takes_other_negatives = teacher is None
        super().__init__(
            options,
            query_rows[kept],
            Pool.of(
                _rows(docs, [group.positive_ids for group in kept_groups]),
                [group.labels(group.positive_ids) for group in kept_groups],
            ),
            Pool.of(
                [negative_rows[i][allowed[i]] for i in kept],
                [groups[i].labels(groups[i].negative_ids)[allowed[i]] for i in kept],
            ),
            len(docs),
            # docs with the queries' own ids, -1 where there is none
            docs.find(self.query_ids) if options.random_negatives else None,
        )

    def fingerprint(self) -> str:
        """Return a hash of each query's relevant docs, its negatives and their labels."""
        pools = (self._positives, self.negatives)
        parts = [part for pool in pools for part in (row_offsets(pool.sizes), pool.rows, pool.labels)]
        return digest(self.query_rows, *parts)

    def _has_query_text(self, query_rows: np.ndarray, doc_rows: np.ndarray) -> np.ndarray:
        return same_text(*self._stores, query_rows, doc_rows, self._prompt_tokens)


def _groups_of(
    collection: Collection, options: GroupOptions, negatives: Candidates | None, teacher: Run | None
) -> tuple[list[_Group], int]:
    """Select the docs of each judged query.

    Returns:
        Groups of the queries that have a relevant doc and a negative (or random negatives); and the number of queries
        that have a relevant doc but no negative.

    Raises:
        DataError: A query has no negative among the collection's candidates.
    """
    pool = negatives if negatives is not None else collection.candidates
    groups: list[_Group] = []
    num_without_negatives = 0
    for query_id, judged in collection.qrels.items():
        teacher_scores = teacher.get(query_id, {}) if teacher is not None else None
        positive_ids = [
            doc_id
            for doc_id, grade in judged.items()
            if grade >= collection.relevance
            and doc_id in collection.docs
            and (teacher_scores is None or doc_id in teacher_scores)
        ]
        if not positive_ids:
            continue
        top = pool[query_id][: options.depth] if pool is not None and query_id in pool else []
        if teacher_scores is not None and pool is None:
            scores = teacher_scores
            top = sorted(scores, key=lambda doc_id: (scores[doc_id], doc_id), reverse=True)[: options.depth]
        negative_ids = [
            doc_id
            for doc_id in top
            if judged.get(doc_id, 0) < collection.relevance
            and (teacher_scores is None or doc_id in teacher_scores)
            and doc_id != query_id
        ]
        if not negative_ids and not options.random_negatives:
            # Leave the query out: mining may find no negative for it, and with a teacher the advice below would not
            # help, since random docs have no teacher's score.
            if negatives is not None or teacher_scores is not None:
                num_without_negatives += 1
                continue
            raise DataError(
                f"{collection.name}: query {query_id!r}: expected at least one candidate that is not relevant, got "
                f"none among the top {len(top)} candidates; set data.random_negatives=true to fill from the corpus"
            )
        label_of = teacher_scores.__getitem__ if teacher_scores is not None else partial(_grade_label, judged)
        groups.append(_Group(query_id, positive_ids, negative_ids, label_of))
    return groups, num_without_negatives


def _grade_label(judged: dict[str, int], doc_id: str) -> float:
    return max(float(judged.get(doc_id, 0)), 0.0)


def _check_number(collection: Collection, num_kept: int, num_without_negatives: int) -> None:
    """Warn of judged queries that are left out; refuse a training set in which none is left."""
    num_judged = len(collection.qrels)
    if not num_kept and num_without_negatives:
        raise DataError(
            f"{collection.name}: expected a negative for at least one training query, got none for all "
            f"{num_without_negatives} that have a relevant doc; check that data.negatives and data.teacher were made "
            "for these queries, or set data.random_negatives=true"
        )
    if not num_kept:
        raise DataError(f"{collection.name}: expected training queries with a relevant doc, got none of {num_judged}")
    num_without_positives = num_judged - num_kept - num_without_negatives
    for number, lacking in (
        (num_without_positives, "relevant doc to learn from"),
        (num_without_negatives, "usable negative"),
    ):
        if number:
            log.warning(
                "%s: %d of %d judged queries have no %s and are left out", collection.name, number, num_judged, lacking
            )


def _rows(store: TokenStore, ids: list[list[str]]) -> list[np.ndarray]:
    """Store rows of each list of ids, all looked up in one call."""
    flat = store.rows([doc_id for part in ids for doc_id in part])
    return np.split(flat, np.cumsum([len(part) for part in ids])[:-1])


def _has_other_text(
    queries: TokenStore,
    docs: TokenStore,
    query_rows: np.ndarray,
    doc_rows: list[np.ndarray],
    prompt_tokens: tuple[int, int],
) -> list[np.ndarray]:
    """Return which of each group's docs differ from its query in text, one bool [docs] per group."""
    counts = [len(rows) for rows in doc_rows]
    same = same_text(queries, docs, np.repeat(query_rows, counts), np.concatenate(doc_rows), prompt_tokens)
    return np.split(~same, np.cumsum(counts)[:-1])


class TripleGroups:
    """One group per training triple (query, more relevant doc, less relevant doc); nothing is drawn.

    Args:
        rows: Query row and the two docs' rows of each triple, int32 [triples, 3]; may be a mapped file.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self.query_rows, self._docs = rows[:, 0], rows[:, 1:]

    def __len__(self) -> int:
        return len(self.query_rows)

    def draw(self, epoch: int, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # noqa: ARG002
        """Return the triples' doc rows [groups, 2] and labels 1, 0; a triple is the same in every epoch."""
        rows = self._docs[groups].astype(np.int64)
        return rows, np.tile(np.array([1.0, 0.0], dtype=np.float32), (len(groups), 1))

    def fingerprint(self) -> str:
        """Return the number of triples and a hash of every n-th triple.

        n is the number of triples divided by 10,000, rounded down, and at least 1. A large file is not hashed as a
        whole, because it may be larger than memory.
        """
        every = max(1, len(self) // 10_000)
        return f"{len(self)} {digest(self.query_rows[::every], self._docs[::every])}"
