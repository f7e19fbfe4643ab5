"""From configuration to objects and folders: what train(), evaluate(), search() and probe() have in common."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, ListConfig, OmegaConf, read_write
from transformers.utils import logging as transformers_logging

from ranker.checkpoint import load_scorer
from ranker.config.check import constructor_keys
from ranker.config.writing import inside
from ranker.data.collate import ScorerInputs, TextLimits
from ranker.data.collection import Collection, Splits
from ranker.data.datamodule import BatchOptions, RankData, TrainDocs
from ranker.data.query_docs import apply_mode, warn_of_query_docs
from ranker.encoders.execution import Execution
from ranker.errors import ConfigError, RankerError
from ranker.files import write_sums
from ranker.multitask.module import MultitaskModule
from ranker.multitask.multitask import Multitask
from ranker.multitask.steps import TaskData
from ranker.processes import PARENT, announce_dead_children, announce_parent, is_first_process, is_lost_peer
from ranker.retrieval.bm25 import FirstStage, with_candidates
from ranker.training import dashboards, loggers
from ranker.training.checkpoint_files import WholeFiles
from ranker.training.contrastive_module import ContrastiveModule
from ranker.training.progress import ProgressBar
from ranker.training.rerank_module import RerankModule
from ranker.training.run_writer import environment, log_to, write_json, write_text

log = logging.getLogger(__name__)


# warnings about what is meant to be so
UNHELPFUL = (
    "Experiment logs directory",  # the run folder holds more than the log
    ".*LeafSpec.*is deprecated",
    ".*does not have many workers.*",
    ".*Checkpoint directory .* exists and is not empty",
    ".*Your `IterableDataset`",
)


def open_run(cfg: DictConfig) -> Path:
    """Make the run folder with its configuration, environment and log; other processes than the first only learn its name."""
    folder = Path(HydraConfig.get().runtime.output_dir).resolve()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in (
        "lightning.pytorch",
        "lightning.fabric",
    ):  # they have handlers of their own: the root's would print each line again
        logging.getLogger(name).propagate = False
        logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger(f"{name}.utilities.rank_zero").addFilter(_advertising)
    for message in UNHELPFUL:
        warnings.filterwarnings("ignore", message=message)
    if is_first_process():
        write_text(folder / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
        write_sums(folder, ["config.yaml"])
        write_json(folder / "environment.json", environment(cfg.get("seed", 0)))
        log_to(folder / "train.log")
        announce_dead_children()
    else:
        logging.getLogger().setLevel(logging.WARNING)
    return folder


def _advertising(record: logging.LogRecord) -> bool:
    """Lightning's tips, among them one to use static_graph, which breaks micro-batches."""
    text = record.getMessage()
    return not any(word in text for word in ("litlogger", "static_graph", "💡", "Checkpoint directory"))


def load_source(node: Any) -> Splits:
    """Load the collections that a `data` node names."""
    splits = instantiate(constructor_keys("data", node)).load()
    return apply_mode(splits, node.get("drop_query_docs", "auto"))


def load_splits(cfg: DictConfig) -> Splits:
    """Load the training data with first-stage candidates, those of the validation cut to `val_depth`."""
    loaded = load_source(cfg.data)
    if loaded.train is None:
        raise ConfigError(
            "data: expected a training set, got a source without one; use evaluate.py, or name training data"
        )
    splits = with_candidates(loaded, max(cfg.depth, cfg.batch.depth), Path(cfg.cache_dir), FirstStage.of(cfg.data))
    for part in (splits.train, splits.val, *splits.tests.values()):
        if part is not None:
            warn_of_query_docs(part, part.candidates)
    print_notice(splits)
    if splits.val is not None and cfg.val_depth is not None and splits.val.candidates is not None:
        candidates = splits.val.candidates
        splits = replace(splits, val=replace(splits.val, candidates=candidates.top(cfg.val_depth)))
    return splits


def print_notice(splits: Splits) -> None:
    """Print the licence notice that a data owner asks for."""
    if splits.notice:
        log.info("%s", splits.notice)


