"""`ranker search`: search whole collections with a bi-encoder or BM25, measure the runs, and mine hard negatives."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ranker.assembly.data import batch_options, chosen_sets, load_source, mined_set, print_notice, text_limits
from ranker.assembly.inference import check_quantize, prepare
from ranker.assembly.precision import settle_precision
from ranker.assembly.rehearsal import rehearse_fabric
from ranker.assembly.report import Report
from ranker.assembly.run import one_run, open_run, quiet_libraries
from ranker.assembly.trainer import build_fabric
from ranker.checkpoint import load_scorer, read_description
from ranker.config.sets import sets_of
from ranker.data.collection import Candidates, Collection, Splits
from ranker.data.datamodule import RankData
from ranker.data.instructions import refuse_instructions
from ranker.data.query_docs import allowed_run
from ranker.data.scorer_inputs import ScorerInputs
from ranker.data.trec import read_candidates, read_run, write_run
from ranker.errors import ConfigError
from ranker.evaluation.explanation import check_pair, explained_pair, write_explanation
from ranker.evaluation.report import first_stage_run, print_table, write_evaluation
from ranker.models.interface import is_bi_encoder
from ranker.retrieval.encode import Device
from ranker.retrieval.engines import bm25_engines, check_late, index_of, vector_engines
from ranker.retrieval.first_stage import FirstStage, with_candidates
from ranker.retrieval.mining import Mining
from ranker.retrieval.pipeline import EncodeOptions, encode_sets, in_words, mine_set, search_set
from ranker.retrieval.search import Engine
from ranker.retrieval.sparse_search import Reranking
from ranker.retrieval.vector_engine import LateOptions
from ranker.training.run_writer import write_json
from ranker.types import Run

log = logging.getLogger(__name__)


@one_run()
def search(cfg: DictConfig) -> None:
    """Search whole collections with a bi-encoder or with BM25, measure the runs, and mine hard negatives.

    Raises:
        ConfigError: An option or a combination of options is wrong.
    """
    quiet_libraries()
    trained = _check_model(cfg)
    baseline = read_run(Path(cfg.baseline)) if cfg.baseline not in (None, "bm25") else None
    teacher = read_run(Path(cfg.mining.teacher), single=True) if cfg.mining.teacher else None
    mining = Mining(**{key: value for key, value in cfg.mining.items() if key != "teacher"}, seed=cfg.seed)
    if cfg.model is None:
        rehearse_fabric(cfg)
        if cfg.inference.quantize is not None:
            check_quantize(cfg.inference.quantize, cfg.trainer.accelerator)
        _index(cfg)  # only to report wrong options before the docs are encoded
    candidates = None if cfg.candidates is None else read_candidates(Path(cfg.candidates))
    pair = explained_pair(cfg.explain)
    source = cfg.data if cfg.data is not None else trained.data
    if sets_of(source):
        raise ConfigError(f"data: expected a single set, got a mix ({', '.join(sets_of(source))}); choose data=...")
    loaded = load_source(source, cfg.cache_dir)
    sets = chosen_sets(loaded, cfg.split) if cfg.split is not None else {}
    mined = mined_set(loaded, cfg.mine)
    refuse_instructions(sets | mined)
    check_pair(pair, (sets | mined).values())
    if cfg.baseline == "bm25" and cfg.model is None:
        sets = with_candidates(Splits(None, None, sets), cfg.depth, Path(cfg.cache_dir), FirstStage.of(source)).tests
    folder = open_run(cfg)
    print_notice(loaded)
    everything = {**{f"{name} (mined)": part for name, part in mined.items()}, **sets}
    if cfg.model is not None:
        engines: dict[str, Any] | None = bm25_engines(everything, instantiate(cfg.model))
    else:
        engines = _vector_engines(cfg, trained, everything, folder)
    if engines is None:  # a rank above 0 has finished its part of the encoding
        return
    page = Report(cfg)
    report = {
        name: _search(cfg, folder, engines[name], name, _Compared(collection, baseline, candidates), page)
        for name, collection in sets.items()
    }
    if pair is not None:
        write_explanation(folder, engines, pair)
    for name, collection in mined.items():
        run = mine_set(engines[f"{name} (mined)"], collection, mining, teacher)
        write_run(folder / "negatives.trec", run, cfg.name)
        report["mined"] = {"queries": len(run), "negatives": sum(map(len, run.values()))}
        log.info("mined negatives: data.negatives=%s", folder / "negatives.trec")
    write_json(folder / "search.json", report)
    if sets:
        page.write(folder, "Search", {"Model": "BM25" if cfg.model is not None else str(cfg.checkpoint)})
    log.info("search: %s", folder)


def _check_model(cfg: DictConfig) -> DictConfig:
    """Check `model`, `checkpoint` and `data`; return the stored configuration of the checkpoint, empty for BM25."""
    if (cfg.model is None) == (cfg.checkpoint is None):
        raise ConfigError(
            "search.py: expected either checkpoint=RUN_FOLDER or model=bm25, got "
            + ("both" if cfg.model else "neither")
        )
    if cfg.model is not None and cfg.candidates is not None:
        raise ConfigError(f"candidates: expected null with model=..., which searches all docs; got {cfg.candidates}")
    if cfg.model is not None and not cfg.model.get("_partial_"):
        raise ConfigError(
            f"model: expected bm25 or tfidf, or checkpoint=RUN_FOLDER of a trained model; got {cfg.model._target_}"
        )
    trained = OmegaConf.create(read_description(Path(cfg.checkpoint)) if cfg.checkpoint is not None else {})
    if cfg.data is None and "data" not in trained:
        raise ConfigError(
            "data: expected data=..., since the checkpoint does not name the data of its training, got null"
        )
    return trained


def _index(cfg: DictConfig) -> Any:
    """Return the index that the configuration names, or None."""
    return None if cfg.index is None else instantiate(cfg.index)


class _Compared(NamedTuple):
    """A set, the baseline of its run, and the candidates that are ranked instead of all docs."""

    collection: Collection
    baseline: Run | None
    candidates: Candidates | None


def _search(cfg: DictConfig, folder: Path, engine: Any, name: str, what: _Compared, page: Report) -> dict[str, Any]:
    """Search one set, then write and measure its run; return times and counts."""
    collection, baseline, candidates = what
    compared = baseline and allowed_run(collection, baseline)
    label = "baseline" if compared else "first stage"
    compared = compared or (first_stage_run(collection, cfg.depth) if cfg.baseline else None)
    if candidates is not None:
        engine = Reranking(engine, candidates)
    run, figures = search_set(engine, collection, cfg.depth, cfg.latency_queries)
    written = write_evaluation(
        folder / "evaluation" / name,
        run,
        dict(collection.qrels),
        list(cfg.measures),
        collection.relevance,
        compared,
        cfg.name,
    )
    page.add(folder, name, run, (label, compared) if compared else None, dict(collection.qrels), collection)
    print_table(name, written)
    log.info("%s: %s", name, in_words(figures))
    return figures


def _vector_engines(
    cfg: DictConfig, trained: DictConfig, sets: Mapping[str, Collection], folder: Path
) -> dict[str, Engine] | None:
    """Encode on all devices the docs that are not encoded yet, then open an index over them.

    Returns:
        Set name -> engine on the first process, None on the others.
    """
    scorer = load_scorer(Path(cfg.checkpoint), cfg.weights, trust_remote_code=cfg.trust_remote_code)
    scorer = prepare(scorer, cfg.inference, cfg.trainer.accelerator)
    if not is_bi_encoder(scorer):
        raise ConfigError(
            f"checkpoint: expected a bi-encoder (dpr, colbert, splade, tildev2), got {type(scorer).__name__}; "
            "evaluate.py re-ranks with it"
        )
    index_type, late = index_of(scorer, _index(cfg)), LateOptions(**cfg.late)
    check_late(index_type, scorer.vectors == "tokens", late)
    for key in ("candidates", "explain"):
        if cfg[key] is not None and scorer.vectors != "terms":
            raise ConfigError(
                f"{key}: only sparse models (splade, tildev2) and their term weights support this option; got "
                f"{cfg[key]!r} with {type(scorer).__name__}"
            )
    if scorer.vectors == "windows":
        raise ConfigError(
            f"checkpoint: expected a model with one vector per doc, got one with a vector for each window of a doc "
            f"({cfg.checkpoint}); re-rank with evaluate.py, or train with passages=parade_attention, "
            "parade_transformer or firstp, which give one vector per doc"
        )
    limits = text_limits(scorer, trained)
    limits = replace(limits, query=cfg.max_query_tokens or limits.query, doc=cfg.max_doc_tokens or limits.doc)
    data = RankData(
        Splits(None, None, dict(sets)),
        ScorerInputs.of(scorer),
        batch_options(cfg),
        limits,
        cache_dir=cfg.cache_dir,
    )
    settle_precision(cfg, folder, scorer.encoder)
    fabric = build_fabric(cfg, folder, "search")
    scorer = scorer.to(fabric.device)
    budget = data.batch_options.eval_max_tokens or data.batch_options.max_tokens
    device = Device(fabric.device, fabric.autocast, fabric.global_rank, fabric.world_size, budget)
    vectors = None if cfg.encode.folder is None else Path(cfg.encode.folder)
    options = EncodeOptions(Path(cfg.cache_dir), vectors, cfg.encode.dtype, cfg.encode.shard_docs)
    encoded = encode_sets(scorer, data, sets, options, device, str(fabric.strategy.precision.precision))
    fabric.barrier()
    if fabric.global_rank > 0:
        return None
    return vector_engines(scorer, data, sets, encoded, index_type, device, late)
