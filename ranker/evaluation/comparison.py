"""Compare runs on the same queries: paired tests of all pairs of runs, corrected together, and overlap of rankings."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from ranker.data.ranking import rank_docs
from ranker.evaluation.metrics import Evaluation
from ranker.evaluation.report import compare
from ranker.evaluation.significance import holm

if TYPE_CHECKING:
    from ranker.types import Run


def compare_pairs(evaluations: Mapping[str, Evaluation]) -> list[dict[str, Any]]:
    """Compare all pairs of runs with the tests of `ranker.evaluation.report.compare`.

    Args:
        evaluations: Label of a run -> its evaluation, on the same judged queries.

    Returns:
        A dict for each measure and pair of runs. Its keys are `measure`, `run` and `baseline` (the labels of the later
        and the earlier run), `delta` (run minus baseline), `p_value`, `p_value_t`, `p_value_holm`, `wins`, `losses` and
        `ties`. `p_value_holm` is `p_value` with Holm's correction over all pairs and measures.
    """
    measures = list(next(iter(evaluations.values())).means)
    found: list[dict[str, Any]] = []
    for earlier, later in combinations(evaluations, 2):
        compared = compare(evaluations[later], evaluations[earlier])
        for name in measures:
            found.append({**compared[name], "measure": name, "run": later, "baseline": earlier})
    corrected = holm({str(i): float(entry["p_value"]) for i, entry in enumerate(found)})
    for i, entry in enumerate(found):
        entry["p_value_holm"] = corrected[str(i)]
    return sorted(found, key=lambda entry: measures.index(entry["measure"]))


def overlap(one: Run, other: Run, depth: int) -> float:
    """Return the overlap of the first `depth` docs of two runs, a mean over the queries of both runs.

    The overlap of a query is the number of common docs divided by the length of the longer list.

    >>> overlap({"q": {"a": 3.0, "b": 2.0, "c": 1.0}}, {"q": {"b": 9.0, "d": 8.0, "a": 7.0}}, 2)
    0.5
    """
    shares = []
    for query_id in {**one, **other}:
        first, second = (set(rank_docs(run.get(query_id, {}))[:depth]) for run in (one, other))
        if first or second:
            shares.append(len(first & second) / max(len(first), len(second)))
    return float(np.mean(shares)) if shares else 0.0
