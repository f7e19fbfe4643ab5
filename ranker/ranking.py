"""The order of a run's docs: trec_eval's, and how to make every other tool see the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ranker.types import Run


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

    Tools that hold scores in float32 (trec_eval up to 9, pytrec_eval) tie more than the file does; those are separated too. All other
    scores stay as they are.

    >>> separate_ties({"q1": {"d10": 0.5, "d9": 0.5, "d1": 0.7}})
    {'q1': {'d1': 0.7, 'd9': 0.5, 'd10': 0.4999999701976776}}
    """
    return {query_id: docs if is_strict(scores_of(docs)) else _separated(docs) for query_id, docs in run.items()}


def _separated(docs: Mapping[str, float]) -> dict[str, float]:
    separate: dict[str, float] = {}
    above = np.float32(np.inf)
    for doc_id in rank_docs(docs):
        score = float(docs[doc_id])
        if not np.float32(score) < above:
            score = float(np.nextafter(above, np.float32(-np.inf)))
        separate[doc_id] = score
        above = np.float32(score)
    return separate


def scores_of(docs: Mapping[str, float]) -> np.ndarray:
    """One query's scores, float64 [docs]."""
    return np.fromiter(docs.values(), np.float64, len(docs))


def is_strict(scores: np.ndarray) -> bool:
    """Whether all scores [docs] differ even in float32."""
    return len(np.unique(scores.astype(np.float32))) == len(scores)
