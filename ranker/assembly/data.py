"""Build the data of a run from its configuration: collections, first-stage candidates, text limits, loaders."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ranker.assembly.prompts import has_instructions, inputs_of
from ranker.assembly.scorer import has_penalties, in_batch_negatives
from ranker.config.sets import SET_KEYS, sets_of
from ranker.config.signatures import parameters_of
from ranker.config.targets import constructor_keys
from ranker.data.collection import Collection, Splits
from ranker.data.datamodule import RankData
from ranker.data.expansion import expanded
from ranker.data.mixed_data import MixedData, MixedSet, merged, warn_of_shared_queries
from ranker.data.options import BatchOptions, TrainDocs
from ranker.data.query_docs import apply_mode, warn_of_query_docs
from ranker.data.scorer_inputs import TextLimits
from ranker.data.token_counts import document_frequencies
from ranker.errors import ConfigError, errors_of
from ranker.hashing import mix
from ranker.models.interface import Scorer
from ranker.multitask.datamodule import TaskData
from ranker.multitask.multitask import Multitask
from ranker.processes import available_cores
from ranker.retrieval.first_stage import FirstStage, with_candidates

log = logging.getLogger(__name__)

# default token budgets; larger scoring batches are slower on a CPU, see docs/performance.md
GPU_TOKENS, CPU_TOKENS, CPU_SCORING_TOKENS = 32768, 8192, 4096


def load_source(node: Any, cache_dir: str = ".cache") -> Splits:
    """Load the collections of a `data` node, and apply the node's `drop_query_docs`.

    Args:
        node: A `data` node. If it is a mix, all its sets are loaded.
        cache_dir: Folder in which a source may keep its own files.
    """
    sets = sets_of(node)
    if sets:
        return merged({name: load_set(name, part, cache_dir) for name, part in sets.items()})
    takes_cache = "cache_dir" in (parameters_of(str(node.get("_target_"))) or {})
    passed = {"cache_dir": cache_dir} if takes_cache else {}
    splits = instantiate(constructor_keys("data", node), **passed).load()
    splits = expanded(splits, Path(node["expansion"]) if node.get("expansion") else None)
    return apply_mode(splits, node.get("drop_query_docs", "auto"))


def load_set(name: str, node: Any, cache_dir: str) -> Splits:
    """Load a set of a mix. A set of weight 0 gets no training queries; a set that is not evaluated gets no others.

    Args:
        name: Name of the set.
        node: The set's node.
        cache_dir: Folder in which a source may keep its own files.
    """
    with errors_of(f"data.sets.{name}"):
        own = {key: value for key, value in node.items() if key not in SET_KEYS}
        splits = load_source(own, cache_dir)
    if node.get("weight", 1) == 0:
        splits = replace(splits, train=None)
    return splits if node.get("evaluate", True) else replace(splits, val=None, tests={})


def load_splits(cfg: DictConfig) -> Splits:
    """Load the training data with first-stage candidates. The validation set gets at most `val_depth` for each query.

    Raises:
        ConfigError: The data has no training set.
    """
    loaded = load_source(cfg.data, cfg.cache_dir)
    if loaded.sets:
        warn_of_shared_queries(loaded.sets)
        return merged(
            {
                name: _prepared(cfg, loaded.sets[name], f"data.sets.{name}", node)
                for name, node in sets_of(cfg.data).items()
            }
        )
    if loaded.train is None:
        raise ConfigError(
            "data: expected a training set, got a source without one; use evaluate.py, or set data to one that has it"
        )
    return _prepared(cfg, loaded, "data", cfg.data)


def _prepared(cfg: DictConfig, loaded: Splits, path: str, node: Any) -> Splits:
    """Add first-stage candidates to loaded collections; warn of queries that are docs of their collection.

    Args:
        cfg: The configuration.
        loaded: The collections.
        path: The configuration key of their `data` node, for messages.
        node: The node.
    """
    depth = max(cfg.depth, cfg.batch.depth)
    with errors_of(path):
        splits = with_candidates(loaded, depth, Path(cfg.cache_dir), FirstStage.of(node))
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
    if splits.sets and split in ("val", "train"):
        parts = {name: getattr(part, split) for name, part in splits.sets.items()}
        sets: Any = {name: part for name, part in parts.items() if part is not None} or None
    else:
        sets = {"test": splits.tests, "val": {"val": splits.val}, "train": {"train": splits.train}}.get(split or "")
    if sets is None or None in sets.values():
        raise ConfigError(f"split: expected one of test, val, train that the data has, got {split!r}")
    return sets


def mined_set(splits: Splits, split: str | None) -> dict[str, Collection]:
    """Return set name -> collection for the one set whose queries get mined negatives; empty if `split` is None.

    Raises:
        ConfigError: The data has no such split, or the split has several sets, but negatives.trec is for one set.
    """
    sets = chosen_sets(splits, split) if split is not None else {}
    if len(sets) > 1:
        raise ConfigError(f"mine: expected a split of one set, got {', '.join(sets)}; set mine to train or val")
    return sets


def text_limits(scorer: Scorer, trained: Any, node: Any = None) -> TextLimits:
    """Return the largest numbers of tokens of texts.

    They are the training's. Without a training configuration, they are those of the model's folder, or else defaults.

    Args:
        scorer: The scorer.
        trained: The configuration of the scorer's training; may be empty.
        node: The node of a set of a mix, whose limits take precedence; None: there is no mix.
    """
    query, doc = scorer.text_limits or (64, 448)
    own = node or {}
    pair = own.get("max_pair_tokens") or trained.get("max_pair_tokens") or own.get("suggested_pair_tokens")
    return TextLimits(
        own.get("max_query_tokens") or trained.get("max_query_tokens", query),
        own.get("max_doc_tokens") or trained.get("max_doc_tokens", doc),
        pair,
    )


def batch_options(cfg: DictConfig) -> BatchOptions:
    """Sizes of steps and micro-batches."""
    options: Any = OmegaConf.to_container(cfg.batch)
    gpu, grows = torch.cuda.is_available(), options["max_tokens"] is None
    if grows:
        options["max_tokens"] = GPU_TOKENS if gpu else CPU_TOKENS
        options["eval_max_tokens"] = options["eval_max_tokens"] or (GPU_TOKENS if gpu else CPU_SCORING_TOKENS)
    if options["workers"] is None:
        options["workers"] = min(4, available_cores()) if gpu else 0
    least = cfg.trainer.accumulate_grad_batches
    return BatchOptions(**options, min_micro_batches=least, grows=grows)  # type: ignore[arg-type]


def build_data(cfg: DictConfig, splits: Splits, scorer: Scorer) -> RankData:
    """Build the data module of a scorer, for one set or for a mix, and with a multitask scorer's auxiliary tasks."""
    sets = sets_of(cfg.data)
    if sets:
        parts = {
            name: MixedSet(
                _rank_data(cfg, splits.sets[name], scorer, node, seed=int(mix(cfg.seed, i)) if i else cfg.seed),
                node.get("weight", 1.0),
                node.get("cap"),
            )
            for i, (name, node) in enumerate(sets.items())
        }
        return MixedData(parts, instantiate(constructor_keys("data", cfg.data)), splits.suite)
    data = _rank_data(cfg, splits, scorer, cfg.data, cfg.seed)
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


