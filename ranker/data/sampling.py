"""Which docs a training group holds: a draw that depends on (seed, epoch, query) alone, never on workers, devices or history."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from ranker.data.collection import Candidates, Collection
from ranker.data.query_docs import same_text
from ranker.data.token_store import TokenStore
from ranker.errors import DataError
from ranker.types import Run

log = logging.getLogger(__name__)


class GroupSampler(Protocol):
    """Training groups, numbered from 0; each is one query and some docs."""

    query_rows: np.ndarray  # row of each group's query in the query store, integers [groups]

    def __len__(self) -> int: ...

    def draw(self, epoch: int, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return doc rows int64 [groups, docs] (-1 where a group has fewer docs) and labels float32 [groups, docs]."""
        ...

    def fingerprint(self) -> str:
        """Say from which groups is drawn, as rows of the token stores; the same data, the same text."""
        ...


def digest(*parts: bytes | np.ndarray) -> str:
    """A fingerprint of bytes and arrays.

    >>> digest(b"a", np.arange(3)) == digest(b"a", np.arange(3)), digest(b"a") == digest(b"b")
    (True, False)
    """
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def mix(*parts: int | np.ndarray) -> np.ndarray:
    """Hash integers to uniform uint64, elementwise (the finaliser of SplitMix64, Steele et al., 2014).

    >>> bool(mix(1, 2) == mix(1, 2)), bool(mix(1, 2) == mix(2, 1))
    (True, False)
    """
    with np.errstate(over="ignore"):
        state: Any = np.uint64(0)
        for part in parts:
            state = (
                state * np.uint64(0x9E3779B97F4A7C15)
                + np.asarray(part).astype(np.uint64)
                + np.uint64(0x632BE59BD9B4E019)
            )
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


