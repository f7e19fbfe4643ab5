"""Compute the measures of each validation set during a training."""

from __future__ import annotations

import logging
from functools import partial
from statistics import fmean
from typing import Any

from ranker.data.collection import Collection
from ranker.data.dataset import ScoreBatches
from ranker.data.ranking import are_equal
from ranker.evaluation.measure_names import parse_measures, with_relevance
from ranker.evaluation.metrics import evaluate
from ranker.evaluation.scoring import Devices, ScoreCollector
from ranker.types import Run

log = logging.getLogger(__name__)


def measured_sets(
    trainer: Any, devices: Devices, measures: list[str], collectors: dict[int, ScoreCollector]
) -> dict[str, float]:
    """Return the values of a validation that are logged; they are equal on every device. All processes must call this.

    Args:
        trainer: Lightning's Trainer, whose data module has `val_sets`.
        devices: This process's device.
        measures: Names of measures.
        collectors: Index of the validation set -> this device's scores. They are gathered and then cleared.
    """
    sets: dict[str, Collection] = trainer.datamodule.val_sets
    loaders: Any = trainer.val_dataloaders
    loaders = loaders if isinstance(loaders, list) else [loaders]
    logged: dict[str, float] = {}
    measured: dict[str, list[float]] = {}
    for i, ((name, collection), loader) in enumerate(zip(sets.items(), loaders, strict=True)):
        batches: ScoreBatches = loader.dataset
        run = collectors.setdefault(i, ScoreCollector()).run(batches, devices)
        measure_here = partial(measures_of_run, run or {}, collection, measures, trainer.global_step)
        for measure, value in devices.broadcast(devices.on_first(measure_here)).items():
            measured.setdefault(measure, []).append(value)
            logged[f"val/{name}/{measure}" if name else f"val/{measure}"] = value
    if "" not in sets:
        logged |= {
            f"val/{measure}": fmean(of_sets) for measure, of_sets in measured.items() if len(of_sets) == len(sets)
        }
    return logged


def measures_of_run(run: Run, collection: Collection, measures: list[str], step: int) -> dict[str, float]:
    """Return a run's mean measures by their reported names, and by the names in `measures` where these differ.

    A reported name includes the collection's relevance threshold, such as AP(rel=2). `monitor` uses the name without
    the threshold.

    Args:
        run: The run.
        collection: The collection with the judgements.
        measures: Names of measures.
        step: The optimizer step, for the log.
    """
    if are_equal(run):
        log.warning(
            "validation at step %d: all candidates of each query have the same score, so the measures are those of "
            "an order by ids; the model has collapsed: lower optim.lr, or use an earlier checkpoint",
            step,
        )
    qrels: Any = collection.qrels
    means = evaluate(run, qrels, measures, collection.relevance).means
    for configured in parse_measures(measures):
        (measured,) = with_relevance([configured], collection.relevance)
        means.setdefault(str(configured), means[str(measured)])
    return means
