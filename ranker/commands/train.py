"""`ranker train`: train a reranker, test its best state, and leave a run folder."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from omegaconf import DictConfig, OmegaConf

from ranker.assembly.data import build_data, load_splits, start_from_docs
from ranker.assembly.evaluation import evaluate_sets, print_sets
from ranker.assembly.precision import settle_precision
from ranker.assembly.refresh import build_refresh, check_refresh
from ranker.assembly.rehearsal import check_length, refused_in_fit, rehearse_training
from ranker.assembly.report import Report
from ranker.assembly.run import cfg_values, one_run, open_run
from ranker.assembly.scorer import build_loss, build_scorer, optimization_of, training_module
from ranker.assembly.sharding import run_as_configured, whole_scorer
from ranker.assembly.suite import validation_suite
from ranker.assembly.trainer import build_trainer
from ranker.checkpoint import save_merged, save_model
from ranker.config.stored import resumed_runs
from ranker.config.trainer import FSDP
from ranker.data.collection import Splits
from ranker.data.pair_cuts import warn_of_other_cuts
from ranker.evaluation import learning_curves
from ranker.evaluation.scoring import Devices
from ranker.models.interface import Scorer
from ranker.training import dashboards
from ranker.training.checkpoint_files import LAST, read_checkpoint, to_resume_from
from ranker.training.checkpoint_weights import load_checkpoint
from ranker.training.checkpointing import SaveBest, SaveLast
from ranker.training.options import NonFiniteOptions
from ranker.training.rerank_module import RerankModule
from ranker.training.run_writer import write_json
from ranker.training.sharding import is_sharded
from ranker.training.soundness import check_scores
from ranker.training.throughput import Throughput

log = logging.getLogger(__name__)


@one_run()
def train(cfg: DictConfig) -> float | None:
    """Train a reranker, test its best state, and leave a run folder.

    Returns:
        The best value of `monitor`, or None.
    """
    started = time.perf_counter()
    folder = open_run(cfg)
    rehearse_training(cfg)
    pl.seed_everything(cfg.seed, verbose=False)
    scorer = build_scorer(cfg)  # before the data: reading a large collection takes longer than the check of a model
    settle_precision(cfg, folder, scorer.encoder)
    check_scores(scorer)
    splits = load_splits(cfg)
    if cfg.suite is not None:
        splits = replace(splits, suite=validation_suite(cfg, splits))
    check_refresh(cfg, scorer)
    run_as_configured(cfg, scorer)
    start_from_docs(cfg, splits, scorer)
    data = build_data(cfg, splits, scorer)
    refresh = build_refresh(cfg, data, folder)
    steps_per_epoch = len(data.train_steps().plan)
    check_length(cfg, splits, steps_per_epoch)
    module = _module(cfg, folder, scorer, steps_per_epoch)
    module.refresh = refresh
    start = to_resume_from(Path(cfg.checkpoint)) if cfg.resume else None
    throughput = Throughput()
    best = SaveBest(folder / "checkpoints", cfg.monitor, start.parent if start is not None else None)
    last = SaveLast(folder / "checkpoints" / LAST, cfg.save_every_steps, start)
    keeps_best = [best] if cfg.monitor is not None and splits.has_validation else []
    trainer = build_trainer(cfg, folder, [throughput, *keeps_best, last], cfg.get("logger"))
    with refused_in_fit():
        trainer.fit(module, datamodule=data, ckpt_path=start, weights_only=True)
    if is_sharded(trainer.strategy):
        scorer = whole_scorer(cfg, trainer, "best" if best.best_model_path else "last")
    elif best.best_model_path:
        load_checkpoint(module, Path(best.best_model_path))
    if trainer.is_global_zero:
        _save(cfg, folder, scorer)  # before the test: the model is kept if the test fails
        if scorer.reads == "pairs":
            warn_of_other_cuts(data.train_steps())
    pruned = any(getattr(callback, "pruned", False) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    tested: dict[str, dict[str, Any]] = {}
    page = Report(cfg)
    if not pruned:  # a training that a sweep pruned is not tested
        with last.ends_at_sigterm(trainer):
            tested = evaluate_sets(cfg, folder, scorer, data, Devices.of_trainer(trainer), cfg.depth, report=page)
    objective = float(best.best_model_score) if best.best_model_score is not None else None
    if trainer.is_global_zero:
        dashboards.log_tests(trainer, {name: metrics["measures"] for name, metrics in tested.items()})
        result = {
            "objective": objective,
            "monitor": cfg.monitor,
            "best_step": _step_of(best),
            "steps": trainer.global_step,
            "skipped_steps": module.skipped_steps,
            "measures": {name: metrics["measures"] for name, metrics in tested.items()},
            **throughput.report(),
            **({"mining": refresh.report()} if refresh is not None else {}),
            "seconds": time.perf_counter() - started,
            "pruned": pruned,
        }
        _report(cfg, folder, result, page, trainer, splits)
        print_sets(tested)
        log.info(
            "run folder: %s (model/ loads in transformers and sentence-transformers; evaluation/ holds the runs)",
            folder,
        )
    return objective


def _module(cfg: DictConfig, folder: Path, scorer: Scorer, steps_per_epoch: int) -> RerankModule:
    """Build the module that trains a scorer."""
    return training_module(cfg, scorer)(
        scorer,
        list(cfg.measures),
        loss=build_loss(cfg),
        optimization=optimization_of(cfg, steps_per_epoch),
        # a step of sharded weights can't be stored for `ranker replay`
        nonfinite=NonFiniteOptions(cfg.nonfinite, None if cfg.trainer.strategy == FSDP else folder / "nonfinite"),
    )


def _save(cfg: DictConfig, folder: Path, scorer: Scorer) -> None:
    """Write `model/`, and with `lora.merge` also `merged/`, the model with the adapters added to its weights."""
    save_model(folder / "model", scorer, cfg)
    if OmegaConf.select(cfg, "encoder.lora.merge", default=False):
        save_merged(folder / "merged", scorer, cfg)


def _report(
    cfg: DictConfig, folder: Path, result: dict[str, Any], page: Report, trainer: pl.Trainer, splits: Splits
) -> None:
    """Write `result.json`, the curves and the page, and show the results on the dashboards."""
    write_json(folder / "result.json", result)
    runs = resumed_runs(folder) if cfg.resume else [folder]
    if page.wanted:
        learning_curves.write_curves(runs, cfg.monitor, f"{cfg.name}, {folder.name}")
    facts = {"Run": folder.name, "Steps": str(result["steps"]), "Time": f"{result['seconds']:.0f} s"}
    if result["objective"] is not None:
        facts[f"Best {cfg.monitor}"] = f"{result['objective']:.4f} at step {result['best_step']}"
    page.write(folder, f"Training of {cfg.name}", facts, runs, cfg.monitor)
    queries = {name: splits.tests[name].queries for name in result["measures"]}
    dashboards.report(trainer.loggers, folder, queries, cfg_values(cfg), result["objective"])


def _step_of(best: SaveBest) -> int | None:
    """Return the optimizer step of the best checkpoint; None if there is no checkpoint."""
    if not best.best_model_path or not Path(best.best_model_path).is_file():
        return None
    return int(read_checkpoint(Path(best.best_model_path), mmap=True)["global_step"])
