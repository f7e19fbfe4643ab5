"""Evaluate a checkpoint on the sets of a suite, and summarize the results in one table and one picture."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ranker.assembly.data import batch_options, load_source, print_notice, text_limits
from ranker.assembly.evaluation import evaluate_sets, with_list_options
from ranker.assembly.inference import prepare
from ranker.assembly.prompts import has_instructions
from ranker.assembly.rehearsal import rehearse_trainer
from ranker.assembly.report import Report
from ranker.assembly.run import open_run, quiet_libraries
from ranker.assembly.trainer import build_fabric
from ranker.assembly.training_queries import seen_in_training, shared_queries
from ranker.checkpoint import load_scorer, read_description
from ranker.config.paths import split_by_folder
from ranker.data.collection import Collection, Splits
from ranker.data.datamodule import RankData
from ranker.data.instructions import refuse_instructions
from ranker.data.query_docs import warn_of_query_docs
from ranker.data.scorer_inputs import ScorerInputs
from ranker.data.trec import read_run, write_qrels, write_run
from ranker.errors import ConfigError
from ranker.evaluation.report import first_stage_run
from ranker.evaluation.scoring import Devices
from ranker.evaluation.suite import FIRST_STAGE, QRELS, read_set, summarise
from ranker.evaluation.suite_report import print_suite, write_picture
from ranker.retrieval.first_stage import FirstStage, with_candidates
from ranker.training.run_writer import write_json
from ranker.types import Run

log = logging.getLogger(__name__)


def evaluate_suite(cfg: DictConfig) -> None:
    """Re-rank the candidates of each set of a suite with a checkpoint, and measure the runs.

    Raises:
        ConfigError: No set can be read, two sets have the same name, the queries of a set have their own instructions,
            or the baseline has no run of a set.
        RankerError: A set or the checkpoint is broken.
    """
    quiet_libraries()
    trained = OmegaConf.create(read_description(Path(cfg.checkpoint)))
    rehearse_trainer(cfg)
    scorer = load_scorer(Path(cfg.checkpoint), cfg.weights, trust_remote_code=cfg.trust_remote_code)
    scorer = prepare(with_list_options(scorer, cfg), cfg.inference, cfg.trainer.accelerator)
    depth = cfg.depth or trained.get("depth", 100)
    sets, missing = load_suite(cfg, depth)
    refuse_instructions(sets)
    baselines = _baselines(cfg, sets)
    folder = open_run(cfg)
    warn_of_missing(missing)
    data = RankData(
        Splits(None, None, sets),
        ScorerInputs.of(scorer),
        batch_options(cfg),
        text_limits(scorer, trained),
        depth=depth,
        cache_dir=cfg.cache_dir,
    )
    fabric = build_fabric(cfg, folder, "evaluate")
    precision: Any = fabric.strategy.precision
    devices = Devices.of_fabric(fabric)
    runs = {name: read_run(path) for name, path in baselines.items()}
    report = Report(cfg)
    evaluate_sets(cfg, folder, precision.convert_module(scorer), data, devices, depth, runs, report)
    devices.on_first(partial(_write, cfg, folder, sets, baselines, missing, depth))
    facts = {"Checkpoint": str(cfg.checkpoint), "Sets": str(len(sets))}
    devices.on_first(partial(report.write, folder, f"Suite of {len(sets)} sets", facts))


def validation_suite(cfg: DictConfig, splits: Splits) -> dict[str, Collection]:
    """Return the sets of a suite as validation sets of a training; warn of queries that are also in the training set.

    Args:
        cfg: The training's configuration.
        splits: The training data.

    Raises:
        ConfigError: No set can be read, two sets have the same name, or the queries of a set have their own
            instructions but those of the training do not.
    """
    sets, missing = load_suite(cfg, cfg.val_depth or cfg.depth)
    # if training queries have instructions, the training's prompts also take the instructions of the suite's queries
    if not has_instructions(next(iter(splits.sets.values()), splits)):
        refuse_instructions(sets)
    warn_of_missing(missing)
    texts = {name: set(collection.queries.values()) for name, collection in sets.items()}
    for warning in shared_queries("this training", splits, texts):
        log.warning("suite: %s", warning)
    return sets


def warn_of_missing(missing: Mapping[str, str]) -> None:
    """Warn of sets that are left out because their folder is missing.

    Args:
        missing: Name of the set -> its folder.
    """
    for name, path in missing.items():
        log.warning(
            "suite: %s is left out, because there is no folder %s; set suite.folder or suite.sets.%s.path",
            name,
            path,
            name,
        )


def load_suite(cfg: DictConfig, depth: int) -> tuple[dict[str, Collection], dict[str, str]]:
    """Return the test sets of a suite with their candidates, and name -> folder of the sets whose folder is missing.

    A node with a single test set gives its own name to the set. The sets of a node with several keep their names.

    Args:
        cfg: The configuration.
        depth: Candidates per query.

    Raises:
        ConfigError: No set can be read, two sets have the same name, or a set has no judgements.
    """
    nodes, missing = split_by_folder(cfg.suite.sets)
    sets: dict[str, Collection] = {}
    for key, node in nodes.items():
        loaded = load_source(node, cfg.cache_dir)
        print_notice(loaded)
        if not loaded.tests:
            raise ConfigError(f"suite.sets.{key}: expected data with a test set, got none; add one, or remove the set")
        splits = with_candidates(Splits(None, None, loaded.tests), depth, Path(cfg.cache_dir), FirstStage.of(node))
        for name, collection in splits.tests.items():
            warn_of_query_docs(collection, collection.candidates)
            chosen = key if len(splits.tests) == 1 else name
            if chosen in sets:
                raise ConfigError(f"suite.sets.{key}: expected sets of different names, got {chosen!r} twice")
            if not collection.qrels:
                raise ConfigError(f"suite.sets.{key}: expected a set with judgements, got {name} without; leave it out")
            sets[chosen] = collection
    if not sets:
        raise ConfigError("suite: expected at least one set that can be read, got none; set suite.folder")
    return sets, missing


def _baselines(cfg: DictConfig, sets: Mapping[str, Collection]) -> dict[str, Path]:
    """Return set name -> run file of the baseline's evaluation of the suite."""
    if cfg.baseline is None:
        return {}
    paths = {name: Path(cfg.baseline) / "evaluation" / name / "run.trec" for name in sets}
    for name, path in paths.items():
        if not path.is_file():
            raise ConfigError(
                f"baseline: expected the run folder of an evaluation of the same sets, got {cfg.baseline!r}, which has "
                f"no run of {name} ({path}); evaluate the baseline with the same suite"
            )
    return paths


