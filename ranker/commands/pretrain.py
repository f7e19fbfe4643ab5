"""`ranker pretrain`: train an encoder on the docs of a collection, and write a run folder with its weights."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import lightning.pytorch as pl
from omegaconf import DictConfig

from ranker.assembly.precision import settle_precision
from ranker.assembly.pretraining import build_model, build_objective, build_pretrain_data, save_pretrained
from ranker.assembly.rehearsal import check_steps, refused_in_fit, rehearse_optimization
from ranker.assembly.run import one_run, open_run
from ranker.assembly.scorer import optimization_of
from ranker.assembly.sharding import run_as_configured
from ranker.assembly.trainer import build_trainer
from ranker.config.stored import resumed_runs
from ranker.evaluation import learning_curves
from ranker.training.checkpoint_files import LAST, to_resume_from
from ranker.training.checkpoint_weights import load_checkpoint
from ranker.training.checkpointing import SaveLast
from ranker.training.options import NonFiniteOptions
from ranker.training.run_writer import write_json
from ranker.training.sharding import is_sharded
from ranker.training.throughput import Throughput

log = logging.getLogger(__name__)


@one_run()
def pretrain(cfg: DictConfig) -> None:
    """Train an encoder on the docs of a collection; `encoder.name` can load `model/` of the run folder."""
    started = time.perf_counter()
    folder = open_run(cfg)
    rehearse_optimization(cfg)
    objective = build_objective(cfg)
    pl.seed_everything(cfg.seed, verbose=False)
    model = build_model(cfg, objective)
    settle_precision(cfg, folder, model.encoder)
    run_as_configured(cfg, model)
    data = build_pretrain_data(cfg, objective, model.encoder)
    steps = len(data.plan)
    check_steps(cfg, steps)
    module = objective.module(
        model, optimization=optimization_of(cfg, steps), nonfinite=NonFiniteOptions(cfg.nonfinite)
    )
    start = to_resume_from(Path(cfg.checkpoint)) if cfg.resume else None
    throughput = Throughput()
    last = SaveLast(folder / "checkpoints" / LAST, cfg.save_every_steps, start, command="ranker pretrain")
    trainer = build_trainer(cfg, folder, [throughput, last], cfg.get("logger"), command="pretrain")
    with refused_in_fit():
        trainer.fit(module, datamodule=data, ckpt_path=start, weights_only=True)
    if trainer.is_global_zero:
        if is_sharded(trainer.strategy):
            model = build_model(cfg, objective)
            load_checkpoint(objective.module(model), folder / "checkpoints" / LAST)
        save_pretrained(folder / "model", model, cfg)
        result = {
            "steps": trainer.global_step,
            "skipped_steps": module.skipped_steps,
            "texts": len(data.draws),
            **throughput.report(),
            "seconds": time.perf_counter() - started,
        }
        write_json(folder / "result.json", result)
        learning_curves.write_curves(
            resumed_runs(folder) if cfg.resume else [folder], None, f"{cfg.name}, {folder.name}"
        )
        log.info("run folder: %s (encoder.name=%s starts from it)", folder, folder / "model")