def build_scorer(cfg: DictConfig) -> Any:
    """A new scorer, or the one that `checkpoint` trained; then `model` only says how it is trained on."""
    if cfg.checkpoint is not None and not cfg.resume:
        scorer = load_scorer(Path(cfg.checkpoint), "best", Execution.of(cfg.get("encoder") or {}))
        asked = cfg.model._target_.rpartition(".")[2]
        if asked != type(scorer).__name__:
            raise ConfigError(
                f"model: expected model={type(scorer).__name__.lower()}, which {cfg.checkpoint} holds, got {asked.lower()}"
            )
        return (
            scorer.train()
        )  # from_pretrained leaves it in eval mode, and Lightning keeps modes as they are: dropout would be off
    if cfg.model.get("_partial_"):
        raise ConfigError(
            f"model: expected one that can be trained, got {cfg.model._target_}; python search.py model=... searches with it"
        )
    return instantiate(
        constructor_keys("model", cfg.model), encoder=instantiate(constructor_keys("encoder", cfg.encoder))
    )


def text_limits(scorer: Any, trained: Any) -> TextLimits:
    """Text lengths as in training; those of a folder of another program where that says them."""
    query, doc = getattr(scorer, "text_limits", None) or (64, 448)
    return TextLimits(
        trained.get("max_query_tokens", query), trained.get("max_doc_tokens", doc), trained.get("max_pair_tokens")
    )


def in_batch_negatives(cfg: DictConfig) -> bool:
    """Whether the training sets queries against the docs of the step's other queries.

    Raises:
        ConfigError: It should, but the labels are a teacher's scores, which other queries' docs have not; or a step
            would be one doc.
    """
    asked = cfg.model.get("in_batch_negatives", False)
    taught = cfg.data.get("teacher") is not None
    if asked and taught:
        raise ConfigError(
            "model.in_batch_negatives: expected false or null with data.teacher, which has no scores for other queries' docs"
        )
    if asked is False or (asked is None and taught):
        if cfg.model.get("symmetric", False):
            raise ConfigError(
                "model.symmetric: expected false without in-batch negatives; set model.in_batch_negatives=true"
            )
        return False
    if cfg.batch.queries * cfg.batch.docs == 1:
        raise ConfigError(
            "batch.queries: expected several queries or docs in a step with in-batch negatives, got one of each"
        )
    return True


def training_module(cfg: DictConfig) -> Any:
    """The class that trains: on each query's own docs, on a whole step's score matrix, or on several tasks."""
    if "heads" in cfg.model:
        return partial(MultitaskModule, weighting=instantiate(cfg.model.weighting))
    return partial(ContrastiveModule, symmetric=cfg.model.symmetric) if in_batch_negatives(cfg) else RerankModule


def build_optimizer(cfg: DictConfig) -> Any:
    """Makes the optimizer of parameter groups."""
    on_gpu = torch.cuda.is_available() and OmegaConf.select(cfg, "optim.fused", default=False) is None
    return instantiate(cfg.optim, **({"fused": True} if on_gpu else {}))


def batch_options(cfg: DictConfig) -> BatchOptions:
    """Sizes of steps and micro-batches."""
    options: Any = OmegaConf.to_container(cfg.batch)
    gpu = torch.cuda.is_available()
    if options["max_tokens"] is None:
        options["max_tokens"] = 32768 if gpu else 8192
    if options["workers"] is None:
        options["workers"] = min(4, os.cpu_count() or 1) if gpu else 0
    return BatchOptions(**options, min_micro_batches=cfg.trainer.accumulate_grad_batches)  # type: ignore[arg-type]


def build_data(cfg: DictConfig, splits: Splits, scorer: Any) -> RankData:
    """Loaders for what the scorer reads, and for what its auxiliary heads learn."""
    data = RankData(
        splits,
        ScorerInputs.of(scorer),
        batch_options(cfg),
        TextLimits(cfg.max_query_tokens, cfg.max_doc_tokens, cfg.max_pair_tokens),
        depth=cfg.depth,
        seed=cfg.seed,
        cache_dir=cfg.cache_dir,
        train_docs=TrainDocs(
            negatives=cfg.data.get("negatives"),
            teacher=cfg.data.get("teacher"),
            random_negatives=cfg.data.get("random_negatives", False),
            in_batch=in_batch_negatives(cfg),
        ),
    )
    if not isinstance(scorer, Multitask):
        return data
    return TaskData(
        data,
        scorer.auxiliary_tasks(),
        labels=instantiate(cfg.model.labels),
        sampling=instantiate(cfg.model.sampling),
        max_epochs=cfg.trainer.max_epochs,
        max_steps=cfg.trainer.max_steps,
    )


