"""Measure how well a teacher's scores agree with the judgements and with another teacher's scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from ranker.evaluation.metrics import evaluate
from ranker.evaluation.orders import kendall

if TYPE_CHECKING:
    from ranker.types import Qrels, Run


def auc(relevant: np.ndarray, scores: np.ndarray) -> float:
    """Return the area under the ROC curve (Hanley and McNeil, Radiology 143, 1982).

    Of all pairs of a relevant doc and another doc, this is the share of pairs in which the relevant doc has the higher
    score. A tie counts half.

    Args:
        relevant: Which docs are relevant, bool [docs].
        scores: [docs].

    Returns:
        The area; NaN if all docs are relevant or no doc is.

    >>> auc(np.array([True, False, False, True]), np.array([3.0, 2.0, 1.0, 2.0]))
    0.875
    """
    from scipy.stats import rankdata  # imported here, because the import takes a second

    positives = int(relevant.sum())
    negatives = len(relevant) - positives
    if not positives or not negatives:
        return math.nan
    above = float(rankdata(scores)[relevant].sum()) - positives * (positives + 1) / 2
    return above / (positives * negatives)


def mean_over_queries(values: Sequence[float]) -> tuple[float | None, int]:
    """Return the mean (or None) and the number of the values that are not NaN."""
    numbers = [value for value in values if not math.isnan(value)]
    return (float(np.mean(numbers)), len(numbers)) if numbers else (None, 0)


def report(runs: Mapping[str, Run], qrels: Qrels, measures: Sequence[str], relevance: int = 1) -> dict[str, Any]:
    """Compare runs over the same docs with the judgements and with each other.

    Docs without a judgement count as not relevant.

    Args:
        runs: Name -> query_id -> doc_id -> score: the teachers, their mean, the first stage.
        qrels: query_id -> doc_id -> relevance; may be empty.
        measures: ir-measures names.
        relevance: Smallest relevant grade.

    Returns:
        A dict with two keys. `rows` has for each name: `AUC`, the mean over the queries that have relevant and other
        docs, or None without such queries; `AUC_queries`, the number of these queries; `pairs`; and the means of the
        measures. `kendall` has for each "A ~ B": `tau`, the mean over the queries with a defined tau, and `queries`,
        the number of these queries.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        mean, queries = mean_over_queries([auc(*labelled) for labelled in _labelled(run, qrels, relevance)])
        rows[name] = {"pairs": sum(map(len, run.values())), "AUC": mean, "AUC_queries": queries}
        if qrels:
            rows[name] |= evaluate(run, qrels, measures, relevance).means
    agreement = {}
    for one, other in combinations(runs, 2):
        mean, queries = mean_over_queries([kendall(*scores) for scores in _common(runs[one], runs[other])])
        agreement[f"{one} ~ {other}"] = {"tau": mean, "queries": queries}
    return {"rows": rows, "kendall": agreement}


def _labelled(run: Run, qrels: Qrels, relevance: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for query_id, docs in run.items():
        judged = qrels.get(query_id, {})
        yield np.array([judged.get(doc_id, 0) >= relevance for doc_id in docs], bool), np.array(list(docs.values()))


def _common(one: Run, other: Run) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield for each query the two runs' scores of the docs that both runs have."""
    for query_id, docs in one.items():
        shared = [doc_id for doc_id in docs if doc_id in other.get(query_id, {})]
        yield np.array([docs[doc_id] for doc_id in shared]), np.array([other[query_id][doc_id] for doc_id in shared])
