"""Probabilities of relevance from scores: fitted maps, their calibration error, and a reliability diagram."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from scipy.optimize import isotonic_regression, minimize, minimize_scalar
from scipy.special import expit

from ranker.errors import CheckpointError, DataError
from ranker.evaluation.figures import BLUE, GREY, ORANGE, new_figure, save
from ranker.files.writing import write_whole
from ranker.types import Qrels, Run

METHODS = ("temperature", "platt", "isotonic")
BINS = 15
SMALLEST = 1e-12  # smaller probabilities are raised to this value before a logarithm


@dataclass(frozen=True)
class Calibration:
    """A non-decreasing map from scores to probabilities of relevance.

    Args:
        method: `temperature`: sigmoid(score / T) (Guo et al., 2017, arXiv:1706.04599); `platt`: sigmoid(a * score + b)
            with a >= 0 (Platt, 1999); `isotonic`: isotonic regression, with linear interpolation between the fitted
            scores (Zadrozny and Elkan, 2002).
        slope: 1 / T for `temperature`, a for `platt`, 0 for `isotonic`.
        offset: b for `platt`, else 0.
        scores: For `isotonic`: fitted scores, ascending.
        probabilities: For `isotonic`: the probability of each of these scores.
    """

    method: str
    slope: float = 0.0
    offset: float = 0.0
    scores: tuple[float, ...] = ()
    probabilities: tuple[float, ...] = ()

    @classmethod
    def fit(cls, method: str, scores: np.ndarray, relevant: np.ndarray) -> Self:
        """Fit a map: `isotonic` by least squares, the other methods by maximum likelihood.

        Args:
            method: See `Calibration`.
            scores: Scores [pairs].
            relevant: Whether the doc of each pair is relevant, bool [pairs].

        Raises:
            DataError: All pairs are relevant, or none is.
        """
        scores, relevant = np.asarray(scores, float), np.asarray(relevant, bool)
        if not relevant.any() or relevant.all():
            got = "relevant" if relevant.any() else "not relevant"
            raise DataError(f"calibration: expected relevant and other pairs, got {len(relevant)} pairs, all {got}")
        if method == "isotonic":
            knots, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
            means = np.bincount(inverse, relevant) / counts
            fitted = isotonic_regression(means, weights=counts).x
            # of consecutive scores with equal probability, keep the first and the last
            inner = np.r_[False, (fitted[1:-1] == fitted[:-2]) & (fitted[1:-1] == fitted[2:]), False][: len(fitted)]
            return cls(method, scores=tuple(knots[~inner]), probabilities=tuple(fitted[~inner]))
        spread = float(scores.std()) or 1.0
        if method == "temperature":
            found = minimize_scalar(
                lambda log: _loss(np.exp(log) / spread * scores, relevant), bounds=(-12, 12), method="bounded"
            )
            return cls(method, slope=float(np.exp(found.x)) / spread)
        centred = (scores - scores.mean()) / spread
        share = relevant.mean()
        start = [1.0, float(np.log(share / (1 - share)))]
        found = minimize(
            lambda part: _loss(part[0] * centred + part[1], relevant),
            start,
            jac=lambda part: _slope(part, centred, relevant),
            bounds=[(0, None), (None, None)],
            method="L-BFGS-B",
            options={"ftol": 1e-14, "gtol": 1e-10, "maxiter": 1000},
        )
        slope = float(found.x[0]) / spread
        return cls(method, slope=slope, offset=float(found.x[1]) - slope * float(scores.mean()))

    def __call__(self, scores: Any) -> np.ndarray:
        """Return the probabilities of scores of any shape, float64."""
        values = np.asarray(scores, float)
        if self.method == "isotonic":
            return np.interp(values, self.scores, self.probabilities)
        probabilities: np.ndarray = expit(self.slope * values + self.offset)
        return probabilities

    @property
    def keeps_order(self) -> bool:
        """Whether different scores have different probabilities."""
        return self.method != "isotonic" and self.slope > 0

    def record(self) -> dict[str, Any]:
        """Return the map as plain values for a JSON file."""
        if self.method == "isotonic":
            return {
                "method": self.method,
                "scores": list(map(float, self.scores)),
                "probabilities": list(map(float, self.probabilities)),
            }
        return {"method": self.method, "slope": self.slope, "offset": self.offset}

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read a map from `calibration.json` of `ranker calibrate`.

        Raises:
            CheckpointError: The file has no map.
        """
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))["map"]
            options: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()
            }
            made = cls(**options)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: expected calibration.json of ranker calibrate, got {error!r}") from error
        if made.method not in METHODS:
            raise CheckpointError(f"{path}: expected a method of {', '.join(METHODS)}, got {made.method!r}")
        return made


