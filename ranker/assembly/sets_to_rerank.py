"""The collections of a split with the candidates to re-rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ranker.assembly.data import chosen_sets, load_source, print_notice
from ranker.config.sets import sets_of
from ranker.data.collection import Collection, Splits
from ranker.data.mixed_data import merged
from ranker.data.query_docs import warn_of_query_docs, with_allowed
from ranker.data.splits import check_candidates
from ranker.data.trec import read_candidates
from ranker.errors import ConfigError
from ranker.retrieval.first_stage import FirstStage, with_candidates
from ranker.retrieval.pipeline import add_positives


def sets_to_rerank(cfg: DictConfig, source: Any, depth: int) -> Splits:
    """Return the collections of the chosen split as test sets, with the candidates to re-rank.

    Raises:
        ConfigError: No set has the split, or a single file of candidates is given for a mix of sets.
    """
    loaded = load_source(source, cfg.cache_dir)
    print_notice(loaded)
    chosen = chosen_sets(loaded, cfg.split)  # called first: a split that no set has is an error
    if not loaded.sets:
        return _with_candidates(cfg, chosen, depth, source)
    for key in ("candidates", "baseline", "add_positives"):
        if cfg.get(key):
            raise ConfigError(
                f"{key}: expected it with a single set, got a mix ({', '.join(loaded.sets)}); choose one with data=..."
            )
    parts = {}
    for name, node in sets_of(source).items():
        part = loaded.sets[name]
        if {"test": part.tests, "val": part.val, "train": part.train}[cfg.split]:
            parts[name] = _with_candidates(cfg, chosen_sets(part, cfg.split), depth, node)
    return merged(parts)


def _with_candidates(cfg: DictConfig, chosen: dict[str, Collection], depth: int, source: Any) -> Splits:
    """Return collections as test sets, with the candidates to re-rank.

    Args:
        cfg: The configuration of the evaluation.
        chosen: The collections by name.
        depth: Candidates per query.
        source: The `data` node of the collections.
    """
    if cfg.candidates is not None:
        given = read_candidates(Path(cfg.candidates))
        chosen = {name: with_allowed(collection, given) for name, collection in chosen.items()}
        for collection in chosen.values():
            check_candidates(collection, cfg.candidates)
    splits = with_candidates(Splits(None, None, chosen), depth, Path(cfg.cache_dir), FirstStage.of(source))
    for part in splits.tests.values():
        warn_of_query_docs(part, part.candidates)
    if cfg.get("add_positives"):  # the name must show this, because measures then say nothing about the first stage
        tests = {f"{name}+positives": add_positives(part, depth) for name, part in splits.tests.items()}
        splits = replace(splits, tests=tests)
    return splits
