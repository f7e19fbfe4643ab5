"""Order the docs of a run by trec_eval's tie rule, and compute scores that give the same order in every tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ranker.errors import DataError

if TYPE_CHECKING:
    from ranker.types import Run

EQUAL = 1e-6  # scores count as equal up to this relative difference
LARGEST = float(np.finfo(np.float32).max)


def rank_docs(docs: Mapping[str, float]) -> list[str]:
    """Return doc ids in trec_eval's order: score descending, then doc id descending as strings.

    >>> rank_docs({"d10": 0.5, "d9": 0.5, "d1": 0.7})
    ['d1', 'd9', 'd10']
    """
    doc_ids = sorted(docs, reverse=True)  # by code points, which is also the order of UTF-8 bytes
    doc_ids.sort(key=docs.__getitem__, reverse=True)  # stable
    return doc_ids


def are_equal(run: Run) -> bool:
    """Return whether all docs of each query have equal scores, up to rounding; False if no query has several docs.

    >>> are_equal({"q1": {"d1": 0.5, "d2": 0.5}, "q2": {"d3": 1.0}}), are_equal({"q1": {"d1": 0.5, "d2": 0.4}})
    (True, False)
    >>> are_equal({"q1": {"d1": 0.5}})
    False
    """
    several = [list(docs.values()) for docs in run.values() if len(docs) > 1]
    return bool(several) and all(max(part) - min(part) <= EQUAL * max(1.0, abs(max(part))) for part in several)


def separate_ties(run: Run) -> Run:
    """Lower tied scores by the smallest float32 steps, so that tools with any tie rule get trec_eval's order.

    Scores that tie only in float32 are also separated, because some tools have float32 scores (trec_eval up to 9,
    pytrec_eval). Other scores do not change.

    Raises:
        DataError: A score is not finite in float32, or docs tie at the smallest float32 number.

    >>> separate_ties({"q1": {"d10": 0.5, "d9": 0.5, "d1": 0.7}})
    {'q1': {'d1': 0.7, 'd9': 0.5, 'd10': 0.4999999701976776}}
    """
    require_finite(run)
    return {
        query_id: docs if is_strict(scores_of(docs)) else _separated(query_id, docs) for query_id, docs in run.items()
    }


def require_finite(run: Run) -> None:
    """Refuse scores that are NaN, infinite, or infinite in float32, because other tools store scores in float32.

    Raises:
        DataError: A score is refused; the message has the number of such scores, and the first query and doc.
    """
    bad = {query_id: ~(np.abs(scores_of(docs)) <= LARGEST) for query_id, docs in run.items()}
    count = sum(int(wrong.sum()) for wrong in bad.values())
    if count:
        query_id = next(query_id for query_id, wrong in bad.items() if wrong.any())
        doc_id = list(run[query_id])[int(np.argmax(bad[query_id]))]
        raise DataError(
            f"run: expected finite scores within float32, got {count} of {sum(map(len, run.values()))} that are not, "
            f"the first {float(run[query_id][doc_id])} for query {query_id!r} and doc {doc_id!r}; check the model's "
            "weights and its precision"
        )


def _separated(query_id: str, docs: Mapping[str, float]) -> dict[str, float]:
    """Return scores of one query that strictly decrease, in float32, in trec_eval's order."""
    separate: dict[str, float] = {}
    above = np.float32(np.inf)
    for doc_id in rank_docs(docs):
        score = float(docs[doc_id])
        if not np.float32(score) < above:
            if above <= -LARGEST:
                raise DataError(
                    f"run: expected scores above {-LARGEST} where docs tie, got such a tie for query {query_id!r} and "
                    f"doc {doc_id!r}; rescale the scores"
                )
            score = float(np.nextafter(above, np.float32(-np.inf)))
        separate[doc_id] = score
        above = np.float32(score)
    return separate


def scores_of(docs: Mapping[str, float]) -> np.ndarray:
    """Return the scores of one query, float64 [docs]."""
    return np.fromiter(docs.values(), np.float64, len(docs))


def is_strict(scores: np.ndarray) -> bool:
    """Return whether all scores [docs] are different in float32."""
    ordered = np.sort(scores.astype(np.float32))
    return bool((ordered[1:] != ordered[:-1]).all())  # np.unique would import numpy.ma
