"""Compute measures of rankings without ties, with exact evaluators only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ir_measures
from ir_measures import Measure
from ir_measures.providers import FallbackProvider

from ranker.data.parsing import MAX_GRADE
from ranker.errors import DataError

if TYPE_CHECKING:
    from ranker.types import Qrels, Run

# Two evaluators are not exact: gdeval rounds to 5 digits, and msmarco has another tie rule. cwl_eval, which computes
# RBP, BPM and others, is used only if the user has installed it.
EXACT = FallbackProvider(
    [ir_measures.pytrec_eval, ir_measures.judged, ir_measures.compat, ir_measures.accuracy, ir_measures.cwl_eval]
)
FROM_QRELS = ("NumRel", "NumQ")  # computed here from the qrels, because ir-measures skips queries that the run lacks
_UNJUDGED = "<no doc>"  # can't be a doc id, which has no spaces


def measure_queries(
    measures: Sequence[Measure], judged: Qrels, ranked: Run
) -> Iterator[tuple[Measure, dict[str, float]]]:
    """Yield each measure with the values of the queries that have results; `ranked` holds strictly ordered scores."""
    grades = {relevance for docs in judged.values() for relevance in docs.values()}
    computed = {measure: computed_measure(measure, grades) for measure in measures if measure.NAME not in FROM_QRELS}
    # ir-measures 0.4.3 computes nDCG and NumRet together with measures that have other options (gains, judged_only),
    # and applies these options to nDCG and NumRet, too. So each combination of options is computed separately.
    groups: dict[tuple[str, bool], list[Measure]] = {}
    for measure in dict.fromkeys(computed.values()):
        groups.setdefault((repr(measure.params.get("gains")), measure.params.get("judged_only", False)), []).append(
            measure
        )
    # trec_eval reads beyond its tables if all grades of a query are negative. One more doc of grade 0 prevents this and
    # changes no value.
    safe = {q: docs if max(docs.values()) >= 0 else {**docs, _UNJUDGED: 0} for q, docs in judged.items()}
    values: dict[Measure, dict[str, float]] = {measure: {} for measure in computed.values()}
    for group in groups.values() if ranked else ():
        for metric in EXACT.iter_calc(group, safe, ranked):
            if metric.query_id in ranked:
                values[metric.measure][metric.query_id] = float(metric.value)
    for measure in measures:
        if measure.NAME in FROM_QRELS:
            yield measure, {query_id: _from_qrels(measure, docs) for query_id, docs in judged.items()}
        else:
            yield (
                measure,
                {query_id: _finished(measure, value) for query_id, value in values[computed[measure]].items()},
            )


def computed_measure(measure: Measure, grades: set[int]) -> Measure:
    """Return a measure that trec_eval computes exactly; `_finished` turns its value into that of `measure`."""
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
    """Apply the cutoff of RR, which `computed_measure` removes."""
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


def aggregate(measure: Measure, values: Sequence[float]) -> float:
    """Return the mean of a measure's values over queries; for counts such as NumRel their sum."""
    aggregator = measure.aggregator()
    for value in values:
        aggregator.add(value)
    return float(aggregator.result())