@dataclass(frozen=True)
class _Pool:
    """Ragged doc rows with labels: group g has `rows[offsets[g]:offsets[g + 1]]`."""

    offsets: np.ndarray
    rows: np.ndarray
    labels: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[np.ndarray], labels: Sequence[np.ndarray]) -> _Pool:
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in rows])]).astype(np.int64)
        return cls(offsets, np.concatenate(rows).astype(np.int32), np.concatenate(labels).astype(np.float32))

    def draw(self, groups: np.ndarray, count: int, *seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw `count` docs of each group without replacement, rows [groups, count] (-1: the pool is smaller) and labels."""
        sizes = self.offsets[groups + 1] - self.offsets[groups]
        width = max(int(sizes.max(initial=0)), count)
        places = np.arange(width)
        real = places < sizes[:, None]
        keys = np.where(real, mix(*seed, groups[:, None], places[None, :]), np.uint64(2**64 - 1))
        chosen = (
            np.argpartition(keys, count - 1, axis=1)[:, :count]
            if count < width
            else np.broadcast_to(places, keys.shape)
        )
        chosen = np.take_along_axis(chosen, np.take_along_axis(keys, chosen, 1).argsort(1, kind="stable"), 1)
        kept = np.take_along_axis(real, chosen, 1)
        at = np.where(kept, self.offsets[groups][:, None] + chosen, 0)
        if not len(self.rows):
            return np.full(chosen.shape, -1, dtype=np.int64), np.zeros(chosen.shape, dtype=np.float32)
        return np.where(kept, self.rows[at].astype(np.int64), -1), np.where(kept, self.labels[at], np.float32(0.0))


class JudgedGroups:
    """One group per training query: relevant docs from the qrels, the others from the candidates.

    A doc whose grade reaches `collection.relevance` is never drawn as a negative; other judged docs may be, with their
    grade (if it is positive) as label. A doc with the query's own id or text is never a negative either. A group with
    fewer negatives than asked for stays smaller and is masked, nothing is repeated.

    Args:
        collection: Queries, qrels and candidates.
        queries: Token store of the queries.
        docs: Token store of the docs.
        num_docs: Docs per group.
        positives: Relevant docs per group; the rest are negatives.
        depth: Draw negatives from this many top candidates.
        seed: Seed of all draws.
        negatives: Mined negatives to draw from in place of the candidates.
        teacher: A teacher's run; only docs with a teacher's score are drawn, and the scores are the labels.
        random_negatives: Fill groups whose pool is too small with random docs of the corpus.
        starts: Tokens of a prompt before each query and each doc of the stores.

    Raises:
        DataError: No query has a relevant doc; or `random_negatives` is off and a query has no candidate that is not
            relevant, or no query has a given negative.
    """

    def __init__(
        self,
        collection: Collection,
        queries: TokenStore,
        docs: TokenStore,
        num_docs: int,
        positives: int = 1,
        depth: int = 100,
        seed: int = 0,
        negatives: Candidates | None = None,
        teacher: Run | None = None,
        random_negatives: bool = False,
        starts: tuple[int, int] = (0, 0),
    ) -> None:
        self.num_docs, self.positives, self.seed, self.random_negatives = num_docs, positives, seed, random_negatives
        self.corpus_size = len(docs)
        pool = negatives if negatives is not None else collection.candidates
        kept: list[str] = []
        bare = 0
        positive_ids, positive_labels, negative_ids, negative_labels = [], [], [], []
        for query_id, judged in collection.qrels.items():
            relevant = [
                doc_id
                for doc_id, grade in judged.items()
                if grade >= collection.relevance and doc_id in collection.docs
            ]
            taught = teacher.get(query_id, {}) if teacher is not None else None
            if taught is not None:
                relevant = [doc_id for doc_id in relevant if doc_id in taught]
            if not relevant:
                continue
            others = pool[query_id][:depth] if pool is not None and query_id in pool else []
            if taught is not None and pool is None:
                others = sorted(taught, key=lambda doc_id: (taught[doc_id], doc_id), reverse=True)[:depth]
            others = [
                doc_id
                for doc_id in others
                if judged.get(doc_id, 0) < collection.relevance
                and (taught is None or doc_id in taught)
                and doc_id != query_id
            ]
            if not others and not random_negatives:
                if (
                    negatives is not None or taught is not None
                ):  # mining finds none for some, and no random doc has a teacher's score
                    bare += 1
                    continue
                raise DataError(
                    f"{collection.name}: query {query_id!r}: expected at least one candidate that is not relevant, got none among "
                    f"{len(pool[query_id][:depth]) if pool is not None and query_id in pool else 0}; set data.random_negatives=true to fill from the corpus"
                )
            kept.append(query_id)
            positive_ids.append(relevant)
            negative_ids.append(others)
            label = (
                taught.__getitem__
                if taught is not None
                else lambda doc_id, judged=judged: max(float(judged.get(doc_id, 0)), 0.0)
            )
            positive_labels.append(np.array([label(doc_id) for doc_id in relevant], dtype=np.float32))
            negative_labels.append(np.array([label(doc_id) for doc_id in others], dtype=np.float32))
        query_rows, negative_rows = queries.rows(kept), _rows(docs, negative_ids)
        unlike = _not_own_text(queries, docs, query_rows, negative_rows, starts) if kept else []
        left = [group for group, part in enumerate(unlike) if part.any() or random_negatives]
        bare += len(kept) - len(left)
        kept, query_rows = [kept[group] for group in left], query_rows[left]
        positive_ids, positive_labels = (
            [positive_ids[group] for group in left],
            [positive_labels[group] for group in left],
        )
        negative_rows, negative_labels = (
            [part[group][unlike[group]] for group in left] for part in (negative_rows, negative_labels)
        )
        if not kept and bare:
            raise DataError(
                f"{collection.name}: expected a negative for at least one training query, got none for all {bare} that have a relevant doc; "
                "check that data.negatives and data.teacher were made for these queries, or set data.random_negatives=true"
            )
        if not kept:
            raise DataError(
                f"{collection.name}: expected training queries with a relevant doc, got none of {len(collection.qrels)}"
            )
        if len(kept) + bare < len(collection.qrels):
            log.warning("%s: %d of %d judged queries have no relevant doc to learn from and are left out",
                        collection.name, len(collection.qrels) - len(kept) - bare, len(collection.qrels))  # fmt: skip
        if bare:
            log.warning(
                "%s: %d of %d judged queries have no negative among the given ones and are left out",
                collection.name,
                bare,
                len(collection.qrels),
            )
        self.query_ids = kept
        self.query_rows = query_rows
        self._own = partial(same_text, queries, docs, starts=starts)
        self._own_rows = docs.find(kept) if random_negatives else None  # docs with the queries' ids
        self._positives = _Pool.of(_rows(docs, positive_ids), positive_labels)
        self._negatives = _Pool.of(negative_rows, negative_labels)

    def __len__(self) -> int:
        return len(self.query_rows)

    def draw(self, epoch: int, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return doc rows [groups, docs], relevant ones first, and labels."""
        first_rows, first_labels = self._positives.draw(groups, self.positives, self.seed, epoch, 1)
        other_rows, other_labels = self._negatives.draw(groups, self.num_docs - self.positives, self.seed, epoch, 2)
        rows = np.concatenate(
            [first_rows[:, : self.positives], other_rows[:, : self.num_docs - self.positives]], axis=1
        )
        labels = np.concatenate(
            [first_labels[:, : self.positives], other_labels[:, : self.num_docs - self.positives]], axis=1
        )
        if self.random_negatives:
            self._fill(rows, epoch, groups)
        return rows, labels

    def fingerprint(self) -> str:
        """Of each query's relevant docs, its negatives and their labels."""
        pools = (self._positives, self._negatives)
        return digest(self.query_rows, *(part for pool in pools for part in (pool.offsets, pool.rows, pool.labels)))

    def _fill(self, rows: np.ndarray, epoch: int, groups: np.ndarray) -> None:
        """Put random docs of the corpus, not relevant, not the query itself and not there yet, into the empty places of `rows`."""
        assert self._own_rows is not None
        for i, place in zip(*np.nonzero(rows < 0), strict=True):
            group = int(groups[i])
            taken = set(rows[i].tolist()) | set(
                self._positives.rows[self._positives.offsets[group] : self._positives.offsets[group + 1]].tolist()
            )
            taken.add(int(self._own_rows[group]))
            for attempt in range(100):
                row = int(mix(self.seed, epoch, 3, group, int(place), attempt)) % self.corpus_size
                if row not in taken and not self._own(self.query_rows[group : group + 1], np.array([row]))[0]:
                    rows[i, place] = row
                    break


def _rows(store: TokenStore, ids: list[list[str]]) -> list[np.ndarray]:
    """Rows of ragged ids, looked up in one go."""
    flat = store.rows([doc_id for part in ids for doc_id in part])
    return np.split(flat, np.cumsum([len(part) for part in ids])[:-1])


def _not_own_text(
    queries: TokenStore, docs: TokenStore, query_rows: np.ndarray, doc_rows: list[np.ndarray], starts: tuple[int, int]
) -> list[np.ndarray]:  # fmt: skip
    """Which of each group's docs have another text than its query, bool [docs] each."""
    counts = [len(rows) for rows in doc_rows]
    own = same_text(queries, docs, np.repeat(query_rows, counts), np.concatenate(doc_rows), starts)
    return np.split(~own, np.cumsum(counts)[:-1])


class TripleGroups:
    """One group per training triple (query, more relevant doc, less relevant doc); nothing is drawn.

    Args:
        rows: Query row and the two docs' rows of each triple, int32 [triples, 3]; may be a mapped file.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self.query_rows, self._docs = rows[:, 0], rows[:, 1:]

    def __len__(self) -> int:
        return len(self.query_rows)

    def draw(self, epoch: int, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # noqa: ARG002 - a triple is the same in every epoch
        """Return the triples' doc rows [groups, 2] and labels 1, 0."""
        rows = self._docs[groups].astype(np.int64)
        return rows, np.tile(np.array([1.0, 0.0], dtype=np.float32), (len(groups), 1))

    def fingerprint(self) -> str:
        """Of the number of triples and ten thousand of them, evenly spaced: the file may be larger than the memory."""
        every = max(1, len(self) // 10_000)
        return f"{len(self)} {digest(self.query_rows[::every], self._docs[::every])}"