def build_fabric(cfg: DictConfig, folder: Path) -> Fabric:
    """Processes, devices and precision for work that is no training; starts the other processes."""
    _prepare_children(folder)
    with refused_by_lightning("trainer"):
        fabric = Fabric(**fabric_options(cfg))
    fabric.launch()
    return fabric


def fabric_options(cfg: DictConfig) -> dict[str, Any]:
    """Fabric's arguments."""
    options: dict[str, Any] = OmegaConf.to_container(cfg.trainer)  # type: ignore[assignment]
    taken = {key: options[key] for key in ("accelerator", "devices", "num_nodes")}
    return {
        **taken,
        "precision": _precision(options["precision"]),
        "strategy": "auto" if options["strategy"] == "auto" else "ddp",
    }


@contextlib.contextmanager
def refused_by_lightning(key: str) -> Iterator[None]:
    """What Lightning refuses to build, as one line that names a key.

    Raises:
        ConfigError: Instead of Lightning's own error.
    """
    try:
        yield
    except (MisconfigurationException, ValueError, TypeError, AssertionError, RuntimeError) as error:
        got = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{key}: expected values that Lightning takes, got a refusal: {got}") from error


def _precision(asked: Any) -> Any:
    bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return asked if asked is not None else "bf16-mixed" if bf16 else "32-true"


def chosen_sets(splits: Splits, split: str | None) -> dict[str, Collection]:
    """The collections of a split, by set name.

    Raises:
        ConfigError: The data has no such split.
    """
    sets: Any = {"test": splits.tests, "val": {"val": splits.val}, "train": {"train": splits.train}}.get(split or "")
    if sets is None or None in sets.values():
        raise ConfigError(f"split: expected one of test, val, train that the data has, got {split!r}")
    return sets


def mined_set(splits: Splits, split: str | None) -> dict[str, Collection]:
    """The collection whose queries get negatives, by its name; empty for None.

    Raises:
        ConfigError: The data has no such split, or several sets in it: negatives.trec holds those of one.
    """
    sets = chosen_sets(splits, split) if split is not None else {}
    if len(sets) > 1:
        raise ConfigError(f"mine: expected a split of one set, got {', '.join(sets)}; set mine to train or val")
    return sets


def trainer_options(cfg: DictConfig) -> dict[str, Any]:
    """The Trainer's arguments."""
    options: dict[str, Any] = OmegaConf.to_container(cfg.trainer)  # type: ignore[assignment]
    # a step is one item and clips by itself, so Lightning must not see these two
    for own in ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"):
        options.pop(own)
    options["precision"] = _precision(options["precision"])
    options["strategy"] = _strategy(options)
    return options


