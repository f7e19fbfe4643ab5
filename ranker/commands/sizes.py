"""`ranker sizes`: search with one dpr model for each combination of a number of layers and a vector size."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ranker.assembly.data import batch_options, chosen_sets, load_source, print_notice, text_limits
from ranker.assembly.precision import settle_precision
from ranker.assembly.rehearsal import rehearse_fabric
from ranker.assembly.run import one_run, open_run, quiet_libraries
from ranker.assembly.trainer import build_fabric
from ranker.checkpoint import load_scorer, read_description, save_merged, save_model
from ranker.config.sets import sets_of
from ranker.data.collection import Collection, Splits
from ranker.data.datamodule import RankData
from ranker.data.instructions import refuse_instructions
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.errors import ConfigError
from ranker.evaluation import figures, sizes_report
from ranker.evaluation.measure_names import parse_measures
from ranker.evaluation.report import write_evaluation
from ranker.export._adapter import has_adapters
from ranker.models.dpr import DPR
from ranker.retrieval.encode import Device
from ranker.retrieval.engines import index_of, open_index
from ranker.retrieval.pipeline import EncodeOptions, encode_sets, in_words, search_set
from ranker.retrieval.shortened import Shortened
from ranker.retrieval.vector_engine import VectorEngine
from ranker.retrieval.vector_store import VectorStore
from ranker.training.run_writer import write_json
from ranker.types import Run

log = logging.getLogger(__name__)


@one_run()
def sizes(cfg: DictConfig) -> None:
    """Encode the docs once for each number of layers, search at each size, and write runs, a table and a picture.

    Raises:
        RankerError: An option is wrong, or the checkpoint is not a dpr model.
    """
    quiet_libraries()
    trained = OmegaConf.create(read_description(Path(cfg.checkpoint)))
    rehearse_fabric(cfg)
    measure = str(parse_measures(list(cfg.measures))[0])
    if cfg.data is None and "data" not in trained:
        raise ConfigError("data: expected data=..., since the checkpoint does not name the data of its training")
    source = cfg.data if cfg.data is not None else trained.data
    if sets_of(source):
        raise ConfigError(f"data: expected a single set, got a mix ({', '.join(sets_of(source))}); choose data=...")
    scorer = load_scorer(Path(cfg.checkpoint), cfg.weights, trust_remote_code=cfg.trust_remote_code)
    if not isinstance(scorer, DPR):
        raise ConfigError(
            f"checkpoint: expected a dpr model with one vector per doc, got {type(scorer).__name__}, whose vectors "
            "can't be cut"
        )
    index_of(scorer, instantiate(cfg.index))
    model = trained.get("model") or {}
    layers = _numbers("layers", cfg.layers, model.get("matryoshka_layers"), scorer.encoder.num_layers)
    dims = _numbers("dims", cfg.dims, model.get("matryoshka_dims") or _halves(scorer.dim), scorer.dim)
    if cfg.keep is not None and (len(cfg.keep) != 2 or cfg.keep[0] not in layers or cfg.keep[1] not in dims):
        raise ConfigError(f"keep: expected [LAYERS,DIM] out of layers={layers} and dims={dims}, got {list(cfg.keep)}")
    loaded = load_source(source, cfg.cache_dir)
    sets = chosen_sets(loaded, cfg.split)
    refuse_instructions(sets)
    folder = open_run(cfg)
    print_notice(loaded)
    data = RankData(
        Splits(None, None, dict(sets)),
        ScorerInputs.of(scorer),
        batch_options(cfg),
        text_limits(scorer, trained),
        cache_dir=cfg.cache_dir,
    )
    settle_precision(cfg, folder, scorer.encoder)
    fabric = build_fabric(cfg, folder, "sizes")
    scorer = scorer.to(fabric.device).eval()
    budget = data.batch_options.eval_max_tokens or data.batch_options.max_tokens
    device = Device(fabric.device, fabric.autocast, fabric.global_rank, fabric.world_size, budget)
    precision = str(fabric.strategy.precision.precision)
    rows: list[dict[str, Any]] = []
    whole: dict[str, Run] = {}  # set -> the run with all layers and the full size, the baseline of the others
    for number in reversed(layers):
        vectors = folder / "vectors"
        started = time.perf_counter()
        folders = {
            name: encode_sets(
                scorer.smaller(number, scorer.dim), data, {name: part}, _into(vectors / name), device, precision
            )[part.docs.fingerprint]
            for name, part in sets.items()
        }
        fabric.barrier()
        rate = sum(len(part.docs) for part in sets.values()) / (time.perf_counter() - started)
        if fabric.is_global_zero:
            for name, part in sets.items():
                store = VectorStore(folders[name])
                rows += [
                    {"set": name, "layers": number, "dim": dim, "docs_per_second": rate}
                    | _searched(cfg, folder, (scorer, number, dim), data, (name, part), store, device, whole)
                    for dim in reversed(dims)
                ]
            shutil.rmtree(vectors)
        fabric.barrier()
    if fabric.is_global_zero:
        _write(cfg, folder, rows, measure, list(sets))
        if cfg.keep is not None:
            save_smaller(folder / "model", scorer, tuple(cfg.keep), trained, data.limits)
            log.info("model of %d layers and %d dimensions: checkpoint=%s", *cfg.keep, folder / "model")


def save_smaller(folder: Path, scorer: DPR, kept: tuple[int, int], trained: DictConfig, limits: TextLimits) -> None:
    """Write a model with the lowest layers and the first dimensions; the text limits are those of the whole model.

    Args:
        folder: The new folder.
        scorer: The whole model.
        kept: Number of layers and size of a vector.
        trained: Description of the training of the whole model; empty for a folder of another program.
        limits: Longest texts.
    """
    small, (layers, dim) = scorer.smaller(*kept), kept
    described = trained.copy()
    described.max_query_tokens, described.max_doc_tokens = limits.query, limits.doc
    described.max_pair_tokens = limits.pair
    if "model" in described:
        if dim < scorer.dim:
            described.model.projection = dim
        for key, size in (("matryoshka_layers", layers), ("matryoshka_dims", dim)):
            described.model[key] = [number for number in described.model.get(key) or () if number < size] or None
    (save_merged if has_adapters(small) else save_model)(folder, small, described)


def _numbers(key: str, given: Any, trained: Any, largest: int) -> list[int]:
    """Return the chosen layers or sizes, ascending; by default those of the training and the largest of the model."""
    chosen = given if given is not None else [*(trained or ()), largest]
    numbers = sorted({int(number) for number in chosen})
    if not numbers or not 1 <= numbers[0] <= numbers[-1] <= largest:
        raise ConfigError(f"{key}: expected values from 1 to {largest}, the model's own, got {list(chosen)}")
    return numbers


def _halves(dim: int) -> list[int]:
    """Return a size, its half, and so on, down to 16.

    >>> _halves(96)
    [96, 48, 24]
    """
    found = [dim]
    while found[-1] // 2 >= 16:
        found.append(found[-1] // 2)
    return found


def _into(folder: Path) -> EncodeOptions:
    folder.parent.mkdir(exist_ok=True)
    return EncodeOptions(folder, folder)


def _searched(
    cfg: DictConfig,
    folder: Path,
    model: tuple[DPR, int, int],
    data: RankData,
    what: tuple[str, Collection],
    store: VectorStore,
    device: Device,
    whole: dict[str, Run],
) -> dict[str, Any]:
    """Search a set with one number of layers and one size, write the run, and return measures, sizes and times."""
    (scorer, layers, dim), (name, collection) = model, what
    short = Shortened(store, dim)
    index = open_index(short, index_of(scorer, instantiate(cfg.index)))
    engine = VectorEngine(scorer.smaller(layers, dim), data.collator(collection), short, index, device)
    run, figures = search_set(engine, collection, cfg.depth, cfg.latency_queries)
    compared = whole.setdefault(name, run)  # the first call has all layers and the full size
    written = write_evaluation(
        folder / "evaluation" / name / f"layers-{layers}-dim-{dim}",
        run,
        dict(collection.qrels),
        list(cfg.measures),
        collection.relevance,
        None if compared is run else compared,
        cfg.name,
    )
    log.info("%s, %d layers, %d dimensions: %s", name, layers, dim, in_words(figures))
    latency = figures["latency_ms"]
    return {
        "bytes_per_doc": engine.num_bytes / max(1, len(collection.docs)),
        "index_bytes": engine.num_bytes,
        "vector_bytes": short.num_bytes,
        "query_ms": latency["p50"] if latency else float("nan"),
        "queries_per_second": figures["queries_per_second"],
        "measures": written["measures"],
        "comparison": written.get("comparison"),
    }


def _write(cfg: DictConfig, folder: Path, rows: Sequence[Mapping[str, Any]], measure: str, sets: Sequence[str]) -> None:
    """Write `sizes.json`, `sizes.tsv` and a picture of each set."""
    write_json(folder / "sizes.json", {"checkpoint": str(cfg.checkpoint), "rows": list(rows)})
    sizes_report.write_table(folder / "sizes.tsv", rows)
    for name in sets:
        of_set = [row for row in rows if row["set"] == name]
        shown = next(key for key in of_set[0]["measures"] if key.startswith(measure.split("@")[0]))
        figures.save(sizes_report.draw(of_set, shown, f"{name}: {shown}"), folder, f"{name}_sizes")
    log.info("layers and sizes: %s, pictures/", folder / "sizes.tsv")
