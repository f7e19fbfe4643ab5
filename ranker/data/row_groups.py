"""Draw training groups of a set of rows from memory-mapped arrays, so that memory does not grow with the pairs."""

from __future__ import annotations

import logging

import numpy as np

from ranker.data.query_docs import same_text
from ranker.data.row_pairs import RowSet
from ranker.data.sampling import GroupOptions, Pool, PooledGroups
from ranker.data.token_store import TokenStore
from ranker.errors import ConfigError, DataError
from ranker.hashing import digest

log = logging.getLogger(__name__)


class RowGroups(PooledGroups):
    """One group per query of the rows.

    If rows have grades, or positives and negatives, a group has `options.positives` relevant docs. The other docs of
    the group are drawn from the first `options.depth` docs of the query that are not relevant, ordered by score if
    there are scores. If rows have scores only, or with `alike`, a group has `options.num_docs` docs of the query with
    any grade. Labels are the scores if rows have scores, else the grades, with 0 for a negative grade.

    Args:
        rows: The rows' pairs.
        queries: Token store of the queries, in the order of `rows.queries`.
        docs: Token store of the docs, in the order of the rows' table.
        options: Size of a group.
        alike: Whether docs are drawn without regard to their grade; None: true if the rows have scores only.
        prompt_tokens: Number of prompt tokens before each query and before each doc of the stores.

    Raises:
        ConfigError: `options.random_negatives` is set, but the labels are a teacher's scores, which random docs do not
            have.
        DataError: No query has both a relevant doc and another doc; or, if docs are drawn alike, no query has a doc.
    """

    def __init__(
        self,
        rows: RowSet,
        queries: TokenStore,
        docs: TokenStore,
        options: GroupOptions,
        alike: bool | None = None,
        prompt_tokens: tuple[int, int] = (0, 0),
    ) -> None:
        assert len(queries) == len(rows) and len(docs) == len(rows.table)
        if rows.scores is not None and options.random_negatives:
            raise ConfigError(
                "data.random_negatives: expected false with rows that have a teacher's scores, since random docs have "
                "no score"
            )
        self._rows, self._stores, self._prompt_tokens = rows, (queries, docs), prompt_tokens
        self._alike = not rows.judged if alike is None else alike
        self.takes_other_negatives = rows.scores is None and not self._alike
        sizes, num_positives = rows.sizes.astype(np.int64), rows.positives.astype(np.int64)
        labels = rows.scores if rows.scores is not None else rows.grades
        if self._alike:
            kept = np.arange(len(rows))
            positives = Pool(rows.starts, np.minimum(sizes, options.depth), rows.docs, labels)
            negatives = Pool(rows.starts, np.zeros_like(sizes), rows.docs, labels)
        else:
            has_others = (sizes > num_positives) | options.random_negatives | (options.positives >= options.num_docs)
            kept = np.flatnonzero((num_positives > 0) & has_others)
            _warn(len(rows), int((num_positives == 0).sum()), len(kept))
            starts, num_positives = rows.starts[kept], num_positives[kept]
            num_others = np.minimum(sizes[kept] - num_positives, options.depth)
            positives = Pool(starts, num_positives, rows.docs, labels)
            negatives = Pool(starts + num_positives, num_others, rows.docs, labels)
        query_doc_rows = docs.find(queries.ids()[kept]) if options.random_negatives else None
        super().__init__(options, kept, positives, negatives, len(docs), query_doc_rows)

    def draw(self, epoch: int, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw doc rows [groups, docs] and their labels [groups, docs]; see `GroupSampler`."""
        if self._alike:
            return self._positives.draw(groups, self.options.num_docs, self.options.seed, epoch, 1)
        rows, labels = super().draw(epoch, groups)
        return rows, labels if self._rows.scores is not None else np.maximum(labels, np.float32(0.0))

    def fingerprint(self) -> str:
        """Return the number of pairs and a hash of queries, sizes and every n-th pair (n as in `TripleGroups`)."""
        rows = self._rows
        every = max(1, len(rows.docs) // 10_000)
        pairs = [part[::every] for part in (rows.docs, rows.grades, rows.scores) if part is not None]
        hashed = digest(self.query_rows, np.asarray(rows.sizes), np.asarray(rows.positives), *pairs)
        return f"{len(rows.docs)} {self._alike} {self.options.depth} {hashed}"

    def _usable(self, groups: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Remove negatives that have the text of their query."""
        group, column = np.nonzero(rows >= 0)
        chosen = rows[group, column]
        same = same_text(*self._stores, self.query_rows[groups][group], chosen, self._prompt_tokens)
        if same.any():
            rows = rows.copy()
            rows[group[same], column[same]] = -1
        return rows

    def _has_query_text(self, query_rows: np.ndarray, doc_rows: np.ndarray) -> np.ndarray:
        return same_text(*self._stores, query_rows, doc_rows, self._prompt_tokens)


def _warn(num_queries: int, num_without_positives: int, num_kept: int) -> None:
    without_others = num_queries - num_kept - num_without_positives
    if not num_kept:
        raise DataError(
            f"train: expected queries with a relevant doc and another one, got none of {num_queries} "
            f"({num_without_positives} have no relevant doc); add rows, lower data.relevance, or set data.alike=true "
            "for a loss that judges each doc on its own"
        )
    for number, lacking in ((num_without_positives, "relevant doc"), (without_others, "doc that is not relevant")):
        if number:
            log.warning(
                "train: %d of %d queries have no %s and are left out; data.alike=true draws docs whatever their grade",
                number,
                num_queries,
                lacking,
            )
