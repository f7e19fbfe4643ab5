"""Make training groups with relevant docs from the qrels and negatives from the candidates."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from ranker.data.collection import Candidates, Collection
from ranker.data.query_docs import same_text
from ranker.data.ragged import row_offsets
from ranker.data.sampling import GroupOptions, Pool, PooledGroups
from ranker.data.token_store import TokenStore
from ranker.errors import DataError
from ranker.hashing import digest
from ranker.types import Run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Group:
    """A query with the ids of its relevant docs and negatives, and their labels."""

    query_id: str
    positive_ids: list[str]
    negative_ids: list[str]
    label_of: Callable[[str], float]

    def labels(self, doc_ids: list[str]) -> np.ndarray:
        return np.array([self.label_of(doc_id) for doc_id in doc_ids], dtype=np.float32)


class JudgedGroups(PooledGroups):
    """One group per training query: relevant docs from the qrels, negatives from the candidates.

    A doc is never drawn as a negative if its grade reaches `collection.relevance`, or if it has the query's own id or
    text. Other judged docs may be drawn as negatives; without a teacher, their label is their grade, or 0 if the grade
    is negative. No doc is repeated: a group with too few negatives has empty cells (row -1).

    Args:
        collection: Queries, qrels and candidates.
        queries: Token store of the queries.
        docs: Token store of the docs.
        options: Size of a group and of its pools.
        negatives: Mined negatives, drawn in place of the candidates.
        teacher: A teacher's run; its scores are the labels, and only docs with a score are drawn.
        prompt_tokens: Number of prompt tokens that the stores hold before each query and before each doc.

    Raises:
        DataError: No query has a relevant doc. Without `random_negatives`, two more cases are errors: no query with a
            relevant doc has a negative; or `negatives` and `teacher` are None, and some query with a relevant doc has
            no negative among its candidates. With `negatives` or `teacher`, queries without negatives are left out.
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
            # docs with the queries' own ids; -1 if there is no such doc
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
    """Select the relevant docs and negatives of each judged query.

    Returns:
        The groups of queries that have a relevant doc and a negative (or random negatives); and the number of queries
        with a relevant doc but without a negative.

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
            # Leave the query out. Mining may find no negative for a query, and with a teacher the advice of the error
            # below would not help, because random docs have no teacher's score.
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
    """Warn of judged queries that are left out; raise an error for a training set without any query."""
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
    """Return the store rows of each list of ids; one call looks up all ids."""
    flat = store.rows([doc_id for part in ids for doc_id in part])
    return np.split(flat, np.cumsum([len(part) for part in ids])[:-1])


def _has_other_text(
    queries: TokenStore,
    docs: TokenStore,
    query_rows: np.ndarray,
    doc_rows: list[np.ndarray],
    prompt_tokens: tuple[int, int],
) -> list[np.ndarray]:
    """Return for each group which of its docs differ from its query in text, bool [docs]."""
    counts = [len(rows) for rows in doc_rows]
    same = same_text(queries, docs, np.repeat(query_rows, counts), np.concatenate(doc_rows), prompt_tokens)
    return np.split(~same, np.cumsum(counts)[:-1])
