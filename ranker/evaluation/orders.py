"""Measure how much a listwise model depends on the order of its input docs, by scoring lists in several orders."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from ranker.data.ranking import separate_ties
from ranker.data.trec import write_run
from ranker.evaluation.metrics import evaluate
from ranker.files.writing import write_whole

if TYPE_CHECKING:
    from ranker.data.collection import Collection
    from ranker.types import Qrels, Run

log = logging.getLogger(__name__)


def kendall(first: np.ndarray, second: np.ndarray) -> float:
    """Return Kendall's tau-b between two arrays of scores of the same docs, both [docs].

    Returns:
        Tau-b; NaN for fewer than two docs or constant scores.
    """
    from scipy.stats import kendalltau  # imported here, because the import takes a second

    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return math.nan
    return float(kendalltau(first, second).statistic)


def order_sensitivity(runs: Sequence[Run], qrels: Qrels, measures: Sequence[str], relevance: int = 1) -> dict[str, Any]:
    """Compare runs in which the same lists were scored in different orders.

    Args:
        runs: One run for each order.
        qrels: query_id -> doc_id -> relevance; may be empty.
        measures: ir-measures names.
        relevance: See `write_evaluation`.

    Returns:
        A dict. `orders` is the number of orders. `kendall_tau` has tau-b, averaged over pairs of orders for each query:
        its `mean` over queries, its `lowest` value, and the number of `queries` with a tau-b. `measures` has the
        `values` of each measure, one for each order.
    """
    taus = []
    for query_id, docs in runs[0].items():
        scores = [np.array([run[query_id][doc_id] for doc_id in docs]) for run in runs]
        found = [kendall(*pair) for pair in combinations(scores, 2)]
        found = [tau for tau in found if not math.isnan(tau)]
        if found:
            taus.append(fmean(found))
    values: dict[str, list[float]] = {}
    if any(qrels.values()):
        for run in runs:
            for name, value in evaluate(separate_ties(run), qrels, measures, relevance).means.items():
                values.setdefault(name, []).append(value)
    return {
        "orders": len(runs),
        "kendall_tau": {
            "mean": fmean(taus) if taus else None,
            "lowest": min(taus, default=None),
            "queries": len(taus),
        },
        "measures": {name: {"values": parts} for name, parts in values.items()},
    }


def write_orders(folder: Path, runs: Sequence[Run], collection: Collection, measures: Sequence[str]) -> None:
    """Write the run of each further order, `order-2.trec` and so on, and `orders.json`; log a summary.

    Args:
        folder: The set's folder, which has the run of the original order as `run.trec`.
        runs: The run of the original order, then those of the other orders.
        collection: The set.
        measures: ir-measures names.
    """
    content = order_sensitivity(runs, dict(collection.qrels), measures, collection.relevance)
    for number, run in enumerate(runs[1:], start=2):
        write_run(folder / f"order-{number}.trec", separate_ties(run), f"order{number}")
    with write_whole(folder / "orders.json") as file:
        json.dump(content, file, allow_nan=False, indent=2)
        file.write("\n")
    _report(content)


def _report(content: Mapping[str, Any]) -> None:
    tau = content["kendall_tau"]
    if tau["mean"] is None:
        log.info("%d orders: no query has two docs with different scores", content["orders"])
        return
    log.info(
        "%d orders of each list: Kendall's tau between two of them is %.4f on average, and %.4f for the query that "
        "depends on the order most (%d queries)",
        content["orders"], tau["mean"], tau["lowest"], tau["queries"],
    )  # fmt: skip
    for name, entry in content["measures"].items():
        log.info("  %s: %.4f to %.4f", name, min(entry["values"]), max(entry["values"]))
