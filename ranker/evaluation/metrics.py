"""Measures of a run: ir-measures' names, trec_eval's ranking and values, means over all judged queries."""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ir_measures
import numpy as np
from ir_measures import Measure
from ir_measures.providers import FallbackProvider

from ranker.data.parsing import MAX_GRADE
from ranker.data.ranking import is_strict, rank_docs, scores_of
from ranker.errors import ConfigError, DataError

if TYPE_CHECKING:
    from ranker.types import Qrels, Run

# Only exact evaluators: gdeval rounds to 5 digits, and msmarco breaks ties by another rule. cwl_eval is used only if it
# is installed; it computes RBP, BPM, ...
_EXACT = FallbackProvider(
    [ir_measures.pytrec_eval, ir_measures.judged, ir_measures.compat, ir_measures.accuracy, ir_measures.cwl_eval]
)
_QUERIES_AT_ONCE = 500
_UNJUDGED = "<no doc>"  # can't be a doc id, which has no spaces


@dataclass(frozen=True)
class Evaluation:
    """The measures of a run.

    Args:
        means: Measure name -> mean over all judged queries (for counts such as NumRel: the sum).
        per_query: query_id -> measure name -> value, for every judged query.
        num_queries: Number of judged queries.
        warnings: Facts that qualify the means, one sentence each.
        num_without_results: Number of judged queries that are not in the run; they count 0.
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
        ConfigError: A measure that is unknown or cannot be computed exactly.
        DataError: No judged query, a grade that is not a small whole number, or a score that is not finite.

    >>> evaluate({"q1": {"d10": 0.5, "d9": 0.5}}, {"q1": {"d9": 1}, "q2": {"d9": 1}}, ["RR@10", "AP"]).means
    {'RR@10': 0.5, 'AP': 0.5}
    """
    parsed = with_relevance(parse_measures(measures), relevance)
    judged = {query_id: _checked_grades(query_id, docs) for query_id, docs in qrels.items() if docs}
    if not judged:
        raise DataError("qrels: expected at least one judged query, got none; check the qrels and the split")
    per_query: dict[str, dict[str, float]] = {query_id: {} for query_id in judged}
    query_ids = list(judged)
    for start in range(0, len(query_ids), _QUERIES_AT_ONCE):  # only one chunk's ranked copies are in memory
        chunk = {query_id: judged[query_id] for query_id in query_ids[start : start + _QUERIES_AT_ONCE]}
        ranked = {query_id: _strictly_ranked(query_id, run[query_id]) for query_id in chunk if run.get(query_id)}
        for measure, values in _measure(parsed, chunk, ranked):
            for query_id in chunk:
                per_query[query_id][str(measure)] = values.get(query_id, float(measure.DEFAULT))
    ignored = [query_id for query_id in run if query_id not in judged]
    for query_id in ignored:
        _check_scores(query_id, run[query_id])
    missing = [query_id for query_id in judged if not run.get(query_id)]
    without_relevant = [query_id for query_id, docs in judged.items() if max(docs.values()) < relevance]
    return Evaluation(
        means={
            str(measure): _aggregate(measure, [values[str(measure)] for values in per_query.values()])
            for measure in parsed
        },
        per_query=per_query,
        num_queries=len(judged),
        warnings=[*_overlap_warnings(run, judged, missing), *_query_warnings(without_relevant, ignored, relevance)],
        num_without_results=len(missing),
        num_without_relevant=len(without_relevant),
        num_ignored=len(ignored),
    )


# names
# ----------------------------------------------------------------------------------------------------


def parse_measures(names: Sequence[str | Measure]) -> list[Measure]:
    """Parse ir-measures names; a repeated measure is returned once.

    Raises:
        ConfigError: Names are wrong; the message has a line for each, with the name that was probably meant.

    >>> parse_measures(["AP", "MRR@10", "AP(rel=2)", "MAP"])
    [AP, RR@10, AP(rel=2)]
    """
    if isinstance(names, str) or not names:
        raise ConfigError(f"measures: expected a list of ir-measures names, as [AP, RR@10, nDCG@10], got {names!r}")
    measures, faults = [], []
    for name in names:
        try:
            measures.append(_parse(name))
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
    return list(dict.fromkeys(measures))


