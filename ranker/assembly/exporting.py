"""Export a checkpoint: check the format, write the files, and keep them only if they give the original's scores."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ranker.assembly.data import text_limits
from ranker.assembly.probabilities import copy_calibration
from ranker.assembly.reranker import Reranker
from ranker.assembly.run import open_run, quiet_libraries
from ranker.assembly.sets_to_rerank import sets_to_rerank
from ranker.checkpoint import DESCRIBED, load_scorer, read_description, without_adapters
from ranker.config.sets import sets_of
from ranker.data.collate import Collator
from ranker.data.collection import Collection, Splits
from ranker.data.datamodule import RankData
from ranker.data.options import BatchOptions
from ranker.data.pair_cuts import cut_otherwise
from ranker.data.score_batches import top_candidates
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.encoders.pruned_heads import removed_heads
from ranker.errors import CheckpointError, ConfigError, RankerError
from ranker.exits.early_exit import EarlyExit
from ranker.export import _adapter
from ranker.export._modules import has_modules, is_cross_encoder, is_multi_vector
from ranker.files.folders import write_folder
from ranker.models.interface import Scorer
from ranker.release import onnx_graph
from ranker.release.layouts import cast, check_format, megabytes, write_layout
from ranker.release.onnx_program import OnnxProgram, write_settings
from ranker.release.parity import BOUNDS, ScoredSet, compare, faults, timed
from ranker.release.programs import BATCH, program_of
from ranker.release.usage import readme
from ranker.run_folder import check_unused
from ranker.training.run_writer import write_json, write_text

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ComparedPairs:
    """The pairs of a test set.

    Args:
        collection: The set.
        query_ids: Query of each pair.
        doc_ids: Doc of each pair.
        texts: Query and doc of each pair.
        limits: Largest number of tokens per text.
    """

    collection: Collection
    query_ids: list[str]
    doc_ids: list[str]
    texts: list[tuple[str, str]]
    limits: TextLimits


def export_checkpoint(cfg: DictConfig) -> None:
    """Write an export and `parity.json`, the comparison of its scores with the original's.

    Raises:
        ConfigError: The format can't hold the model, or the folder is in use.
        CheckpointError: The export's scores are too far from the original's; the export is removed.
    """
    quiet_libraries()
    path = Path(cfg.checkpoint)
    trained = OmegaConf.create(read_description(path))
    if any(key not in trained for key in DESCRIBED):
        raise CheckpointError(
            f"checkpoint: expected a run folder or its model/ folder with ranker.yaml, got {str(path)!r}"
        )
    scorer = load_scorer(path, cfg.weights, trust_remote_code=cfg.trust_remote_code)
    if removed_heads(scorer.encoder.config):
        raise CheckpointError(
            f"checkpoint: expected a model with all of its attention heads, got {str(path)!r}, whose heads ranker "
            "compress removed in part; other programs can't read such a model"
        )
    if isinstance(scorer, EarlyExit) and scorer.elsewhere():
        raise ConfigError(
            f"checkpoint: expected a model that scores with its last layer, got exit={scorer.exit} and "
            f"margin={scorer.margin}; train with model.exit=null model.margin=null; evaluations and the "
            "server can still exit early with inference.exit or inference.margin"
        )
    check_format(scorer, cfg.format, cfg.dtype)
    target = Path(cfg.to or Path(HydraConfig.get().runtime.output_dir) / cfg.format).absolute()
    check_unused("to", target)
    sets = _test_pairs(cfg, scorer, trained)
    open_run(cfg)
    with write_folder(target) as partial:
        facts = _write(partial, scorer, trained, cfg)
        facts["calibrated"] = copy_calibration(path, partial) is not None
        content = _compared(partial, scorer, sets, cfg)
        refused = faults(content["sets"], content["max_gap"], content["max_loss"])
        if refused:
            raise CheckpointError("\n".join(f"export: {line}; nothing is written" for line in refused))
        write_json(partial / "parity.json", content)
        first = next(iter(sets.values())).limits
        facts["limits"] = (first.query, first.doc, first.pair or scorer.encoder.max_tokens)
        write_text(partial / "README.md", readme(cfg.format, facts, content))
    for name, part in content["sets"].items():
        log.info("%s: largest gap %.2g of scores with deviation %.3g", name, part["largest_gap"], part["score_std"])
    log.info("export: %s", target)


def _test_pairs(cfg: DictConfig, scorer: Scorer, trained: DictConfig) -> dict[str, ComparedPairs]:
    """Return set name -> the pairs of this test set that an evaluation of the checkpoint scores."""
    depth = cfg.depth or trained.get("depth", 100)
    source = cfg.data if cfg.data is not None else trained.data
    nodes: Mapping[str, Any] = sets_of(source)
    splits = sets_to_rerank(cfg, source, depth)
    sets = {}
    for name, collection in splits.tests.items():
        assert collection.candidates is not None
        candidates = top_candidates(collection, depth)
        queries = list(candidates)[: cfg.max_queries]
        ids = [(query_id, doc_id) for query_id in queries for doc_id in candidates[query_id]]
        if not ids:
            raise ConfigError(f"data: expected candidates of {name} to compare scores on, got none")
        docs = {doc_id: collection.docs[doc_id].full_text for doc_id in dict.fromkeys(doc_id for _, doc_id in ids)}
        texts = [(collection.queries[query_id], docs[doc_id]) for query_id, doc_id in ids]
        limits = text_limits(scorer, trained, nodes.get(name) if nodes else None)
        collection = replace(collection, instructions=None)  # other programs read only query and doc
        sets[name] = ComparedPairs(collection, [query for query, _ in ids], [doc for _, doc in ids], texts, limits)
    return sets


def _write(folder: Path, scorer: Scorer, trained: DictConfig, cfg: DictConfig) -> dict[str, Any]:
    """Write the files of a format; return the values that the export's README shows."""
    plain, described = scorer, trained
    if _adapter.has_adapters(scorer):
        plain, described = without_adapters(scorer, trained)
    prompt = getattr(scorer, "prompt", None) is not None
    if not cfg.format.startswith("onnx"):
        write_layout(folder, plain, described, cfg.format)
        cast(folder, cfg.dtype)
        facts = {"folder_type": folder_type(folder), "labels": plain.encoder.config.num_labels, "prompt": prompt}
        return facts | {"alone": scorer.encoder.path == "by_length"}
    layout = folder / ".layout"
    layout.mkdir()
    write_layout(layout, plain, described, "hf" if hasattr(scorer, "words") else "onnx")
    graphs = onnx_graph.write_graphs(folder, layout, cfg.dtype)
    onnx_graph.copy_texts(layout, folder)
    shutil.rmtree(layout)
    if cfg.format == "onnx_int8":
        for name in graphs:
            onnx_graph.quantize(folder / name)
    write_settings(folder, scorer, graphs)
    tokens = getattr(scorer, "vectors", "") == "tokens"
    return {"graphs": graphs, "reads": scorer.reads, "prompt": prompt, "tokens": tokens}


