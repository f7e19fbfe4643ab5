"""Fuse runs into one: sums of reciprocal ranks or of scaled scores, with weights that dev queries can choose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ranker.data.ranking import rank_docs, scores_of
from ranker.errors import ConfigError
from ranker.evaluation.metrics import evaluate

if TYPE_CHECKING:
    from ranker.types import Qrels, Run

METHODS, SCALINGS = ("rrf", "weighted"), ("minmax", "zscore", "none")
MAX_TRIALS = 2000  # largest number of weight combinations to try


@dataclass(frozen=True)
class Fusion:
    """A method that computes one score per doc from several runs.

    `rrf` sums `1 / (k + rank)` over the runs that have the doc (reciprocal rank fusion: Cormack, Clarke and Büttcher,
    SIGIR 2009). `weighted` sums the scaled scores (CombSUM: Fox and Shaw, TREC-2, 1994; scaling by the smallest and the
    largest score of the query: Lee, SIGIR 1997). A run without the doc adds its lowest scaled score for the query. In
    both methods, the contribution of a run is multiplied by the run's weight.

    Args:
        method: `rrf` or `weighted`.
        k: The constant of `rrf`; with a larger constant, ranks differ less.
        scaling: Scaling of the scores of `weighted`, run by run and query by query: `minmax` (0 to 1), `zscore` (mean 0
            and standard deviation 1, of the population), or `none`. Where all scores are equal, the result is 0.
    """

    method: str = "rrf"
    k: float = 60.0
    scaling: str = "minmax"

    def contributions(self, docs: Mapping[str, float]) -> tuple[dict[str, float], float]:
        """Return a run's contribution to the score of each of its docs for a query, and to the score of any other doc.

        Args:
            docs: doc_id -> score of one query.
        """
        if not docs:
            return {}, 0.0
        if self.method == "rrf":
            return {doc_id: 1.0 / (self.k + rank) for rank, doc_id in enumerate(rank_docs(docs), 1)}, 0.0
        scores = scores_of(docs)
        if self.scaling != "none":
            low, centre = scores.min(), scores.min() if self.scaling == "minmax" else scores.mean()
            width = scores.max() - low if self.scaling == "minmax" else scores.std()
            equal = scores.max() == low
            scores = np.zeros_like(scores) if equal else (scores - centre) / width
        return dict(zip(docs, scores.tolist(), strict=True)), float(scores.min())


def fuse(runs: Sequence[Run], fusion: Fusion, weights: Sequence[float], depth: int | None = None) -> Run:
    """Fuse runs; queries keep the order of the first run that has them.

    Args:
        runs: The runs.
        fusion: The method.
        weights: A weight of each run, at least 0.
        depth: Number of docs to keep for each query; None: all.

    >>> both = [{"q": {"a": 9.0, "b": 8.0}}, {"q": {"b": 0.3, "c": 0.2}}]
    >>> fuse(both, Fusion("rrf", k=0), [1.0, 1.0])
    {'q': {'b': 1.5, 'a': 1.0, 'c': 0.5}}
    """
    parts = list(_parts(runs, fusion))
    return _summed(parts, weights, depth)


_Part = tuple[str, list[str], np.ndarray]  # query_id, doc_ids, contributions float64 [runs, docs]


def _parts(runs: Sequence[Run], fusion: Fusion) -> Iterator[_Part]:
    """Yield each query with its docs and each run's contributions to their scores."""
    for query_id in dict.fromkeys(query_id for run in runs for query_id in run):
        of_runs = [fusion.contributions(run.get(query_id, {})) for run in runs]
        doc_ids = list(dict.fromkeys(doc_id for added, _ in of_runs for doc_id in added))
        table = [[added.get(doc_id, missing) for doc_id in doc_ids] for added, missing in of_runs]
        yield query_id, doc_ids, np.array(table, float).reshape(len(runs), len(doc_ids))


def _summed(parts: Sequence[_Part], weights: Sequence[float], depth: int | None) -> Run:
    fused: Run = {}
    for query_id, doc_ids, table in parts:
        # math.fsum is exact, so the order of the runs changes no score
        scores = [
            math.fsum(weight * value for weight, value in zip(weights, column, strict=True))
            for column in table.T.tolist()
        ]
        scored = dict(zip(doc_ids, scores, strict=True))
        fused[query_id] = {doc_id: scored[doc_id] for doc_id in rank_docs(scored)[:depth]}
    return fused


def simplex(count: int, step: float) -> list[tuple[float, ...]]:
    """Return all weights of `count` runs that sum to 1, in multiples of `step`.

    Raises:
        ConfigError: The step does not divide 1, or there are more than `MAX_TRIALS` combinations.

    >>> simplex(2, 0.5)
    [(0.0, 1.0), (0.5, 0.5), (1.0, 0.0)]
    """
    parts = round(1 / step)
    if abs(parts * step - 1) > 1e-9:
        raise ConfigError(f"tune.step: expected a step that divides 1, as 0.1 or 0.05, got {step:g}")
    trials = math.comb(parts + count - 1, count - 1)
    if trials > MAX_TRIALS:
        raise ConfigError(
            f"tune.step: expected at most {MAX_TRIALS} combinations of weights, got {trials} for {count} runs in steps "
            f"of {step:g}; set a larger step"
        )

    def split(left: int, runs: int) -> Iterator[tuple[int, ...]]:
        if runs == 1:
            yield (left,)
            return
        for first in range(left + 1):
            for rest in split(left - first, runs - 1):
                yield (first, *rest)

    return [tuple(part / parts for part in whole) for whole in split(parts, count)]


def tune(
    runs: Sequence[Run], fusion: Fusion, qrels: Qrels, measure: str, step: float = 0.1, relevance: int = 1
) -> tuple[list[float], list[dict[str, object]]]:
    """Choose the weights with the best mean of a measure over the judged queries.

    Of several best combinations of weights, the one closest to equal weights is chosen; in a further tie, the first
    one.

    Args:
        runs: The runs of the dev queries.
        fusion: The method.
        qrels: Judgements of the dev queries: query_id -> doc_id -> relevance.
        measure: An ir-measures name.
        step: Weights are multiples of this number and sum to 1.
        relevance: Smallest grade that binary measures count as relevant.

    Returns:
        The weights, and all trials with `weights` and `value`, in the order of `simplex`.

    Raises:
        ConfigError: The step or the measure is wrong.
        DataError: No query is judged.
    """
    judged = {query_id: docs for query_id, docs in qrels.items() if any(query_id in run for run in runs)}
    parts = [part for part in _parts(runs, fusion) if part[0] in judged]
    trials: list[dict[str, object]] = []
    best: tuple[float, float, list[float]] | None = None
    for weights in simplex(len(runs), step):
        means = evaluate(_summed(parts, weights, None), judged, [measure], relevance).means
        value = next(iter(means.values()))
        trials.append({"weights": list(weights), "value": value})
        unequal = sum((weight - 1 / len(runs)) ** 2 for weight in weights)
        if best is None or value > best[0] + 1e-12 or (abs(value - best[0]) <= 1e-12 and unequal < best[1] - 1e-12):
            best = value, unequal, list(weights)
    assert best is not None
    return best[2], trials
