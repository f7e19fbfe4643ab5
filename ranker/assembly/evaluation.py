"""Score sets with a trained scorer and measure the runs: for the test of a training and for `evaluate.py`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ranker.assembly.data import batch_options, text_limits
from ranker.assembly.inference import prepare
from ranker.assembly.precision import settle_precision
from ranker.assembly.prompts import has_instructions, inputs_of
from ranker.assembly.rehearsal import rehearse_trainer
from ranker.assembly.report import Report
from ranker.assembly.run import open_run, quiet_libraries
from ranker.assembly.sets_to_rerank import sets_to_rerank
from ranker.assembly.trainer import build_fabric
from ranker.checkpoint import load_scorer, read_description
from ranker.config.sets import sets_of
from ranker.config.targets import constructor_keys
from ranker.data.collection import Collection, Splits
from ranker.data.datamodule import RankData
from ranker.data.mixed_data import MixedData, MixedSet
from ranker.data.query_docs import allowed_run
from ranker.data.trec import read_run
from ranker.errors import ConfigError
from ranker.evaluation import figures, pictures
from ranker.evaluation.by_length import Lengths
from ranker.evaluation.orders import write_orders
from ranker.evaluation.report import first_stage_run, print_table, write_evaluation
from ranker.evaluation.scoring import Devices, score_collection
from ranker.models.interface import Scorer
from ranker.types import Run

log = logging.getLogger(__name__)


def evaluate_sets(
    cfg: DictConfig,
    folder: Path,
    scorer: Scorer,
    data: RankData,
    devices: Devices,
    depth: int,
    baselines: Mapping[str, Run] = MappingProxyType({}),
    report: Report | None = None,
) -> dict[str, dict[str, Any]]:
    """Score the test sets on all devices, write a run for each set and measure it. All processes must call this.

    Args:
        cfg: The configuration.
        folder: The run folder; `evaluation/SET/` gets the files of each set.
        scorer: The scorer.
        data: Its `splits.tests` are evaluated.
        devices: The devices of the run.
        depth: Number of first-stage docs of each query with which a run is compared.
        baselines: Set name -> a run to compare with in place of the first stage.
        report: The page to which each set is added; None: no page.

    Returns:
        Set name -> content of its `metrics.json`, on the first process; empty on the others.

    Raises:
        RankerError: Scores are not finite, or a file can't be written.
    """
    written: dict[str, Callable[[], dict[str, Any]]] = {}
    earlier: list[Future[dict[str, Any]]] = []
    last = next(reversed(data.splits.tests), None)
    with ThreadPoolExecutor(1) as writer:  # measures a set while the next set is scored
        for name, collection in data.splits.tests.items():
            run = _score(cfg, scorer, data, devices, name)
            if run is not None:
                write = partial(write_set, folder, name, run, collection, cfg, depth, baselines.get(name), report)
                if name == last:
                    written[name] = write
                else:
                    earlier.append(writer.submit(write))
                    written[name] = earlier[-1].result
            devices.on_first(lambda: [part.result() for part in earlier if part.done()])  # an error ends the loop
            if cfg.get("orders", 1) > 1:
                others = [_score(cfg, scorer, data, devices, name, order) for order in range(1, cfg.orders)]
                runs = [run or {}, *(other or {} for other in others)]
                orders = partial(write_orders, folder / "evaluation" / name, runs, collection, list(cfg.measures))
                devices.on_first(orders)
        return devices.on_first(lambda: {name: result() for name, result in written.items()}) or {}


def _score(
    cfg: DictConfig, scorer: Scorer, data: RankData, devices: Devices, name: str, order: int | None = None
) -> Run | None:
    """Score a test set on all devices; return the run on the first one. All processes must call this."""
    title = f"test {name}" if order is None else f"test {name}, order {order + 1}"
    return score_collection(
        scorer,
        data.score_batches(data.splits.tests[name], devices.rank, devices.world_size, order),
        devices,
        data.batch_options.workers,
        progress=title if cfg.trainer.enable_progress_bar else None,
        inference_mode=cfg.trainer.inference_mode,
    )


def with_list_options(scorer: Any, cfg: DictConfig) -> Any:
    """Return a scorer that ranks long lists as `lists` and `orders` of the configuration say.

    Raises:
        ConfigError: The scorer scores each doc alone, but `lists` or `orders` is set.
    """
    options = {key: value for key, value in cfg.lists.items() if value != "auto"}
    if not getattr(scorer, "reads_lists", False) and (options or cfg.orders > 1):
        key = "orders" if cfg.orders > 1 else f"lists.{next(iter(options))}"
        raise ConfigError(
            f"{key}: expected a model of lists (set_encoder, duo, listwise_lm), got {type(scorer).__name__}, whose "
            "scores do not depend on the list"
        )
    if options:
        if not hasattr(scorer, "lists"):
            name = type(scorer).__name__
            raise ConfigError(f"lists: expected set_encoder or listwise_lm, which have list windows, got {name}")
        names = {"window": "size", "stride": "stride", "merge": "merge"}
        scorer.lists = replace(scorer.lists, **{names[key]: value for key, value in options.items()})
    return scorer


def write_set(
    folder: Path,
    name: str,
    run: Run,
    collection: Collection,
    cfg: DictConfig,
    first_stage_depth: int,
    baseline: Run | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Write a set's run, its measures, and its comparison with the baseline, or else with the first stage.

    Args:
        folder: The run folder.
        name: The set's name.
        run: query_id -> doc_id -> score.
        collection: The set.
        cfg: Has `measures`, `name` (the run file's tag), and perhaps `length_buckets`.
        first_stage_depth: Number of first-stage docs of each query with which the run is compared.
        baseline: A run to compare with in place of the first stage.
        report: The page to which the set is added; None: no page.

    Returns:
        The content of `metrics.json`.
    """
    compared = baseline and allowed_run(collection, baseline)
    label = "baseline" if compared else "first stage"
    compared = compared or first_stage_run(collection, first_stage_depth, run)
    buckets = cfg.get("length_buckets")
    written = write_evaluation(
        folder / "evaluation" / name,
        run,
        dict(collection.qrels),
        list(cfg.measures),
        collection.relevance,
        compared,
        cfg.name,
        None if buckets is None else Lengths.of(collection, buckets),
    )
    means = written["measures"]
    drawn = report is None or report.wanted
    if drawn and compared and means:  # `means` is empty if no query is judged
        measure = next(iter(means))
        pictures.write_comparison(folder, name, measure, run, compared, dict(collection.qrels), collection.relevance)
    if drawn and written.get("by_length"):
        rows, measure = written["by_length"], next(iter(means))
        figures.save(pictures.draw_by_length(rows, measure, name, label), folder, f"{name}_by_length")
    if report is not None:
        before = (label, compared) if compared else None
        report.add(folder, name, run, before, dict(collection.qrels), collection)
    return written