def start_from_docs(cfg: DictConfig, splits: Splits, scorer: Scorer) -> None:
    """Call the scorer's `start_from_docs`, if it has this method, with word counts of the training docs.

    Args:
        cfg: The configuration of the training.
        splits: The loaded collections.
        scorer: The scorer.
    """
    start: Any = getattr(scorer, "start_from_docs", None)
    if start is None or cfg.checkpoint is not None:  # a stored model already has its weights
        return
    data = build_data(cfg, splits, scorer)
    size: int = scorer.dim  # type: ignore[attr-defined]
    frequencies, num_docs = np.zeros(size, dtype=np.int64), 0
    for part in splits.sets.values() if splits.sets else [splits]:
        if part.train is not None:
            collator = data.collator(part.train)
            frequencies += document_frequencies(collator.docs, collator.max_doc_tokens, size)
            num_docs += len(collator.docs)
    start(torch.from_numpy(frequencies), num_docs)


def _rank_data(cfg: DictConfig, splits: Splits, scorer: Scorer, node: Any, seed: int) -> RankData:
    """Return the data module of one source.

    Args:
        cfg: The configuration of the training.
        splits: The loaded collections of the source.
        scorer: The scorer.
        node: The source's node.
        seed: Seed of the shuffles and draws; each set of a mix has its own.
    """
    return RankData(
        splits,
        inputs_of(scorer, node if node is not cfg.data else None, cfg.model, has_instructions(splits)),
        batch_options(cfg),
        text_limits(scorer, cfg, node if node is not cfg.data else None),
        depth=cfg.depth,
        seed=seed,
        cache_dir=cfg.cache_dir,
        train_docs=TrainDocs(
            negatives=node.get("negatives"),
            teacher=node.get("teacher"),
            random_negatives=node.get("random_negatives", False),
            in_batch=in_batch_negatives(cfg),
            whole_step=has_penalties(cfg),
        ),
    )
