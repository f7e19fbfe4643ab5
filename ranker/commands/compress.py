"""`ranker compress`: cut layers, attention heads and feed-forward units out of a trained ranker."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import Tensor

from ranker.assembly.data import batch_options, text_limits
from ranker.assembly.importance import kept_heads, kept_layers, kept_units, layer_contributions, unit_importances
from ranker.assembly.labelling import docs_to_score
from ranker.assembly.run import one_run, open_run, quiet_libraries
from ranker.checkpoint import load_scorer, read_description
from ranker.cli.sweep import run_in_separate_process
from ranker.config.stored import load_stored
from ranker.data.collection import Candidates, Collection, Splits
from ranker.data.datamodule import RankData
from ranker.data.scorer_inputs import ScorerInputs
from ranker.encoders.execution import DEFAULT
from ranker.errors import ConfigError
from ranker.exits.early_exit import EarlyExit
from ranker.export._adapter import has_adapters
from ranker.export._cut import cut, encoder_folder, head_outputs, unit_outputs, units_of
from ranker.models.interface import Scorer
from ranker.training.run_writer import write_json
from ranker.types import RankBatch

log = logging.getLogger(__name__)


@one_run()
def compress(cfg: DictConfig) -> None:
    """Write `model/` with the kept layers, heads and units, and `compress.json` with sizes and times of both models.

    With `tune` the smaller model is trained further, into `tuned/`.

    Raises:
        RankerError: The model can't be cut in this way, or the data is wrong.
    """
    quiet_libraries()
    path = Path(cfg.checkpoint)
    source = path / "model" if (path / "config.yaml").is_file() else path
    trained = OmegaConf.create(read_description(path))
    execution = replace(DEFAULT, trust_remote_code=cfg.trust_remote_code)
    scorer: Any = load_scorer(path, cfg.weights, execution)
    _check(cfg, path, source, scorer)
    total = scorer.encoder.num_layers
    _, size = units_of(scorer.encoder.config) if cfg.units < 1 else ("", 0)
    collection = _sample(docs_to_score(cfg, trained), cfg.pairs)
    folder = open_run(cfg)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scorer.to(device).eval()
    batches = list(_batches(cfg, scorer, trained, collection, device))  # the smaller model reads the same tokens
    layers = _layers(cfg, scorer, total, batches)
    units: list[Tensor] | None = None
    heads: list[list[int]] | None = None
    if cfg.units < 1 or cfg.heads < 1:
        padded: Any = load_scorer(path, cfg.weights, replace(execution, ragged=False))
        padded.to(device).eval()
        pairs = list(_batches(cfg, padded, trained, collection, device, single=True))
        if cfg.units < 1:
            importances = unit_importances(padded, pairs, lambda model: unit_outputs(model, total, size))
            units = [kept_units(part, cfg.units, cfg.multiple) for part in importances]
        if cfg.heads < 1:
            config = padded.encoder.config
            width = config.hidden_size // config.num_attention_heads
            importances = unit_importances(padded, pairs, lambda model: head_outputs(model, total), width)
            heads = _heads(importances, layers, cfg.heads)
    cut(source, folder / "model", layers, units, heads)
    smaller: Any = load_scorer(folder / "model", execution=execution)
    smaller.to(device).eval()
    both = {"before": (scorer, source), "after": (smaller, folder / "model")}
    content: dict[str, Any] = {
        "checkpoint": str(path),
        "layers": layers,
        "units": None if units is None else len(units[0]),
        "heads": None if heads is None else [heads[layer] for layer in layers],
        "pairs": sum(int(batch.doc_mask.sum()) for batch in batches),
        **{
            name: {
                "parameters": sum(weight.numel() for weight in model.parameters()),
                "megabytes": sum(file.stat().st_size for file in where.rglob("*.safetensors")) / 1e6,
                "seconds": _seconds(model, batches),
            }
            for name, (model, where) in both.items()
        },
    }
    write_json(folder / "compress.json", content)
    log.info(
        "%d of %d layers, %s heads, %s units a layer; %.1f of %.1f million parameters, %.2f of %.2f s for %d pairs",
        len(layers),
        total,
        "all" if heads is None else sum(map(len, content["heads"])),
        content["units"] or "all",
        content["after"]["parameters"] / 1e6,
        content["before"]["parameters"] / 1e6,
        content["after"]["seconds"],
        content["before"]["seconds"],
        content["pairs"],
    )
    log.info("smaller model: evaluate it, or train it further, with checkpoint=%s", folder / "model")
    if cfg.tune:
        _tune(path, folder)


def _check(cfg: DictConfig, path: Path, source: Path, scorer: Any) -> None:
    """Check, before the long work, that the model can be cut.

    Args:
        cfg: The configuration.
        path: The checkpoint.
        source: The model folder of the checkpoint.
        scorer: The model.

    Raises:
        ConfigError: The model or the options do not fit.
        CheckpointError: The folder has no encoder that can be cut.
    """
    if has_adapters(scorer):
        raise ConfigError(f"checkpoint: expected merged weights, got adapters in {path}; train with lora.merge=true")
    if not source.is_dir() or cfg.weights != "best":
        raise ConfigError(f"checkpoint: expected a finished run or a model folder, got {path} without model/")
    if cfg.tune and not (path / "config.yaml").is_file():
        raise ConfigError(f"tune: expected false without a run folder to train again, got true with {path}")
    encoder_folder(source)
    if cfg.heads < 1:
        head_outputs(scorer.encoder.model, scorer.encoder.num_layers)
    if getattr(scorer, "reads_lists", False):
        raise ConfigError(f"checkpoint: expected a model that scores each doc alone, got {type(scorer).__name__}")
    if isinstance(scorer, EarlyExit):
        raise ConfigError(
            f"checkpoint: expected a model without early heads, got {path}, whose early heads fix its layers; "
            "set inference.exit= to score with fewer layers"
        )


def _tune(run: Path, folder: Path) -> None:
    """Train the smaller model of `model/` with the configuration of the original run; write the result to `tuned/`."""
    training = load_stored(run / "config.yaml")
    training.checkpoint, training.resume = str(folder / "model"), False
    tuned = folder / "tuned"
    tuned.mkdir()
    run_in_separate_process("train", tuned, OmegaConf.to_yaml(training))
    log.info("smaller model, trained further: checkpoint=%s", tuned)


def _layers(cfg: DictConfig, scorer: Scorer, total: int, batches: list[RankBatch]) -> list[int]:
    """Return the indices of the layers to keep."""
    if cfg.layers is None:
        return list(range(total))
    if isinstance(cfg.layers, ListConfig):
        chosen = sorted(cfg.layers)
        if not chosen or len(set(chosen)) < len(chosen) or not 0 <= chosen[0] <= chosen[-1] < total:
            raise ConfigError(f"layers: expected different indices from 0 to {total - 1}, got {list(cfg.layers)}")
        return chosen
    if not 1 <= cfg.layers <= total:
        raise ConfigError(f"layers: expected 1 to {total}, the layers of the model, got {cfg.layers}")
    return kept_layers(
        total, cfg.layers, cfg.drop, layer_contributions(scorer, batches) if cfg.drop == "contribution" else None
    )


def _heads(importances: list[Tensor], layers: list[int], share: float) -> list[list[int]]:
    """Return the heads to keep in each layer: a share of them in the kept layers, all of them in the other layers."""
    kept = dict(zip(layers, kept_heads([importances[layer] for layer in layers], share), strict=True))
    return [kept.get(layer, list(range(len(part)))) for layer, part in enumerate(importances)]


def _sample(collection: Collection, pairs: int) -> Collection:
    """Return the collection with `pairs` pairs in all: the first candidates of each query."""
    candidates = collection.candidates
    assert candidates is not None
    ids = candidates.query_ids[:pairs]
    depth = -(-pairs // len(ids))
    few = candidates.top(depth)
    part = Candidates.from_lists((name, few[name], few.scores_of(name).tolist()) for name in ids)
    return replace(collection, candidates=part)


def _batches(
    cfg: DictConfig, scorer: Any, trained: Any, collection: Collection, device: torch.device, single: bool = False
) -> Iterator[RankBatch]:
    """Yield the pairs in batches under the token budget, or one by one."""
    options = batch_options(cfg)
    data = RankData(
        Splits(None, None, {}),
        ScorerInputs.of(scorer),
        replace(options, eval_max_tokens=1) if single else options,
        text_limits(scorer, trained),
        depth=None,
        cache_dir=cfg.cache_dir,
    )
    batches = data.score_batches(collection)
    for i in range(len(batches)):
        yield batches[i].batch.to(device)


def _seconds(scorer: Any, batches: list[RankBatch]) -> float:
    """Return the seconds to score the batches: the shortest of three measurements."""
    best = float("inf")
    with torch.no_grad():
        for _ in range(3):
            started = time.perf_counter()
            for batch in batches:
                scorer(batch).sum().item()
            best = min(best, time.perf_counter() - started)
    return best
