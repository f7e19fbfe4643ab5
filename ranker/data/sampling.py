"""Draw the docs of training groups.

A draw depends on (seed, epoch, group) alone, never on workers, devices or earlier draws.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ranker.data.ragged import row_offsets
from ranker.hashing import mix

_ATTEMPTS = 100  # largest number of random docs that are tried for an empty cell of a group


class GroupSampler(Protocol):
    """Training groups, numbered from 0; a group is a query and some docs."""

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
    """Size of a training group, and the pools of its docs.

    Args:
        num_docs: Number of docs per group.
        positives: Number of relevant docs per group; all other docs are negatives.
        depth: Negatives are drawn from this many top candidates.
        seed: Seed of all draws.
        random_negatives: Whether groups with too few negatives are filled with random docs of the corpus.
    """

    num_docs: int = 8
    positives: int = 1
    depth: int = 100
    seed: int = 0
    random_negatives: bool = False


@dataclass(frozen=True)
class Pool:
    """A pool of docs for each group: group g has the docs `rows[starts[g]:starts[g] + sizes[g]]`, with labels.

    Args:
        starts: int64 [groups].
        sizes: int64 [groups].
        rows: Rows of the doc store, int32 [docs]. It may be a memory-mapped file, with docs that no group has.
        labels: Label of each doc [docs].
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
            Doc rows, int64 [groups, count], with -1 if the pool is smaller; and labels, float32 [groups, count].
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


class PooledGroups(ABC):
    """Groups whose docs come from two pools: relevant docs and negatives.

    Args:
        options: Size of a group and of its pools.
        query_rows: Row of each group's query, integers [groups].
        positives: Relevant docs of each group.
        negatives: Other docs of each group.
        corpus_size: Number of docs in the store.
        query_doc_rows: Row of the doc with the same id as the query, or -1 if there is no such doc, integers [groups].
            In some collections (ArguAna, Quora), queries are also docs. May be None if there are no random negatives.

    Attributes:
        negatives: See above. The attribute may be set to replace the negatives.
        takes_other_negatives: Whether `negatives` may be replaced by any other docs; false if other docs would have no
            label, such as a teacher's score.
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
        """Return the drawn negatives [groups, docs], with -1 for docs that may not be used."""
        return rows

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a string that changes whenever the data that groups are drawn from changes."""

    @abstractmethod
    def _has_query_text(self, query_rows: np.ndarray, doc_rows: np.ndarray) -> np.ndarray:
        """Return which docs have the text of their query, bool [pairs]."""

    def _fill(self, rows: np.ndarray, epoch: int, groups: np.ndarray) -> None:
        """Put random docs of the corpus into the empty cells of `rows`, in place.

        Relevant docs, docs of the group, and the doc with the same id as the query are not used.
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