def build_trainer(
    cfg: DictConfig, folder: Path, callbacks: list[pl.Callback], logger: DictConfig | None = None
) -> pl.Trainer:
    """Lightning's Trainer; loggers write to the run folder."""
    options = trainer_options(cfg)
    if options["enable_progress_bar"]:
        callbacks = [*callbacks, ProgressBar(leave=True, refresh_rate=10 if torch.cuda.is_available() else 1)]
    callbacks = [*callbacks, *(instantiate(inside(folder, node)) for node in (cfg.get("callbacks") or {}).values())]
    made: list[Any] = []
    if logger is not None and not logger.get("none"):
        made = [loggers.csv(folder)]
        if "_target_" in logger:
            made.append(instantiate(logger)(folder, Path(cfg.checkpoint) if cfg.get("resume") else None))
    if made and is_first_process():
        dashboards.start(made, cfg_values(cfg), OmegaConf.to_yaml(cfg, resolve=True))
    _prepare_children(folder)
    # SLURM's requeue would start the training anew, in another folder; docs/resume.md has a job script that goes on
    plugins: list[Any] = [WholeFiles(), *([SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else [])]
    with refused_by_lightning("trainer"):
        return pl.Trainer(
            **options, callbacks=callbacks, logger=made or False, default_root_dir=folder, plugins=plugins
        )


def cfg_values(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain values."""
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    return values


def epoch_steps(cfg: DictConfig, steps_per_epoch: int) -> int:
    """Optimizer steps of an epoch under `trainer.limit_train_batches`."""
    limit = cfg.trainer.limit_train_batches
    if limit is None:
        return steps_per_epoch
    return min(steps_per_epoch, limit) if isinstance(limit, int) else int(steps_per_epoch * limit)


def total_steps(cfg: DictConfig, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole training: what comes first of `max_steps` and `max_epochs`."""
    ends = []
    if cfg.trainer.max_epochs is not None and cfg.trainer.max_epochs >= 0:
        ends.append(cfg.trainer.max_epochs * epoch_steps(cfg, steps_per_epoch))
    if cfg.trainer.max_steps >= 0:
        ends.append(cfg.trainer.max_steps)
    return min(ends)


def several_devices(options: Mapping[str, Any]) -> bool:
    """Whether Lightning's arguments ask for more than one device."""
    devices = options["devices"]
    all_gpus = devices in ("auto", -1, "-1") and options["accelerator"] != "cpu" and torch.cuda.device_count() > 1
    counted = (isinstance(devices, int) and devices > 1) or (
        isinstance(devices, str) and ("," in devices or (devices.isdigit() and int(devices) > 1))
    )
    return (
        options["num_nodes"] > 1
        or all_gpus
        or counted
        or (isinstance(devices, (list, ListConfig)) and len(devices) > 1)
    )


def _strategy(options: Mapping[str, Any]) -> Strategy | str:
    """DDP as the training step needs it; Lightning decides about one device."""
    if not several_devices(options):
        return "auto"
    return DDPStrategy(
        find_unused_parameters=options["strategy"] == "ddp_find_unused_parameters_true",
        broadcast_buffers=False,  # nothing has buffers that change; one hidden collective less
        gradient_as_bucket_view=True,
        timeout=timedelta(minutes=30),
    )


@contextlib.contextmanager
def one_run() -> Iterator[None]:
    """What begins with a run ends with it, so that a multirun's next job starts clean (PC-86): processes, log files, command line."""
    argv, variables, handlers = sys.argv, dict(os.environ), list(logging.getLogger().handlers)
    failed = True
    try:
        yield
        failed = False
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise RankerError(
            "another process of this run has ended, so this one can't go on (its own error, if it had one, stands above; here: "
            f"{str(error).splitlines()[0]}); go on from the last checkpoint with checkpoint=RUN_FOLDER resume=true"
        ) from error
    finally:
        dashboards.finish(failed)
        sys.argv = argv
        for handler in set(logging.getLogger().handlers) - set(handlers):
            logging.getLogger().removeHandler(handler)
            handler.close()
        if torch.distributed.is_initialized():
            # gloo's threads drop what they were given last under a lock, for which they may need the interpreter: an
            # end that holds the interpreter and asks for the lock would wait for ever
            time.sleep(0.1)
            torch.distributed.destroy_process_group()
        for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK", PARENT):
            if name not in variables:
                os.environ.pop(name, None)


def _prepare_children(folder: Path) -> None:
    """Let Lightning start its other processes with the composed configuration instead of the command line.

    The command line may be a multirun, whose children would start the whole sweep again, and `now` would name other
    folders.
    """
    if HydraConfig.initialized() and is_first_process():
        composed: Any = HydraConfig.instance().cfg
        with read_write(composed.hydra):
            composed.hydra.run.dir = str(
                folder
            )  # Lightning passes this on; in a multirun it would be a folder that nobody uses
        announce_parent()
        overrides = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
        command = str(HydraConfig.get().job.config_name)
        started = (
            [] if Path(sys.argv[0]).name == f"{command}.py" else [command]
        )  # a script runs one command, `ranker` names it first
        sys.argv = [sys.argv[0], *started, "--config-path", str(folder), "--config-name", "config", *overrides]
