"""Compute the result of a suite of test sets from the files that an evaluation has written for each set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ranker.data.trec import read_qrels, read_run
from ranker.evaluation.measure_names import names_with_relevance
from ranker.evaluation.metrics import Evaluation, evaluate
from ranker.evaluation.report import compare

if TYPE_CHECKING:
    from ranker.types import Qrels, Run

QRELS, FIRST_STAGE = "qrels.txt", "first_stage.trec"
SAMPLES, LEVEL = 10_000, 0.95
_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class SuiteSet:
    """The data from which the numbers of one set are computed.

    Args:
        run: The re-ranked candidates: query_id -> doc_id -> score.
        qrels: query_id -> doc_id -> relevance.
        relevance: Smallest grade that binary measures count as relevant.
        first_stage: The candidates with the first stage's scores; None if the candidates have no order.
        baseline: A run of another system on the same queries; None: the first stage is the baseline.
    """

    run: Run
    qrels: Qrels
    relevance: int = 1
    first_stage: Run | None = None
    baseline: Run | None = None


def read_set(folder: Path, relevance: int, baseline: Path | None = None) -> SuiteSet:
    """Read a set's files.

    Args:
        folder: Has `run.trec`, `qrels.txt` and, where the candidates were ranked, `first_stage.trec`.
        relevance: Smallest relevant grade.
        baseline: The run file of another evaluation of the set.

    Raises:
        DataError: A file is missing or broken.
    """
    first_stage = folder / FIRST_STAGE
    return SuiteSet(
        read_run(folder / "run.trec"),
        read_qrels(folder / QRELS),
        relevance,
        read_run(first_stage) if first_stage.is_file() else None,
        read_run(baseline) if baseline is not None else None,
    )


def oracle(run: Run, qrels: Qrels) -> Run:
    """Rank a run's docs by their relevance grades. This is the best possible re-ranking of these candidates.

    >>> oracle({"q": {"a": 3.0, "b": 2.0}}, {"q": {"b": 2, "c": 1}})
    {'q': {'a': 0.0, 'b': 2.0}}
    """
    return {
        query_id: {doc_id: float(qrels.get(query_id, {}).get(doc_id, 0)) for doc_id in docs}
        for query_id, docs in run.items()
    }


def summarise(sets: Mapping[str, SuiteSet], measures: Sequence[str]) -> dict[str, Any]:
    """Compute the numbers of a suite.

    Args:
        sets: Name -> the set.
        measures: ir-measures names.

    Returns:
        A dict with two keys, `sets` and `macro`. Numbers are in dicts: measure -> value. The names of the measures do
        not contain the set's relevance threshold: `RR@10`, not `RR(rel=2)@10`.

        `sets[name]` has these keys:

        - `queries`: number of queries;
        - `relevance`: the relevance threshold;
        - `run`, `oracle`, `first_stage`, `baseline`: means over the queries; the last two only if the set has that run;
        - `worse`: the share of the queries with a lower value than in the first stage;
        - `comparison`: the result of `ranker.evaluation.report.compare`, and with the key `against` the name of the run
          compared with: `baseline`, or `first_stage` without a baseline.

        `macro` averages the sets' means: `mean`, and the bootstrap `interval` (`bootstrap_interval`). It has an entry
        for each of `run`, `oracle`, `first_stage` and `baseline` that all sets have, and an entry `delta` for the
        difference between the run and the run compared with.
    """
    names = list(names_with_relevance(measures, 1))
    entries: dict[str, dict[str, Any]] = {}
    values: dict[str, dict[str, dict[str, np.ndarray]]] = {}  # such as run -> measure -> set -> values of the queries
    for name, part in sets.items():
        runs = {"run": part.run, "oracle": oracle(part.run, part.qrels)}
        runs |= {"first_stage": part.first_stage} if part.first_stage is not None else {}
        runs |= {"baseline": part.baseline} if part.baseline is not None else {}
        evaluations = {kind: evaluate(run, part.qrels, measures, part.relevance) for kind, run in runs.items()}
        full = names_with_relevance(measures, part.relevance)
        for kind, evaluation in evaluations.items():
            for measure in names:
                per_query = [row[full[measure]] for row in evaluation.per_query.values()]
                values.setdefault(kind, {}).setdefault(measure, {})[name] = np.array(per_query)
        entries[name] = _entry(part, evaluations, full)
    macro = {
        kind: {measure: _macro(list(parts[measure].values())) for measure in names}
        for kind, parts in values.items()
        if all(len(parts[measure]) == len(sets) for measure in names)
    }
    reference = {name: entry.get("comparison", {}).get("against") for name, entry in entries.items()}
    if sets and all(reference.values()):
        macro["delta"] = {
            measure: _macro(
                [values["run"][measure][name] - values[kind][measure][name] for name, kind in reference.items()]
            )
            for measure in names
        }
    return {"sets": entries, "macro": macro}


def _entry(part: SuiteSet, evaluations: Mapping[str, Evaluation], full: Mapping[str, str]) -> dict[str, Any]:
    """Return the numbers of one set; `full` maps each measure's name to its name with the set's relevance threshold."""
    entry: dict[str, Any] = {"queries": evaluations["run"].num_queries, "relevance": part.relevance}
    for kind, evaluation in evaluations.items():
        entry[kind] = {measure: evaluation.means[full[measure]] for measure in full}
    run, first_stage = evaluations["run"].per_query, evaluations.get("first_stage")
    if first_stage is not None:
        entry["worse"] = {
            measure: float(np.mean([run[query_id][key] < first_stage.per_query[query_id][key] for query_id in run]))
            for measure, key in full.items()
        }
    against = "baseline" if "baseline" in evaluations else "first_stage"
    if against in evaluations:
        compared = compare(evaluations["run"], evaluations[against])
        entry["comparison"] = {"against": against, **{measure: compared[key] for measure, key in full.items()}}
    return entry


def _macro(values: Sequence[np.ndarray]) -> dict[str, Any]:
    return {"mean": float(np.mean([part.mean() for part in values])), "interval": list(bootstrap_interval(values))}


def bootstrap_interval(
    values: Sequence[np.ndarray], samples: int = SAMPLES, level: float = LEVEL, seed: int = 0
) -> tuple[float, float]:
    """Return a percentile bootstrap interval of a macro mean over test sets (Efron and Tibshirani, 1993).

    For each sample, the queries of each set are drawn with replacement, and the mean over sets of the sets' means is
    computed. The sets are not drawn. So the interval shows the uncertainty from the choice of queries, not of sets.

    Args:
        values: Values of the queries of each set, float64 [queries].
        samples: Number of samples.
        level: Share of the samples inside the interval.
        seed: Seed of the draws.
    """
    generator = np.random.default_rng(seed)
    totals = np.zeros(samples)
    for part in values:
        rows = max(1, _AT_ONCE // len(part))
        for start in range(0, samples, rows):
            count = min(rows, samples - start)
            drawn = generator.integers(0, len(part), (count, len(part)))
            totals[start : start + count] += part[drawn].mean(axis=1)
    low, high = np.quantile(totals / len(values), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