def judged_pairs(run: Run, qrels: Qrels, relevance: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of the judged queries' docs, and whether each doc is relevant; unjudged docs are not relevant.

    Args:
        run: query_id -> doc_id -> score.
        qrels: query_id -> doc_id -> grade.
        relevance: Smallest grade of a relevant doc.
    """
    pairs = [
        (score, qrels[query_id].get(doc_id, 0) >= relevance)
        for query_id, docs in run.items()
        if query_id in qrels
        for doc_id, score in docs.items()
    ]
    return np.array([score for score, _ in pairs], float), np.array([known for _, known in pairs], bool)


def quality(probabilities: np.ndarray, relevant: np.ndarray, bins: int = BINS) -> dict[str, float]:
    """Return the expected calibration error, the Brier score and the negative log-likelihood of probabilities.

    The calibration error is the mean over pairs of |mean probability - share of relevant docs| in the pair's bin (Guo
    et al., 2017). Bins have equal numbers of pairs.

    Args:
        probabilities: [pairs].
        relevant: Bool [pairs].
        bins: Number of bins.

    >>> quality(np.array([0.0, 0.0, 0.5, 0.5]), np.array([False, False, True, True]), bins=2)["ece"]
    0.25
    """
    parts = _binned(probabilities, relevant, bins)
    gaps = [len(p) * abs(p.mean() - y.mean()) for p, y in parts]
    clipped = np.clip(np.where(relevant, probabilities, 1 - probabilities), SMALLEST, 1)
    return {
        "ece": float(sum(gaps) / len(probabilities)),
        "brier": float(np.mean((probabilities - relevant) ** 2)),
        "nll": float(-np.log(clipped).mean()),
    }


def _binned(probabilities: np.ndarray, relevant: np.ndarray, bins: int) -> list[tuple[np.ndarray, np.ndarray]]:
    order = np.argsort(probabilities, kind="stable")
    parts = np.array_split(order, min(bins, len(order)))
    return [(probabilities[part], relevant[part]) for part in parts if len(part)]


def _loss(logits: np.ndarray, relevant: np.ndarray) -> float:
    """Return the mean negative log-likelihood."""
    return float(np.logaddexp(0, np.where(relevant, -logits, logits)).mean())


def _slope(part: Sequence[float], scores: np.ndarray, relevant: np.ndarray) -> np.ndarray:
    errors = expit(part[0] * scores + part[1]) - relevant
    return np.array([(errors * scores).mean(), errors.mean()])


def write_picture(folder: Path, curves: Mapping[str, np.ndarray], relevant: np.ndarray, name: str) -> Path:
    """Draw a reliability diagram: the share of relevant docs in each bin against the bin's mean probability.

    Args:
        folder: The run folder.
        curves: Name of a curve -> probabilities [pairs].
        relevant: Bool [pairs].
        name: Title.
    """
    figure, (axes,) = new_figure(4.2, 3.6)
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, label="calibrated")
    for (label, probabilities), color in zip(curves.items(), (ORANGE, BLUE), strict=False):
        parts = _binned(probabilities, relevant, BINS)
        axes.plot(
            [p.mean() for p, _ in parts], [y.mean() for _, y in parts], "o-", markersize=3, color=color, label=label
        )
    axes.set_xlabel("mean probability of a bin")
    axes.set_ylabel("share of relevant docs")
    axes.set_title(name, fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    return save(figure, folder, "reliability")


def write_calibration(path: Path, content: Mapping[str, Any]) -> None:
    """Write `calibration.json`."""
    with write_whole(path) as file:
        json.dump(dict(content), file, indent=2, allow_nan=False)
        file.write("\n")