def with_relevance(measures: Sequence[Measure], relevance: int) -> list[Measure]:
    """Set the relevance threshold of binary measures that have none; nDCG and other graded measures do not change.

    >>> with_relevance(parse_measures(["AP", "RR@10", "P(rel=3)@5", "nDCG@10"]), 2)
    [AP(rel=2), RR(rel=2)@10, P(rel=3)@5, nDCG@10]
    """
    if relevance < 1:
        raise ConfigError(f"relevance: expected a grade of at least 1, got {relevance}; 1 counts every grade above 0")
    binary = [m.SUPPORTED_PARAMS["rel"].default == 1 if "rel" in m.SUPPORTED_PARAMS else False for m in measures]
    return list(
        dict.fromkeys(
            m(rel=relevance) if is_binary and "rel" not in m.params and relevance > 1 else m
            for m, is_binary in zip(measures, binary, strict=True)
        )
    )


def names_with_relevance(measures: Sequence[str | Measure], relevance: int) -> dict[str, str]:
    """Return each measure's name without the set's relevance threshold -> its name in an `Evaluation`.

    >>> names_with_relevance(["nDCG@10", "RR@10"], 2)
    {'nDCG@10': 'nDCG@10', 'RR@10': 'RR(rel=2)@10'}
    """
    return {str(measure): str(with_relevance([measure], relevance)[0]) for measure in parse_measures(measures)}


def _parse(name: str | Measure) -> Measure:
    try:
        measure = name if isinstance(name, Measure) else ir_measures.parse_measure(name.strip())
        measure.validate_params()
    except (ValueError, NameError, AssertionError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"measures: expected an ir-measures name, as AP, RR@10 or nDCG@10, got {name!r}; {_hint(str(name), error)}"
        ) from None
    params = measure.params
    for key in ("cutoff", "rel"):
        if key in params and (isinstance(params[key], bool) or params[key] < 1):
            raise ConfigError(f"measures: expected a {key} of at least 1, got {name!r}")
    if "recall" in params and not (0 <= params["recall"] <= 1 and round(params["recall"], 2) == params["recall"]):
        raise ConfigError(f"measures: expected a recall from 0.0 to 1.0 with at most two decimals, got {name!r}")
    for grade, gain in params.get("gains", {}).items():
        if not isinstance(grade, int) or not isinstance(gain, int) or gain > MAX_GRADE:
            raise ConfigError(f"measures: expected whole gains up to {MAX_GRADE}, got {name!r}")
    if measure.NAME not in _FROM_QRELS and not _EXACT.supports(_computed(measure, set())):
        raise ConfigError(
            f"measures: expected a measure that can be computed exactly here, got {name!r}; "
            "no installed evaluator does, use another"
        )
    return measure


