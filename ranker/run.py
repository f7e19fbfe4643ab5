"""The program's table of contents: train() and evaluate(). The only place that turns configuration into objects."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.strategies import DDPStrategy, Strategy
from omegaconf import DictConfig, OmegaConf
from transformers.utils import logging as transformers_logging

from ranker import evaluation
from ranker.checkpoint import load_checkpoint, load_scorer, read_description, save_model
from ranker.config import check
from ranker.data.collection import Splits
from ranker.data.datamodule import BatchOptions, RankData, TextLimits
from ranker.data.trec import read_qrels, read_run
from ranker.entry import global_rank
from ranker.errors import CheckpointError, ConfigError
from ranker.retrieval.bm25 import with_candidates
from ranker.training import loggers
from ranker.training.checkpointing import SaveLast
from ranker.training.rerank_module import RerankModule
from ranker.training.run_writer import environment, log_to, write_json, write_text
from ranker.training.throughput import Throughput
from ranker.types import Run

log = logging.getLogger(__name__)


def train(cfg: DictConfig) -> float | None:
    """Train a reranker, test its best state, and leave a run folder.

    Returns:
        The best value of `monitor`, or None.
    """
    started = time.perf_counter()
    check(cfg)
    folder = _open_run(cfg)
    pl.seed_everything(cfg.seed, verbose=False)
    splits = _load_splits(cfg)
    scorer = _build_scorer(cfg)
    data = _build_data(cfg, splits, scorer)
    module = RerankModule(
        scorer,
        list(cfg.measures),
        loss=instantiate(cfg.loss),
        optimizer=instantiate(cfg.optim),
        schedule=instantiate(cfg.schedule),
        weight_decay=cfg.optim.weight_decay,
        max_norm=cfg.trainer.gradient_clip_val,
        seed=cfg.seed,
        on_evaluated=_writer(folder, splits, cfg),
    )
    throughput = Throughput()
    best = ModelCheckpoint(
        folder / "checkpoints", filename="best", monitor=cfg.monitor, mode="max", save_top_k=1, enable_version_counter=False, auto_insert_metric_name=False
    )  # fmt: skip
    callbacks: list[pl.Callback] = [throughput, SaveLast(folder / "checkpoints" / "last.ckpt", cfg.save_every_steps)]
    if cfg.monitor is not None and splits.val is not None:
        callbacks.append(best)
    trainer = _trainer(cfg, folder, callbacks, cfg.get("logger"))
    trainer.fit(module, datamodule=data, ckpt_path=_resume_from(cfg), weights_only=True)
    if best.best_model_path:
        load_checkpoint(module, Path(best.best_model_path))
    trainer.test(module, datamodule=data, verbose=False)
    value = float(best.best_model_score) if best.best_model_score is not None else None
    if trainer.is_global_zero:
        save_model(folder / "model", scorer, cfg)
        measures = {name: _means(folder, name) for name in splits.tests}
        write_json(
            folder / "result.json",
            {
                "objective": value,
                "monitor": cfg.monitor,
                "best_step": _step_of(best),
                "steps": trainer.global_step,
                "measures": measures,
                **throughput.report(),
                "seconds": time.perf_counter() - started,
            },
        )
        for name in splits.tests:
            evaluation.print_table(name, json.loads((folder / "evaluation" / name / "metrics.json").read_text(encoding="utf-8")))
        log.info("run folder: %s (model/ loads in transformers and sentence-transformers; evaluation/ holds the runs)", folder)
    return value


def evaluate(cfg: DictConfig) -> None:
    """Measure a run file, or re-rank a collection's candidates with a checkpoint and measure that."""
    check(cfg)
    if (cfg.run is None) == (cfg.checkpoint is None):
        raise ConfigError(
            "evaluate.py: expected either run=FILE qrels=FILE or checkpoint=RUN_FOLDER, got " + ("both" if cfg.run else "neither")
        )
    if cfg.run is not None:
        _evaluate_file(cfg)
    else:
        _evaluate_checkpoint(cfg)


def _evaluate_file(cfg: DictConfig) -> None:
    if cfg.qrels is None:
        raise ConfigError("qrels: expected the judgements of run=, got none; set qrels=FILE")
    run, qrels = read_run(Path(cfg.run)), read_qrels(Path(cfg.qrels))
    baseline = read_run(Path(cfg.baseline)) if cfg.baseline else None
    folder = _open_run(cfg)
    name = Path(cfg.run).name.removesuffix(".gz").removesuffix(".run").removesuffix(".trec")
    written = evaluation.write_evaluation(folder / "evaluation" / name, run, qrels, list(cfg.measures), cfg.relevance, baseline, tag=name)
    evaluation.print_table(name, written)
    log.info("evaluation: %s", folder / "evaluation" / name)


