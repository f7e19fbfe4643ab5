"""The order of a run's docs: trec_eval's, and how to make every other tool see the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ranker.errors import DataError

if TYPE_CHECKING:
    from ranker.types import Run

LARGEST = float(np.finfo(np.float32).max)


def rank_docs(docs: Mapping[str, float]) -> list[str]:
    """Doc ids in trec_eval's order: score descending, then doc id descending as strings.

    >>> rank_docs({"d10": 0.5, "d9": 0.5, "d1": 0.7})
    ['d1', 'd9', 'd10']
    """
    doc_ids = sorted(docs, reverse=True)  # code points, the order of UTF-8 bytes
    doc_ids.sort(key=docs.__getitem__, reverse=True)  # stable
    return doc_ids


def separate_ties(run: Run) -> Run:
    """Lower tied scores by the least float32 step, so that every tool sees trec_eval's order, whatever its own tie rule.

    Tools that hold scores in float32 (trec_eval up to 9, pytrec_eval) tie more than the file does; those are separated
    too. All other scores stay as they are.

    Raises:
        DataError: A score that is not finite or that float32 cannot hold, or ties at the least float32, below which
            there is none.

    >>> separate_ties({"q1": {"d10": 0.5, "d9": 0.5, "d1": 0.7}})
    {'q1': {'d1': 0.7, 'd9': 0.5, 'd10': 0.4999999701976776}}
    """
    require_finite(run)
    return {
        query_id: docs if is_strict(scores_of(docs)) else _separated(query_id, docs) for query_id, docs in run.items()
    }


def require_finite(run: Run) -> None:
    """Refuse scores that are NaN, infinite, or infinite in float32, which outside tools hold them in.

    Raises:
        DataError: With the number of such scores and the first query and doc.
    """
    bad = {query_id: ~(np.abs(scores_of(docs)) <= LARGEST) for query_id, docs in run.items()}
    count = sum(int(wrong.sum()) for wrong in bad.values())
    if count:
        query_id = next(query_id for query_id, wrong in bad.items() if wrong.any())
        doc_id = list(run[query_id])[int(np.argmax(bad[query_id]))]
        raise DataError(
            f"run: expected finite scores within float32, got {count} of {sum(map(len, run.values()))} that are not, the first "
            f"{float(run[query_id][doc_id])} for query {query_id!r} and doc {doc_id!r}; check the model's weights and its precision"
        )


def _separated(query_id: str, docs: Mapping[str, float]) -> dict[str, float]:
    separate: dict[str, float] = {}
    above = np.float32(np.inf)
    for doc_id in rank_docs(docs):
        score = float(docs[doc_id])
        if not np.float32(score) < above:
            if above <= -LARGEST:
                raise DataError(
                    f"run: expected scores above {-LARGEST} where docs tie, got such a tie for query {query_id!r} and doc {doc_id!r}; "
                    "rescale the scores"
                )
            score = float(np.nextafter(above, np.float32(-np.inf)))
        separate[doc_id] = score
        above = np.float32(score)
    return separate


def scores_of(docs: Mapping[str, float]) -> np.ndarray:
    """One query's scores, float64 [docs]."""
    return np.fromiter(docs.values(), np.float64, len(docs))


def is_strict(scores: np.ndarray) -> bool:
    """Whether all scores [docs] differ even in float32."""
    ordered = np.sort(scores.astype(np.float32))
    return bool((ordered[1:] != ordered[:-1]).all())  # np.unique would import numpy.ma
