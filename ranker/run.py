"""The program's table of contents: train(), evaluate() and search().

The only place that turns configuration into objects.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from omegaconf import DictConfig, OmegaConf

from ranker.assembly.objects import (
    batch_options,
    build_data,
    build_fabric,
    build_optimizer,
    build_scorer,
    build_trainer,
    cfg_values,
    chosen_sets,
    load_source,
    load_splits,
    mined_set,
    one_run,
    open_run,
    print_notice,
    text_limits,
    total_steps,
    training_module,
)
from ranker.assembly.rehearsal import check_length, refused_in_fit, rehearse_fabric, rehearse_trainer, rehearse_training
from ranker.checkpoint import load_checkpoint, load_scorer, read_description, save_model
from ranker.config.check import constructor_keys
from ranker.config.stored import resumed_runs
from ranker.data.collate import ScorerInputs
from ranker.data.collection import Collection, Splits
from ranker.data.datamodule import RankData
from ranker.data.pair_cuts import warn_of_other_cuts
from ranker.data.query_docs import allowed_run, warn_of_query_docs, with_allowed
from ranker.data.splits import check_candidates
from ranker.data.trec import read_candidates, read_qrels, read_run, write_run
from ranker.errors import ConfigError
from ranker.evaluation import pictures
from ranker.evaluation import report as evaluation
from ranker.retrieval.bm25 import FirstStage, with_candidates
from ranker.retrieval.encode import Device
from ranker.retrieval.mining import Mining
from ranker.retrieval.search import LateOptions, VectorEngine
from ranker.retrieval.searchers import (
    EncodeOptions,
    add_positives,
    bm25_engines,
    encode_sets,
    in_words,
    mine_set,
    search_set,
    vector_engines,
)
from ranker.training import dashboards
from ranker.training.checkpoint_files import LAST, read_checkpoint, to_resume_from
from ranker.training.checkpointing import SaveBest, SaveLast
from ranker.training.rerank_module import RerankModule
from ranker.training.run_writer import write_json
from ranker.training.throughput import Throughput
from ranker.types import Run

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
    splits = load_splits(cfg)
    scorer = build_scorer(cfg)
    data = build_data(cfg, splits, scorer)
    steps_per_epoch = len(data.train_steps().plan)
    check_length(cfg, splits, steps_per_epoch)
    module = training_module(cfg)(
        scorer,
        list(cfg.measures),
        loss=instantiate(cfg.loss),
        optimizer=build_optimizer(cfg),
        schedule=instantiate(cfg.schedule),
        total_steps=total_steps(cfg, steps_per_epoch),
        weight_decay=cfg.optim.weight_decay,
        max_norm=cfg.trainer.gradient_clip_val,
        seed=cfg.seed,
        on_evaluated=_writer(folder, splits, cfg),
        nonfinite=cfg.nonfinite,
        dumps=folder / "nonfinite",
    )
    throughput = Throughput()
    start = to_resume_from(Path(cfg.checkpoint)) if cfg.resume else None
    best = SaveBest(folder / "checkpoints", cfg.monitor, start.parent if start is not None else None)
    callbacks: list[pl.Callback] = [throughput, SaveLast(folder / "checkpoints" / LAST, cfg.save_every_steps, start)]
    if cfg.monitor is not None and splits.val is not None:
        callbacks.insert(1, best)
    trainer = build_trainer(cfg, folder, callbacks, cfg.get("logger"))
    with refused_in_fit():
        trainer.fit(module, datamodule=data, ckpt_path=start, weights_only=True)
    if best.best_model_path:
        load_checkpoint(module, Path(best.best_model_path))
    if trainer.is_global_zero:
        save_model(folder / "model", scorer, cfg)  # before the test, so that nothing that goes wrong there loses it
        if scorer.reads == "pairs":
            warn_of_other_cuts(data.train_steps())
    pruned = any(getattr(callback, "pruned", False) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    if not pruned:  # what a sweep has given up is not worth a test
        trainer.test(module, datamodule=data, verbose=False)
    tested = {} if pruned else splits.tests
    value = float(best.best_model_score) if best.best_model_score is not None else None
    if trainer.is_global_zero:
        measures = {name: _means(folder, name) for name in tested}
        write_json(
            folder / "result.json",
            {
                "objective": value,
                "monitor": cfg.monitor,
                "best_step": _step_of(best),
                "steps": trainer.global_step,
                "skipped_steps": module.skipped_steps,
                "measures": measures,
                **throughput.report(),
                "seconds": time.perf_counter() - started,
                "pruned": pruned,
            },
        )
        pictures.write_curves(resumed_runs(folder), cfg.monitor, f"{cfg.name}, {folder.name}")
        queries = {name: collection.queries for name, collection in tested.items()}
        dashboards.report(trainer.loggers, folder, queries, cfg_values(cfg), value)
        for name in tested:
            evaluation.print_table(
                name, json.loads((folder / "evaluation" / name / "metrics.json").read_text(encoding="utf-8"))
            )
        log.info(
            "run folder: %s (model/ loads in transformers and sentence-transformers; evaluation/ holds the runs)",
            folder,
        )
    return value


@one_run()
def evaluate(cfg: DictConfig) -> None:
    """Measure a run file, or re-rank a collection's candidates with a checkpoint and measure that."""
    if cfg.run is not None:
        _evaluate_file(cfg)
    else:
        _evaluate_checkpoint(cfg)