def _write(
    cfg: DictConfig,
    folder: Path,
    sets: Mapping[str, Collection],
    baselines: Mapping[str, Path],
    missing: Mapping[str, str],
    depth: int,
) -> None:
    """Write first stages, judgements, `suite.json` and the picture; print the table, computed from the files."""
    for name, collection in sets.items():
        of_set = folder / "evaluation" / name
        write_qrels(of_set / QRELS, dict(collection.qrels))
        first_stage: Run | None = first_stage_run(collection, depth)
        if first_stage is not None:
            write_run(of_set / FIRST_STAGE, first_stage, "first_stage")
    texts = {name: set(collection.queries.values()) for name, collection in sets.items()}
    warnings = seen_in_training(Path(cfg.checkpoint), None, None, texts)
    stored = {
        name: read_set(folder / "evaluation" / name, collection.relevance, baselines.get(name))
        for name, collection in sets.items()
    }
    choices: Any = HydraConfig.get().runtime.choices
    content = {
        "suite": str(choices.get("suite") or cfg.name),
        "checkpoint": str(cfg.checkpoint),
        "baseline": cfg.baseline,
        **summarise(stored, list(cfg.measures)),
        "left_out": dict(missing),
        "warnings": warnings,
    }
    write_json(folder / "suite.json", content)
    measure = next(iter(content["macro"]["run"]))
    write_picture(folder, content, measure)
    print_suite(content, measure)
    log.info("suite: %s", folder / "suite.json")
