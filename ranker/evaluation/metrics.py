"""Measure a run: names from ir-measures, ranking and values as in trec_eval, means over all judged queries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from ir_measures import Measure

from ranker.data.parsing import MAX_GRADE
from ranker.data.ranking import is_strict, rank_docs, scores_of
from ranker.errors import DataError
from ranker.evaluation.measure_names import parse_measures, with_relevance
from ranker.evaluation.measure_values import aggregate, measure_queries

if TYPE_CHECKING:
    from ranker.types import Qrels, Run

_QUERIES_AT_ONCE = 500


@dataclass(frozen=True)
class Evaluation:
    """The measures of a run.

    Args:
        means: Measure name -> mean over all judged queries (for counts such as NumRel: the sum).
        per_query: query_id -> measure name -> value, for every judged query.
        num_queries: Number of judged queries.
        warnings: One sentence for each fact that the reader of the means should know.
        num_without_results: Number of judged queries that are not in the run; each counts 0.
        num_without_relevant: Number of judged queries without a doc at or above the relevance threshold; their binary
            measures are 0.
        num_ignored: Number of queries of the run without judgements.
    """

    means: dict[str, float]
    per_query: dict[str, dict[str, float]]
    num_queries: int
    warnings: list[str]
    num_without_results: int
    num_without_relevant: int
    num_ignored: int


def evaluate(run: Run, qrels: Qrels, measures: Sequence[str | Measure], relevance: int = 1) -> Evaluation:
    """Measure a run. Every measure orders ties as trec_eval does, and a judged query without results counts 0.

    Args:
        run: query_id -> doc_id -> score, higher is better.
        qrels: query_id -> doc_id -> relevance; a query without judgements is ignored.
        measures: ir-measures names, such as `nDCG@10`.
        relevance: Smallest grade that binary measures count as relevant, unless the measure's name sets one.

    Raises:
        ConfigError: A measure is unknown or cannot be computed exactly.
        DataError: No query is judged, a grade is not a small whole number, or a score is not finite.

    >>> evaluate({"q1": {"d10": 0.5, "d9": 0.5}}, {"q1": {"d9": 1}, "q2": {"d9": 1}}, ["RR@10", "AP"]).means
    {'RR@10': 0.5, 'AP': 0.5}
    """
    parsed = with_relevance(parse_measures(measures), relevance)
    judged = {query_id: _checked_grades(query_id, docs) for query_id, docs in qrels.items() if docs}
    if not judged:
        raise DataError("qrels: expected at least one judged query, got none; check the qrels and the split")
    per_query: dict[str, dict[str, float]] = {query_id: {} for query_id in judged}
    query_ids = list(judged)
    for start in range(0, len(query_ids), _QUERIES_AT_ONCE):  # memory holds the ranked copies of one chunk only
        chunk = {query_id: judged[query_id] for query_id in query_ids[start : start + _QUERIES_AT_ONCE]}
        ranked = {query_id: _strictly_ranked(query_id, run[query_id]) for query_id in chunk if run.get(query_id)}
        for measure, values in measure_queries(parsed, chunk, ranked):
            for query_id in chunk:
                per_query[query_id][str(measure)] = values.get(query_id, float(measure.DEFAULT))
    ignored = [query_id for query_id in run if query_id not in judged]
    for query_id in ignored:
        _check_scores(query_id, run[query_id])
    missing = [query_id for query_id in judged if not run.get(query_id)]
    without_relevant = [query_id for query_id, docs in judged.items() if max(docs.values()) < relevance]
    return Evaluation(
        means={
            str(measure): aggregate(measure, [values[str(measure)] for values in per_query.values()])
            for measure in parsed
        },
        per_query=per_query,
        num_queries=len(judged),
        warnings=[*_overlap_warnings(run, judged, missing), *_query_warnings(without_relevant, ignored, relevance)],
        num_without_results=len(missing),
        num_without_relevant=len(without_relevant),
        num_ignored=len(ignored),
    )


# input
# ----------------------------------------------------------------------------------------------------


def _checked_grades(query_id: str, docs: Mapping[str, int]) -> dict[str, int]:
    for doc_id, relevance in docs.items():
        if int(relevance) != relevance or abs(relevance) > MAX_GRADE:
            raise DataError(
                f"qrels: expected whole grades up to {MAX_GRADE}, got {relevance!r} "
                f"for query {query_id!r} and doc {doc_id!r}"
            )
    return {doc_id: int(relevance) for doc_id, relevance in docs.items()}


def _check_scores(query_id: str, docs: Mapping[str, float]) -> np.ndarray:
    scores = scores_of(docs)
    if not np.isfinite(scores).all():
        doc_id, score = next((doc_id, score) for doc_id, score in docs.items() if not np.isfinite(score))
        raise DataError(
            f"run: expected a finite score for query {query_id!r} and doc {doc_id!r}, got {float(score)}; "
            "check the model's scores"
        )
    return scores


def _strictly_ranked(query_id: str, docs: Mapping[str, float]) -> dict[str, float]:
    """Return scores that every evaluator orders in the same way.

    The scores do not change if all of them are different in float32. Otherwise the new scores are n, n - 1, ..., 1 in
    trec_eval's order.
    """
    scores = _check_scores(query_id, docs)
    if is_strict(scores):
        return dict(zip(docs, scores.tolist(), strict=True))
    ranked = rank_docs(docs)
    return dict(zip(ranked, map(float, range(len(ranked), 0, -1)), strict=True))


# warnings
# ----------------------------------------------------------------------------------------------------


def _overlap_warnings(run: Run, judged: Qrels, missing: Sequence[str]) -> Iterator[str]:
    measured = [query_id for query_id in judged if run.get(query_id)]
    if not measured:
        other = next((query_id for query_id, docs in run.items() if docs), None)
        has = "the run is empty" if other is None else f"the run has ids like {other!r}"
        have = f"the qrels have ids like {next(iter(judged))!r}, {has}"
        yield f"0 of {len(judged)} judged queries found in the run: {have}"
        return
    if missing:
        queries = (
            "1 judged query has no results and counts"
            if len(missing) == 1
            else f"{len(missing)} judged queries have no results and count"
        )
        yield f"{queries} 0, for example {missing[0]!r}"
    if all(judged[query_id].keys().isdisjoint(run[query_id]) for query_id in measured):
        judged_doc, run_doc = next(iter(judged[measured[0]])), next(iter(run[measured[0]]))
        yield (f"none of the judged documents of any query occurs in the run: for query {measured[0]!r} "
               f"{judged_doc!r} is judged, the run has {run_doc!r}; compare the ids")  # fmt: skip


def _query_warnings(without_relevant: Sequence[str], ignored: Sequence[str], relevance: int) -> Iterator[str]:
    if without_relevant:
        queries = "1 query has" if len(without_relevant) == 1 else f"{len(without_relevant)} queries have"
        grade = "" if relevance == 1 else f" (grade {relevance} or higher)"
        example = without_relevant[0]
        yield f"{queries} no relevant document{grade} and can only score 0 in binary measures, for example {example!r}"
    if ignored:
        queries = (
            "1 query of the run is not judged and was"
            if len(ignored) == 1
            else f"{len(ignored)} queries of the run are not judged and were"
        )
        yield f"{queries} ignored, for example {ignored[0]!r}"