def _evaluate_file(cfg: DictConfig) -> None:
    run, qrels = read_run(Path(cfg.run)), read_qrels(Path(cfg.qrels))
    baseline = read_run(Path(cfg.baseline)) if cfg.baseline else None
    folder = open_run(cfg)
    name = run_name(Path(cfg.run))
    written = evaluation.write_evaluation(
        folder / "evaluation" / name, run, qrels, list(cfg.measures), cfg.relevance, baseline, tag=name
    )
    if baseline and written["measures"]:  # without judgements there are none
        pictures.write_comparison(folder, name, next(iter(written["measures"])), run, baseline, qrels, cfg.relevance)
    evaluation.print_table(name, written)
    log.info("evaluation: %s", folder / "evaluation" / name)


def run_name(path: Path) -> str:
    """A run file's name without its endings, as a tag and folder: blanks become `_`, and leading dots go, which would hide the folder.

    >>> run_name(Path("my run.trec.gz")), run_name(Path(".run")), run_name(Path(".hidden.run"))
    ('my_run', 'run', 'hidden')
    """
    name = path.name.lstrip(".").removesuffix(".gz").removesuffix(".run").removesuffix(".trec")
    return "_".join(name.split()) or "run"


def _evaluate_checkpoint(cfg: DictConfig) -> None:
    description = read_description(Path(cfg.checkpoint))
    trained = OmegaConf.create(description)
    if cfg.data is None and "data" not in trained:
        raise ConfigError(f"data: expected data=..., since {cfg.checkpoint} does not say what it was trained on")
    rehearse_trainer(cfg)
    baseline = read_run(Path(cfg.baseline)) if cfg.baseline else None
    scorer = load_scorer(Path(cfg.checkpoint), cfg.weights)
    source = cfg.data if cfg.data is not None else trained.data
    splits = load_source(source)
    print_notice(splits)
    chosen = chosen_sets(splits, cfg.split)
    depth = cfg.depth or trained.get("depth", 100)
    if cfg.candidates is not None:
        given = read_candidates(Path(cfg.candidates))
        chosen = {name: with_allowed(collection, given) for name, collection in chosen.items()}
        for collection in chosen.values():
            check_candidates(collection, cfg.candidates)
    splits = with_candidates(Splits(None, None, chosen), depth, Path(cfg.cache_dir), FirstStage.of(source))
    for part in splits.tests.values():
        warn_of_query_docs(part, part.candidates)
    if cfg.add_positives:  # labelled in the output: such measures say nothing about a first stage
        splits = replace(
            splits, tests={f"{name}+positives": add_positives(part, depth) for name, part in splits.tests.items()}
        )
    print_notice(splits)
    folder = open_run(cfg)
    data = RankData(
        splits, ScorerInputs.of(scorer), batch_options(cfg), text_limits(scorer, trained),
        depth=None if cfg.add_positives else depth, cache_dir=cfg.cache_dir,
    )  # fmt: skip
    module = RerankModule(scorer, list(cfg.measures), on_evaluated=_writer(folder, splits, cfg, depth, baseline))
    trainer = build_trainer(cfg, folder, [])
    trainer.test(module, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        for name in splits.tests:
            evaluation.print_table(
                name, json.loads((folder / "evaluation" / name / "metrics.json").read_text(encoding="utf-8"))
            )
        log.info("evaluation: %s", folder / "evaluation")


@one_run()
def search(cfg: DictConfig) -> None:
    """Search whole collections with a bi-encoder or with BM25, measure the runs, and mine hard negatives."""
    if (cfg.model is None) == (cfg.checkpoint is None):
        raise ConfigError(
            "search.py: expected either checkpoint=RUN_FOLDER or model=bm25, got "
            + ("both" if cfg.model else "neither")
        )
    if cfg.model is not None and not cfg.model.get("_partial_"):
        raise ConfigError(
            f"model: expected bm25, or checkpoint=RUN_FOLDER of a trained model; got {cfg.model._target_}"
        )
    trained = OmegaConf.create(read_description(Path(cfg.checkpoint)) if cfg.checkpoint is not None else {})
    if cfg.data is None and "data" not in trained:
        raise ConfigError("data: expected data=..., since nothing says what the model was trained on")
    baseline = read_run(Path(cfg.baseline)) if cfg.baseline not in (None, "bm25") else None
    teacher = read_run(Path(cfg.mining.teacher), single=True) if cfg.mining.teacher else None
    options = Mining(**{key: value for key, value in cfg.mining.items() if key != "teacher"}, seed=cfg.seed)
    if cfg.model is None:
        rehearse_fabric(cfg)
        instantiate(cfg.index)  # and drop it: what it refuses shows before the docs are encoded
    source = cfg.data if cfg.data is not None else trained.data
    loaded = load_source(source)
    sets = chosen_sets(loaded, cfg.split) if cfg.split is not None else {}
    mined = mined_set(loaded, cfg.mine)
    if cfg.baseline == "bm25" and cfg.model is None:
        sets = with_candidates(Splits(None, None, sets), cfg.depth, Path(cfg.cache_dir), FirstStage.of(source)).tests
    folder = open_run(cfg)
    print_notice(loaded)
    everything = {**{f"{name} (mined)": part for name, part in mined.items()}, **sets}
    if cfg.model is not None:
        engines: dict[str, Any] | None = bm25_engines(everything, instantiate(cfg.model))
    else:
        engines = _vector_engines(cfg, trained, everything, folder)
    if engines is None:  # another process than the first: it has done its part of the encoding
        return
    report = {}
    for name, collection in sets.items():
        given = baseline and allowed_run(collection, baseline)
        compared = given or (evaluation.first_stage_run(collection, cfg.depth) if cfg.baseline else None)
        found, report[name] = search_set(engines[name], collection, cfg.depth, cfg.latency_queries)
        written = evaluation.write_evaluation(
            folder / "evaluation" / name,
            found,
            collection.qrels,
            list(cfg.measures),
            collection.relevance,
            compared,
            cfg.name,
        )
        evaluation.print_table(name, written)
        log.info("%s: %s", name, in_words(report[name]))
    for name, collection in mined.items():
        run = mine_set(engines[f"{name} (mined)"], collection, options, teacher)
        write_run(folder / "negatives.trec", run, cfg.name)
        report["mined"] = {"queries": len(run), "negatives": sum(map(len, run.values()))}
        log.info("mined negatives: data.negatives=%s", folder / "negatives.trec")
    write_json(folder / "search.json", report)
    log.info("search: %s", folder)


def _vector_engines(
    cfg: DictConfig, trained: DictConfig, sets: dict[str, Collection], folder: Path
) -> dict[str, VectorEngine] | None:
    """Encode what is not encoded yet, on all devices, and open an index over it; None on other processes than the first."""
    scorer = load_scorer(Path(cfg.checkpoint), cfg.weights)
    if scorer.reads != "texts":
        raise ConfigError(
            f"checkpoint: expected a bi-encoder (dpr, colbert), got {type(scorer).__name__}; evaluate.py re-ranks with it"
        )
    limits = text_limits(scorer, trained)
    limits = replace(limits, query=cfg.max_query_tokens or limits.query, doc=cfg.max_doc_tokens or limits.doc)
    data = RankData(
        Splits(None, None, sets), ScorerInputs.of(scorer), batch_options(cfg), limits, cache_dir=cfg.cache_dir
    )
    fabric = build_fabric(cfg, folder)
    scorer = scorer.to(fabric.device)
    budget = data.batch.eval_max_tokens or data.batch.max_tokens
    where = Device(fabric.device, fabric.autocast, fabric.global_rank, fabric.world_size, budget)
    own_folder = None if cfg.encode.folder is None else Path(cfg.encode.folder)
    kept = EncodeOptions(Path(cfg.cache_dir), own_folder, cfg.encode.dtype, cfg.encode.shard_docs)
    encoded = encode_sets(scorer, data, sets, kept, where, str(fabric._precision.precision))
    fabric.barrier()
    if fabric.global_rank > 0:
        return None
    return vector_engines(scorer, data, sets, encoded, instantiate(cfg.index), where, LateOptions(**cfg.late))


@one_run()
def probe(cfg: DictConfig) -> None:
    """Probe each layer of an encoder or of a trained ranker, with controls; leave tables, pictures and a report."""
    from ranker.commands.probe import run_probe
    from ranker.probing.subject import Subject

    folder = open_run(cfg)
    pl.seed_everything(cfg.seed, verbose=False)  # an encoder may be random
    tasks = [instantiate(node) for node in cfg.probe.values()]
    splits = load_source(cfg.data)
    print_notice(splits)
    if cfg.checkpoint is not None:
        subject = Subject.of_checkpoint(Path(cfg.checkpoint), cfg.weights)
    else:
        encoder = instantiate(constructor_keys("encoder", cfg.encoder))
        choices: Any = HydraConfig.get().runtime.choices
        subject = Subject(str(choices.encoder), encoder, cfg.reads)
    logger = instantiate(cfg.logger)(folder) if cfg.logger is not None and "_target_" in cfg.logger else None
    options = cfg_values(cfg)
    dashboards.start([logger], options, OmegaConf.to_yaml(cfg, resolve=True))
    run_probe(folder, options, splits, tasks, subject, logger)
    if isinstance(logger, TensorBoardLogger):  # wandb has them from the report
        dashboards.show_pictures([logger], folder)
        logger.finalize("success")


def _writer(
    folder: Path, splits: Splits, cfg: DictConfig, depth: int | None = None, baseline: Run | None = None
) -> Any:
    """What to do with a finished run: write it, measured and compared with the first stage or with the given baseline."""

    def write(name: str, run: Run) -> dict[str, float]:
        collection = splits.tests[name]
        given = baseline and allowed_run(collection, baseline)
        compared = given or evaluation.first_stage_run(collection, depth or cfg.depth)
        where = folder / "evaluation" / name
        means = evaluation.write_evaluation(
            where, run, collection.qrels, list(cfg.measures), collection.relevance, compared, tag=cfg.name
        )["measures"]  # fmt: skip
        if compared and means:  # without judgements there are none
            pictures.write_comparison(
                folder, name, next(iter(means)), run, compared, collection.qrels, collection.relevance
            )
        return means

    return write


def _means(folder: Path, name: str) -> dict[str, float]:
    return json.loads((folder / "evaluation" / name / "metrics.json").read_text(encoding="utf-8"))["measures"]


def _step_of(best: ModelCheckpoint) -> int | None:
    if not best.best_model_path or not Path(best.best_model_path).is_file():
        return None
    return int(read_checkpoint(Path(best.best_model_path), mmap=True)["global_step"])
