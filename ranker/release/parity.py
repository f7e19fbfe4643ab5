"""Compare an export with the original: score gaps, order, nDCG@10, speed and size; refuse large differences."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from ranker.errors import DataError
from ranker.evaluation.metrics import evaluate
from ranker.evaluation.suite import LEVEL, SAMPLES, bootstrap_interval
from ranker.types import Qrels, Run

MEASURE = "nDCG@10"
WARM_UP = 64  # number of pairs that are scored before the time is measured
# largest allowed gap of two scores, divided by the standard deviation of the scores; see docs/export.md
BOUNDS = {"float32": 1e-3, "fp16": 0.05, "bf16": 0.3, "int8": 1.0}


@dataclass(frozen=True)
class ScoredSet:
    """A test set's pairs with the scores of both programs.

    Args:
        query_ids: Query of each pair [pairs].
        doc_ids: Doc of each pair [pairs].
        original: Scores of the original, float32 [pairs].
        exported: Scores of the export, float32 [pairs].
        alike: Whether both programs truncate a pair's texts in the same way, bool [pairs].
        qrels: query_id -> doc_id -> relevance; may be empty.
        relevance: Smallest relevant grade.
    """

    query_ids: Sequence[str]
    doc_ids: Sequence[str]
    original: np.ndarray
    exported: np.ndarray
    alike: np.ndarray
    qrels: Qrels
    relevance: int = 1

    def run(self, scores: np.ndarray) -> Run:
        """Return scores [pairs] as a run."""
        run: Run = {}
        for query_id, doc_id, score in zip(self.query_ids, self.doc_ids, scores.tolist(), strict=True):
            run.setdefault(query_id, {})[doc_id] = score
        return run


def compare(part: ScoredSet) -> dict[str, Any]:
    """Compute the differences between the scores of two programs.

    Returns:
        A dict. `queries` and `pairs` are numbers. `score_std` is the standard deviation of the original's scores. Over
        the pairs that both programs truncate in the same way, there are `largest_gap` and `mean_gap` of the scores, and
        `gap_share`, the largest gap divided by `score_std`. For all other pairs, there are their number
        `pairs_cut_otherwise`, and `largest_gap_cut_otherwise`. `kendall_tau` is the mean over queries of tau-b between
        the two orders of all docs. If there are judgements, `nDCG@10` has `original`, `export`, `change`, and the
        `interval` of the change that contains 95 % of 10,000 bootstrap samples of the queries.

    Raises:
        DataError: A score of the export is not finite.
    """
    if not np.isfinite(part.exported).all():
        count = int((~np.isfinite(part.exported)).sum())
        raise DataError(f"export: expected finite scores, got {count} of {len(part.exported)} that are not")
    gaps = np.abs(part.exported.astype(np.float64) - part.original)
    alike = gaps[part.alike]
    spread = float(part.original.astype(np.float64).std())
    largest = float(alike.max(initial=0.0))
    original, exported = part.run(part.original), part.run(part.exported)
    content: dict[str, Any] = {
        "queries": len(original),
        "pairs": len(gaps),
        "score_std": spread,
        "largest_gap": largest,
        "mean_gap": float(alike.mean()) if len(alike) else 0.0,
        "gap_share": largest / spread if spread else float(largest > 0),
        "pairs_cut_otherwise": int((~part.alike).sum()),
        "largest_gap_cut_otherwise": float(gaps[~part.alike].max(initial=0.0)),
        "kendall_tau": _mean_tau(original, exported),
    }
    judged = {query_id: docs for query_id, docs in part.qrels.items() if query_id in original and docs}
    if judged:
        before, after = (evaluate(run, judged, [MEASURE], part.relevance) for run in (original, exported))
        changes = np.array([after.per_query[key][MEASURE] - before.per_query[key][MEASURE] for key in judged])
        content[MEASURE] = {
            "original": before.means[MEASURE],
            "export": after.means[MEASURE],
            "change": after.means[MEASURE] - before.means[MEASURE],
            "interval": list(bootstrap_interval([changes], SAMPLES, LEVEL)),
        }
    return content


def _mean_tau(original: Run, exported: Run) -> float | None:
    """Return the mean over queries of tau-b; None if no query has two docs with different scores."""
    values = [
        float(kendalltau(list(scores.values()), [exported[query_id][doc_id] for doc_id in scores]).statistic)
        for query_id, scores in original.items()
        if len(scores) > 1
    ]
    known = [value for value in values if np.isfinite(value)]
    return float(np.mean(known)) if known else None


def faults(sets: Mapping[str, Mapping[str, Any]], max_gap: float, max_loss: float) -> list[str]:
    """Return the reasons why an export is refused, one line each; empty if it is accepted.

    Args:
        sets: Name -> result of `compare`.
        max_gap: Upper bound of `gap_share`.
        max_loss: Upper bound of the loss of nDCG@10.
    """
    found = []
    for name, content in sets.items():
        if content["gap_share"] > max_gap:
            found.append(
                f"{name}: expected scores within max_gap={max_gap:g} of the original's standard deviation "
                f"{content['score_std']:.4g}, got a gap of {content['largest_gap']:.4g}, which is "
                f"{content['gap_share']:.3g} of it"
            )
        change = content.get(MEASURE, {}).get("change", 0.0)
        if change < -max_loss:
            found.append(f"{name}: expected {MEASURE} to fall by at most max_loss={max_loss:g}, got {change:+.4f}")
    return found


def timed(
    score: Callable[[Sequence[tuple[str, str]]], np.ndarray], pairs: Sequence[tuple[str, str]]
) -> tuple[np.ndarray, float]:
    """Return the scores of pairs and, measured after a warm-up, the pairs per second with tokenization."""
    score(pairs[:WARM_UP])
    started = time.perf_counter()
    scores = score(pairs)
    return scores, len(pairs) / (time.perf_counter() - started)