def folder_type(folder: Path) -> str:
    """Return what a folder holds: `classifier`, `words`, `cross_encoder`, `bi_encoder` or `multi_vector`."""
    if has_modules(folder):
        if is_cross_encoder(folder):
            return "cross_encoder"
        return "multi_vector" if is_multi_vector(folder) else "bi_encoder"
    head = folder / "lm_reranker.json"
    return "words" if head.is_file() and "yes_no" in head.read_text(encoding="utf-8") else "classifier"


def _compared(folder: Path, scorer: Scorer, sets: Mapping[str, ComparedPairs], cfg: DictConfig) -> dict[str, Any]:
    """Score all pairs with the original and with the files of an export; return the content of `parity.json`."""
    options: dict[str, Any] = {
        "accelerator": cfg.trainer.accelerator, "precision": "32-true", "max_tokens": cfg.batch.max_tokens
    }  # fmt: skip
    is_onnx = cfg.format.startswith("onnx")
    gpu = torch.cuda.is_available() and cfg.trainer.accelerator != "cpu"
    batch = 1 if scorer.encoder.path == "by_length" else BATCH
    with _other_program():
        program: Any = OnnxProgram(folder) if is_onnx else program_of(folder, "cuda" if gpu else "cpu", batch)
    content: dict[str, Any] = {}
    rates: dict[str, list[float]] = {"original": [], "export": []}
    for name, pairs in sets.items():
        original, rate = timed(Reranker(scorer, pairs.limits, **options).score, pairs.texts)
        rates["original"].append(rate)
        score = Reranker(program, pairs.limits, **options).score if is_onnx else program
        with _other_program():
            exported, rate = timed(score, pairs.texts)
        rates["export"].append(rate)
        alike = np.ones(len(original), bool) if is_onnx else _cut_alike(scorer, pairs, cfg)
        qrels = dict(pairs.collection.qrels)
        content[name] = compare(
            ScoredSet(pairs.query_ids, pairs.doc_ids, original, exported, alike, qrels, pairs.collection.relevance)
        )
    precision = "int8" if cfg.format == "onnx_int8" else cfg.dtype
    weights = sum(weight.numel() * weight.element_size() for weight in scorer.parameters())
    return {
        "format": cfg.format,
        "dtype": precision,
        "sets": content,
        "max_gap": cfg.max_gap if cfg.max_gap is not None else BOUNDS[precision],
        "max_loss": cfg.max_loss,
        "pairs_per_second": {key: float(np.mean(values)) for key, values in rates.items()},
        "size_mb": {"original": weights / 1e6, "export": megabytes(folder)},
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "device": "cuda" if gpu else "cpu",
        "torch": torch.__version__,
    }


@contextmanager
def _other_program() -> Iterator[None]:
    """Turn an error of the program for which the export is written into one line.

    Raises:
        CheckpointError: The program can't run the files.
    """
    try:
        yield
    except RankerError:
        raise
    except Exception as error:  # other programs raise errors of any type
        raise CheckpointError(
            "export: expected files that the other program runs, got its error "
            f"{type(error).__name__}: {' '.join(str(error).split())}; nothing is written"
        ) from error


def _cut_alike(scorer: Scorer, pairs: ComparedPairs, cfg: DictConfig) -> np.ndarray:
    """Return for each pair whether other programs truncate it as the training did, bool [pairs]."""
    if scorer.reads != "pairs":
        return np.ones(len(pairs.texts), bool)  # the two texts are read apart, each with its own limit, as in training
    data = RankData(
        Splits(None, None, {}), ScorerInputs.of(scorer), BatchOptions(), pairs.limits, cache_dir=cfg.cache_dir
    )
    collator: Collator = data.collator(pairs.collection)
    queries, docs = collator.queries.rows(pairs.query_ids), collator.docs.rows(pairs.doc_ids)
    if not collator.pair.affixes:
        return ~cut_otherwise(collator, queries, docs)
    lengths = collator.queries.lengths[queries].astype(np.int64), collator.docs.lengths[docs].astype(np.int64)
    whole = lengths[0] + lengths[1] + collator.pair.num_special < collator.max_pair_tokens
    return whole & (lengths[0] < collator.max_query_tokens) & (lengths[1] < collator.max_doc_tokens)
