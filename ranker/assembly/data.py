"""Build the data of a run from its configuration: collections, first-stage candidates, text limits, loaders."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ranker.assembly.scorer import in_batch_negatives
from ranker.config.signatures import parameters_of
from ranker.config.targets import constructor_keys
from ranker.data.collate import ScorerInputs, TextLimits
from ranker.data.collection import Collection, Splits
from ranker.data.datamodule import BatchOptions, RankData, TrainDocs
from ranker.data.query_docs import apply_mode, warn_of_query_docs
from ranker.errors import ConfigError
from ranker.models.interface import Scorer
from ranker.multitask.multitask import Multitask
from ranker.multitask.steps import TaskData
from ranker.processes import available_cores
from ranker.retrieval.bm25 import FirstStage, with_candidates

log = logging.getLogger(__name__)


def load_source(node: Any, cache_dir: str = ".cache") -> Splits:
    """Load the collections of a `data` node, with its rule for queries that are docs of the collection.

    Args:
        node: The node.
        cache_dir: Folder for sources that keep files of their own.
    """
    takes_cache = "cache_dir" in (parameters_of(str(node.get("_target_"))) or {})
    passed = {"cache_dir": cache_dir} if takes_cache else {}
    splits = instantiate(constructor_keys("data", node), **passed).load()
    return apply_mode(splits, node.get("drop_query_docs", "auto"))


def load_splits(cfg: DictConfig) -> Splits:
    """Load the training data with first-stage candidates; the validation set's are cut to `val_depth`.

    Raises:
        ConfigError: The data has no training set.
    """
    loaded = load_source(cfg.data, cfg.cache_dir)
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
    """Print the licence notice that the data's owner requires."""
    if splits.notice:
        log.info("%s", splits.notice)


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
    """The collection whose queries get mined negatives, by its name; empty for None.

    Raises:
        ConfigError: The data has no such split, or the split has several sets; negatives.trec holds those of one.
    """
    sets = chosen_sets(splits, split) if split is not None else {}
    if len(sets) > 1:
        raise ConfigError(f"mine: expected a split of one set, got {', '.join(sets)}; set mine to train or val")
    return sets


def text_limits(scorer: Scorer, trained: Any) -> TextLimits:
    """Text lengths as in training; without a training configuration, those in the model's folder, else defaults."""
    query, doc = scorer.text_limits or (64, 448)
    return TextLimits(
        trained.get("max_query_tokens", query), trained.get("max_doc_tokens", doc), trained.get("max_pair_tokens")
    )


def batch_options(cfg: DictConfig) -> BatchOptions:
    """Sizes of steps and micro-batches."""
    options: Any = OmegaConf.to_container(cfg.batch)
    gpu = torch.cuda.is_available()
    if options["max_tokens"] is None:
        options["max_tokens"] = 32768 if gpu else 8192
    if options["workers"] is None:
        options["workers"] = min(4, available_cores()) if gpu else 0
    return BatchOptions(**options, min_micro_batches=cfg.trainer.accumulate_grad_batches)  # type: ignore[arg-type]


def build_data(cfg: DictConfig, splits: Splits, scorer: Scorer) -> RankData:
    """Loaders of the rows that the scorer reads and, for a multitask scorer, of its auxiliary tasks."""
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