def print_sets(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the table of each evaluated set."""
    for name, metrics in results.items():
        print_table(name, metrics)


def evaluate_checkpoint(cfg: DictConfig) -> None:
    """Re-rank a collection's candidates with a checkpoint, and measure the runs.

    Raises:
        ConfigError: The checkpoint does not say which data it was trained on, and `data` is not set.
    """
    quiet_libraries()
    trained = OmegaConf.create(read_description(Path(cfg.checkpoint)))
    if cfg.data is None and "data" not in trained:
        raise ConfigError(f"data: expected data=..., since {cfg.checkpoint} does not say what it was trained on")
    rehearse_trainer(cfg)  # checks all trainer.* options, although Fabric computes the scores
    baseline = read_run(Path(cfg.baseline)) if cfg.baseline else None
    scorer = load_scorer(Path(cfg.checkpoint), cfg.weights, trust_remote_code=cfg.trust_remote_code)
    scorer = prepare(with_list_options(scorer, cfg), cfg.inference, cfg.trainer.accelerator)
    if cfg.length_buckets is None:
        cfg.length_buckets = trained.get("length_buckets")
    depth = cfg.depth or trained.get("depth", 100)
    source = cfg.data if cfg.data is not None else trained.data
    splits = sets_to_rerank(cfg, source, depth)
    folder = open_run(cfg)
    settle_precision(cfg, folder, scorer.encoder)
    data = _rank_data(cfg, splits, scorer, trained, source, None if cfg.add_positives else depth)
    fabric = build_fabric(cfg, folder, "evaluate")
    precision: Any = fabric.strategy.precision
    converted = precision.convert_module(scorer)
    baselines = {} if baseline is None else dict.fromkeys(splits.tests, baseline)
    report = Report(cfg)
    results = evaluate_sets(cfg, folder, converted, data, Devices.of_fabric(fabric), depth, baselines, report)
    if fabric.global_rank == 0:
        report.write(folder, f"Evaluation of {Path(cfg.checkpoint).name}", {"Checkpoint": str(cfg.checkpoint)})
        print_sets(results)
        log.info("evaluation: %s", folder / "evaluation")


def _rank_data(
    cfg: DictConfig, splits: Splits, scorer: Scorer, trained: Any, source: Any, depth: int | None
) -> RankData:
    """Build the data module of the sets to evaluate; each set of a mix has its own text limits.

    Args:
        cfg: The configuration of the evaluation.
        splits: The sets, as test sets.
        scorer: The scorer.
        trained: The configuration of its training; may be empty.
        source: The `data` node.
        depth: Candidates per query; None: all.
    """

    def build(part: Splits, node: Any = None) -> RankData:
        limits = text_limits(scorer, trained, node)
        inputs = inputs_of(scorer, node, trained.get("model"), has_instructions(part))
        return RankData(part, inputs, batch_options(cfg), limits, depth=depth, cache_dir=cfg.cache_dir)

    if not splits.sets:
        return build(splits)
    nodes = sets_of(source)
    return MixedData(
        {name: MixedSet(build(part, nodes[name])) for name, part in splits.sets.items()},
        instantiate(constructor_keys("data", source)),
    )
