"""Validate a scorer during its training: rank the candidates of each validation set, and measure the rankings."""

from __future__ import annotations

import logging
from functools import partial
from statistics import fmean
from typing import Any

import lightning.pytorch as pl

from ranker.data.collection import Collection
from ranker.data.ranking import are_equal
from ranker.data.score_batches import ScoreBatch, ScoreBatches
from ranker.evaluation.measure_names import parse_measures, with_relevance
from ranker.evaluation.metrics import evaluate
from ranker.evaluation.scoring import Devices, ScoreCollector
from ranker.models.interface import Scorer
from ranker.training.sharding import is_sharded
from ranker.types import Run

log = logging.getLogger(__name__)


class ValidatedModule(pl.LightningModule):
    """Validate a scorer: it ranks the candidates of each validation set, and the rankings' measures are logged.

    Args:
        scorer: Scores [batch, docs].
        measures: Names of measures (ir-measures), computed at every validation.
    """

    def __init__(self, scorer: Scorer, measures: list[str]) -> None:
        super().__init__()
        self.scorer, self.measures = scorer, measures
        self._collectors: dict[int, ScoreCollector] = {}  # key: index of the validation set

    def validation_step(self, batch: ScoreBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Score a batch of candidates of a validation set."""
        self._collectors.setdefault(dataloader_idx, ScoreCollector()).add(batch, self.scorer(batch.batch))

    def on_validation_epoch_end(self) -> None:
        """Gather each validation set's scores from all devices, and log their measures, equal on every device.

        Measures are logged as `val/MEASURE` for a single set. For a mix, they are logged as `val/SET/MEASURE` for each
        set, and their mean over the sets as `val/MEASURE`.
        """
        if self.trainer.sanity_checking:
            self._collectors.clear()
            return
        shown = str(parse_measures(self.measures)[0])
        devices = Devices(self.device, self.trainer.global_rank, self.trainer.world_size)
        for key, value in measured_sets(self.trainer, devices, self.measures, self._collectors).items():
            self.log(key, value, prog_bar=key == f"val/{shown}", sync_dist=False)

    def on_validation_end(self) -> None:
        """Free gathered weights if the strategy shards them."""
        if is_sharded(self.trainer.strategy):
            self.trainer.strategy.gather_no_more()  # type: ignore[attr-defined]


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
