"""`ranker fuse`: fuse TREC runs into one by ranks or scores, with given, equal or tuned weights; needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from ranker.assembly.run import one_run, open_run
from ranker.data.ranking import separate_ties
from ranker.data.trec import read_qrels, read_run, write_run
from ranker.errors import ConfigError
from ranker.evaluation import fusion
from ranker.evaluation.measure_names import parse_measures
from ranker.evaluation.run_files import listed, only_run
from ranker.training.run_writer import write_json

if TYPE_CHECKING:  # ranker.types imports torch
    from ranker.types import Run

log = logging.getLogger(__name__)


@one_run()
def fuse(cfg: DictConfig) -> None:
    """Fuse the runs of `runs=`, and write `run.trec` and `fusion.json`.

    Raises:
        RankerError: An option or a file is wrong.
    """
    paths = [only_run("runs", Path(path)) for path in listed("runs", cfg.runs)]
    given = _weights(cfg, len(paths))
    method = fusion.Fusion(cfg.method, cfg.k, cfg.scaling)
    runs = [read_run(path) for path in paths]
    weights, tuning = given or [1.0] * len(runs), None
    if cfg.tune.qrels is not None:
        weights, tuning = _tuned(cfg, method, runs)
    fused = separate_ties(fusion.fuse(runs, method, weights, cfg.depth))
    folder = open_run(cfg)
    content = {"runs": list(map(str, paths)), "weights": weights, "queries": len(fused), "tuning": tuning}
    write_json(folder / "fusion.json", content)
    write_run(folder / "run.trec", fused, cfg.name)
    log.info("weights: %s", ", ".join(f"{weight:g}" for weight in weights))
    log.info("run: %s", folder / "run.trec")


def _weights(cfg: DictConfig, count: int) -> list[float] | None:
    """Return the weights of the configuration; None if none are given."""
    if cfg.weights is None:
        return None
    weights: Any = cfg.weights
    numbers = isinstance(weights, Sequence) and all(
        isinstance(weight, (int, float)) and not isinstance(weight, bool) for weight in weights
    )
    if not numbers or len(weights) != count or not any(weights):
        raise ConfigError(
            f"weights: expected {count} numbers, at least one above 0, such as [0.7,0.3]; got {weights!r}"
        )
    if cfg.tune.qrels is not None:
        raise ConfigError(
            f"weights: expected null beside tune.qrels, which chooses the weights, got {weights!r}; leave weights out"
        )
    return [float(weight) for weight in weights]


def _tuned(cfg: DictConfig, method: fusion.Fusion, runs: list[Run]) -> tuple[list[float], dict[str, Any]]:
    """Return the weights that are best for the dev queries, and the record of all trials."""
    parse_measures([cfg.tune.measure])
    qrels = read_qrels(Path(cfg.tune.qrels))
    dev = runs
    if cfg.tune.runs is not None:
        paths = listed("tune.runs", cfg.tune.runs)
        if len(paths) != len(runs):
            raise ConfigError(f"tune.runs: expected {len(runs)} runs in the order of runs, got {len(paths)}")
        dev = [read_run(only_run("tune.runs", Path(path))) for path in paths]
    queries = [query_id for query_id in qrels if any(query_id in run for run in dev)]
    if not queries:
        raise ConfigError(
            f"tune.qrels: expected judgements of queries of the runs, got {cfg.tune.qrels} with none of these queries"
        )
    weights, trials = fusion.tune(dev, method, qrels, cfg.tune.measure, cfg.tune.step, cfg.tune.relevance)
    if any(query_id in run for query_id in queries for run in runs):
        log.warning(
            "tune: the weights were chosen on queries of the run; measure the run on other queries, or set tune.runs"
        )
    log.info("tune: %d trials on %d queries", len(trials), len(queries))
    return weights, {"measure": cfg.tune.measure, "queries": len(queries), "trials": trials}