def _hint(name: str, error: Exception) -> str:
    registry = ir_measures.measures.registry
    known = {key.lower(): key for key in reversed(registry)}  # nDCG comes before its alias NDCG
    base, rest = re.fullmatch(r"\s*([^@(\s]*)(.*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
    if base in registry:
        cutoff_missing = "cutoff" in str(error) and "@" not in rest
        return f"give it a cutoff, as {base}@10" if cutoff_missing else str(error)
    try:
        with redirect_stdout(io.StringIO()):
            return f"did you mean {ir_measures.parse_trec_measure(name)[0]}?"  # it is a name in trec_eval
    except (ValueError, KeyError, IndexError, TypeError):
        close = [base.lower()] if base.lower() in known else difflib.get_close_matches(base.lower(), known, n=1)
        return f"did you mean {known[close[0]]}{rest}?" if close else "https://ir-measur.es lists them"


# values
# ----------------------------------------------------------------------------------------------------

_FROM_QRELS = ("NumRel", "NumQ")  # computed from qrels alone; ir-measures would leave out queries missing in the run


def _measure(measures: Sequence[Measure], judged: Qrels, ranked: Run) -> Iterator[tuple[Measure, dict[str, float]]]:
    """Yield each measure with the values of the queries that have results; `ranked` holds strictly ordered scores."""
    grades = {relevance for docs in judged.values() for relevance in docs.values()}
    computed = {measure: _computed(measure, grades) for measure in measures if measure.NAME not in _FROM_QRELS}
    # ir-measures 0.4.3 computes nDCG and NumRet together with measures of other options (gains, judged_only) and gives
    # them those options; so each combination of these options is computed separately
    groups: dict[tuple[str, bool], list[Measure]] = {}
    for measure in dict.fromkeys(computed.values()):
        groups.setdefault((repr(measure.params.get("gains")), measure.params.get("judged_only", False)), []).append(
            measure
        )
    # trec_eval reads beyond its tables if all grades of a query are negative; one more doc of grade 0 prevents that
    # and changes no value
    safe = {q: docs if max(docs.values()) >= 0 else {**docs, _UNJUDGED: 0} for q, docs in judged.items()}
    values: dict[Measure, dict[str, float]] = {measure: {} for measure in computed.values()}
    for group in groups.values() if ranked else ():
        for metric in _EXACT.iter_calc(group, safe, ranked):
            if metric.query_id in ranked:
                values[metric.measure][metric.query_id] = float(metric.value)
    for measure in measures:
        if measure.NAME in _FROM_QRELS:
            yield measure, {query_id: _from_qrels(measure, docs) for query_id, docs in judged.items()}
        else:
            yield (
                measure,
                {query_id: _finished(measure, value) for query_id, value in values[computed[measure]].items()},
            )


def _computed(measure: Measure, grades: set[int]) -> Measure:
    """A measure that trec_eval computes exactly and from which `_finished` computes `measure`."""
    params: dict[str, Any] = dict(measure.params)
    if measure.NAME == "RR":
        params.pop("cutoff", None)
        return type(measure)(**params)
    if measure.NAME == "nDCG" and params.get("dcg") == "exp-log2" and "gains" not in params:
        largest = max(grades, default=0)
        if 2**largest - 1 > MAX_GRADE:
            raise DataError(
                f"qrels: expected grades up to 13 for {measure}, whose gain is 2^grade - 1, got {largest}; use nDCG"
            )
        del params["dcg"]
        return type(measure)(gains={grade: 2**grade - 1 for grade in sorted(grades) if grade > 0}, **params)
    return measure


def _finished(measure: Measure, value: float) -> float:
    """Apply the cutoff of RR, which `_computed` removes."""
    if (
        measure.NAME == "RR"
        and "cutoff" in measure.params
        and value > 0
        and round(1 / value) > measure.params["cutoff"]
    ):
        return 0.0
    return value


def _from_qrels(measure: Measure, judged: Mapping[str, int]) -> float:
    if measure.NAME == "NumQ":
        return 1.0
    return float(sum(relevance >= measure["rel"] for relevance in judged.values()))


def _aggregate(measure: Measure, values: Sequence[float]) -> float:
    aggregator = measure.aggregator()
    for value in values:
        aggregator.add(value)
    return float(aggregator.result())


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
    """Scores that every evaluator orders in the same way.

    These are the given scores if all differ even in float32; else n, n - 1, ..., 1 in trec_eval's order.
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
        yield f"0 of {len(judged)} judged queries found in the run: judged are ids like {next(iter(judged))!r}, {has}"
        return
    if missing:
        queries = (
            "1 judged query has no results and counts"
            if len(missing) == 1
            else f"{len(missing)} judged queries have no results and count"
        )
        yield f"{queries} 0, as {missing[0]!r}"
    if all(judged[query_id].keys().isdisjoint(run[query_id]) for query_id in measured):
        judged_doc, run_doc = next(iter(judged[measured[0]])), next(iter(run[measured[0]]))
        yield (f"none of the judged documents of any query occurs in the run: for query {measured[0]!r} "
               f"{judged_doc!r} is judged, the run has {run_doc!r}; compare the ids")  # fmt: skip


def _query_warnings(without_relevant: Sequence[str], ignored: Sequence[str], relevance: int) -> Iterator[str]:
    if without_relevant:
        queries = "1 query has" if len(without_relevant) == 1 else f"{len(without_relevant)} queries have"
        grade = "" if relevance == 1 else f" (grade {relevance} or higher)"
        example = without_relevant[0]
        yield f"{queries} no relevant document{grade} and can only score 0 in binary measures, as {example!r}"
    if ignored:
        queries = (
            "1 query of the run is not judged and was"
            if len(ignored) == 1
            else f"{len(ignored)} queries of the run are not judged and were"
        )
        yield f"{queries} ignored, as {ignored[0]!r}"