def _evaluate_checkpoint(cfg: DictConfig) -> None:
    description = read_description(Path(cfg.checkpoint))
    trained = OmegaConf.create(description)
    if cfg.data is None and "data" not in trained:
        raise ConfigError(f"data: expected data=..., since {cfg.checkpoint} does not say what it was trained on")
    scorer = load_scorer(Path(cfg.checkpoint), cfg.weights)
    source = cfg.data if cfg.data is not None else trained.data
    splits = instantiate({key: value for key, value in source.items() if key not in ("negatives", "teacher", "random_negatives")}).load()
    chosen = {"test": splits.tests, "val": {"val": splits.val}, "train": {"train": splits.train}}.get(cfg.split)
    if chosen is None or None in chosen.values():
        raise ConfigError(f"split: expected one of test, val, train that the data has, got {cfg.split!r}")
    depth = cfg.depth or trained.get("depth", 100)
    splits = with_candidates(Splits(None, None, chosen), depth, Path(cfg.cache_dir))
    _print_notice(splits)
    folder = _open_run(cfg)
    data = RankData(
        splits, scorer.encoder.tokenizer, scorer.reads, scorer.encoder.max_tokens, _batch_options(cfg),
        TextLimits(trained.get("max_query_tokens", 64), trained.get("max_doc_tokens", 448), trained.get("max_pair_tokens")),
        depth=depth, cache_dir=cfg.cache_dir,
    )  # fmt: skip
    baseline = read_run(Path(cfg.baseline)) if cfg.baseline else None
    module = RerankModule(scorer, list(cfg.measures), on_evaluated=_writer(folder, splits, cfg, depth, baseline))
    trainer = _trainer(cfg, folder, [], None)
    trainer.test(module, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        for name in splits.tests:
            evaluation.print_table(name, json.loads((folder / "evaluation" / name / "metrics.json").read_text(encoding="utf-8")))
        log.info("evaluation: %s", folder / "evaluation")


# building ---------------------------------------------------------------------------------------------------------------------------


def _open_run(cfg: DictConfig) -> Path:
    """Make the run folder with its configuration, environment and log; other processes than the first only learn its name."""
    folder = Path(HydraConfig.get().runtime.output_dir).resolve()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for noisy in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(noisy).addFilter(_advertising)
    if _is_first_process():
        write_text(folder / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
        write_json(folder / "environment.json", environment(cfg.get("seed", 0)))
        log_to(folder / "train.log")
    else:
        logging.getLogger().setLevel(logging.WARNING)
    return folder


def _is_first_process() -> bool:
    return global_rank() == 0 and int(os.environ.get("LOCAL_RANK", "0")) == 0


def _advertising(record: logging.LogRecord) -> bool:
    """Lightning's tips, among them one to use static_graph, which breaks micro-batches."""
    text = record.getMessage()
    return not any(word in text for word in ("litlogger", "static_graph", "💡", "Checkpoint directory"))


def _load_splits(cfg: DictConfig) -> Splits:
    source = instantiate({key: value for key, value in cfg.data.items() if key not in ("negatives", "teacher", "random_negatives")})
    splits = with_candidates(source.load(), max(cfg.depth, cfg.batch.depth), Path(cfg.cache_dir))
    _print_notice(splits)
    if splits.val is not None and cfg.val_depth is not None and splits.val.candidates is not None:
        candidates = splits.val.candidates
        splits = replace(splits, val=replace(splits.val, candidates=type(candidates).from_run(candidates.to_run(cfg.val_depth))))
    return splits


def _print_notice(splits: Splits) -> None:
    if splits.notice:
        log.info("%s", splits.notice)


def _build_scorer(cfg: DictConfig) -> Any:
    if cfg.checkpoint is not None and not cfg.resume:
        return load_scorer(Path(cfg.checkpoint), "best")
    return instantiate(cfg.model, encoder=instantiate(cfg.encoder))


def _batch_options(cfg: DictConfig) -> BatchOptions:
    options = OmegaConf.to_container(cfg.batch)
    return BatchOptions(**options, min_micro_batches=cfg.trainer.accumulate_grad_batches)  # type: ignore[arg-type]


def _build_data(cfg: DictConfig, splits: Splits, scorer: Any) -> RankData:
    return RankData(
        splits,
        scorer.encoder.tokenizer,
        scorer.reads,
        scorer.encoder.max_tokens,
        _batch_options(cfg),
        TextLimits(cfg.max_query_tokens, cfg.max_doc_tokens, cfg.max_pair_tokens),
        depth=cfg.depth,
        seed=cfg.seed,
        cache_dir=cfg.cache_dir,
        negatives=cfg.data.get("negatives"),
        teacher=cfg.data.get("teacher"),
        random_negatives=cfg.data.get("random_negatives", False),
    )


def _trainer(cfg: DictConfig, folder: Path, callbacks: list[pl.Callback], logger: DictConfig | None) -> pl.Trainer:
    options: dict[str, Any] = OmegaConf.to_container(cfg.trainer)  # type: ignore[assignment]
    # a step is one item and clips by itself, so Lightning must not see these two
    for own in ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"):
        options.pop(own)
    if options["precision"] is None:
        options["precision"] = "bf16-mixed" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "32-true"
    options["strategy"] = _strategy(options)
    if options["enable_progress_bar"]:
        callbacks = [*callbacks, RichProgressBar(leave=True)]
    callbacks = [*callbacks, *(instantiate(node) for node in (cfg.get("callbacks") or {}).values())]
    made: list[Any] = []
    if logger is not None and not logger.get("none"):
        made = [loggers.csv(folder)]
        if "_target_" in logger:
            made.append(instantiate(logger)(folder))
    _prepare_children(folder)
    return pl.Trainer(**options, callbacks=callbacks, logger=made or False, default_root_dir=folder)


def _strategy(options: dict[str, Any]) -> Strategy | str:
    """DDP as the training step needs it; Lightning decides about one device."""
    devices = options["devices"]
    all_gpus = devices in ("auto", -1, "-1") and options["accelerator"] != "cpu" and torch.cuda.device_count() > 1
    counted = (isinstance(devices, int) and devices > 1) or (
        isinstance(devices, str) and ("," in devices or (devices.isdigit() and int(devices) > 1))
    )
    several = options["num_nodes"] > 1 or all_gpus or counted or (isinstance(devices, list) and len(devices) > 1)
    if not several:
        return "auto"
    return DDPStrategy(
        find_unused_parameters=options["strategy"] == "ddp_find_unused_parameters_true",
        broadcast_buffers=False,  # nothing has buffers that change; one hidden collective less
        gradient_as_bucket_view=True,
        timeout=timedelta(minutes=30),
    )


def _prepare_children(folder: Path) -> None:
    """Let Lightning start its other processes with the composed configuration instead of the command line.

    The command line may be a multirun, whose children would start the whole sweep again, and `now` would name other folders.
    """
    if HydraConfig.initialized() and _is_first_process():
        script = sys.argv[0]
        overrides = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
        sys.argv = [script, "--config-path", str(folder), "--config-name", "config", *overrides]


def _resume_from(cfg: DictConfig) -> Path | None:
    if not cfg.resume:
        return None
    path = Path(cfg.checkpoint) / "checkpoints" / "last.ckpt"
    if not path.is_file():
        raise CheckpointError(f"checkpoint: expected {path}, which a training writes as it goes, got no such file")
    return path


# results ----------------------------------------------------------------------------------------------------------------------------


def _writer(folder: Path, splits: Splits, cfg: DictConfig, depth: int | None = None, baseline: Run | None = None) -> Any:
    """What to do with a finished run: write it, measured and compared with the first stage or with the given baseline."""

    def write(name: str, run: Run) -> None:
        collection = splits.tests[name]
        first_stage = collection.candidates.to_run(depth or cfg.depth) if collection.candidates is not None else None
        evaluation.write_evaluation(
            folder / "evaluation" / name,
            run,
            collection.qrels,
            list(cfg.measures),
            collection.relevance,
            baseline or first_stage,
            tag=cfg.name,
        )

    return write


def _means(folder: Path, name: str) -> dict[str, float]:
    return json.loads((folder / "evaluation" / name / "metrics.json").read_text(encoding="utf-8"))["measures"]


def _step_of(best: ModelCheckpoint) -> int | None:
    if not best.best_model_path or not Path(best.best_model_path).is_file():
        return None
    return int(torch.load(best.best_model_path, map_location="cpu", weights_only=True, mmap=True)["global_step"])
