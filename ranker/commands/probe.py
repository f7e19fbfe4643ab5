"""`ranker probe`: probe each layer of an encoder or of a trained ranker, and write tables, pictures and a report."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch.loggers import TensorBoardLogger
from omegaconf import DictConfig, OmegaConf

from ranker.assembly.data import load_source, print_notice
from ranker.assembly.run import cfg_values, one_run, open_run
from ranker.assembly.training_queries import seen_in_training, source_name
from ranker.config.targets import constructor_keys
from ranker.data.collection import Splits
from ranker.errors import ConfigError
from ranker.probing.examples import ProbeTask
from ranker.probing.options import StudyOptions
from ranker.probing.pairs import sample_pairs
from ranker.probing.report import log_to_wandb, write_report
from ranker.probing.results import Results, TaskRecord
from ranker.probing.state_cache import StateCache
from ranker.probing.study import Study
from ranker.probing.subject import Subject
from ranker.probing.summary import summarise
from ranker.probing.training_options import TrainingOptions
from ranker.retrieval.first_stage import FirstStage, with_candidates
from ranker.training import dashboards
from ranker.training.run_writer import write_json

log = logging.getLogger(__name__)

STUDIED = (
    "seeds",
    "controls",
    "control_seeds",
    "layers",
    "portions",
    "validation",
    "units",
    "batching",
    "group_by",
    "val_fraction",
    "test_fraction",
    "max_query_tokens",
    "max_doc_tokens",
    "skip_unavailable",
    "seed",
    "workers",
    "reuse",
)


@one_run()
def probe(cfg: DictConfig) -> None:
    """Probe each layer of an encoder or of a trained ranker, with controls; write tables, pictures and a report."""
    folder = open_run(cfg)
    pl.seed_everything(cfg.seed, verbose=False)  # an encoder may be random
    tasks = [instantiate(node) for node in cfg.probe.values()]
    splits = load_source(cfg.data, cfg.cache_dir)
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
    if isinstance(logger, TensorBoardLogger):  # wandb gets the pictures with the report
        dashboards.show_pictures([logger], folder)
        logger.finalize("success")


def run_probe(
    folder: Path,
    cfg: Mapping[str, Any],
    splits: Splits,
    tasks: Sequence[ProbeTask],
    subject: Subject,
    logger: Any | None = None,
) -> Results:
    """Probe, compare, and write `probe_results.csv`, `codes/`, `data/`, `pictures/`, `report.md` and `result.json`.

    Args:
        folder: The run folder.
        cfg: The configuration as plain values.
        splits: Collections to take the pairs from.
        tasks: Probing tasks.
        subject: The encoder or ranker to probe.
        logger: Lightning's logger; only a WandbLogger gets the results.

    Raises:
        RankerError: An option, a file or a label is wrong.
    """
    started = time.perf_counter()
    options = StudyOptions(**{key: cfg[key] for key in STUDIED})
    training = TrainingOptions(**cfg["training"])
    cache_dir = Path(cfg["cache_dir"])
    cache = StateCache(cache_dir / "probe_states", **cfg["cache"])
    device = _device(cfg["device"])
    other, earlier = _second(cfg["compare"], cfg["weights"])
    collection = {"train": splits.train, "val": splits.val, "test": next(iter(splits.tests.values()), None)}.get(
        cfg["split"]
    )
    if collection is None:
        raise ConfigError(f"split: expected one of train, val, test that the data has, got {cfg['split']!r}")
    collection = with_candidates(Splits(None, collection, {}), cfg["depth"], cache_dir, FirstStage.of(cfg["data"])).val
    assert collection is not None
    sample = sample_pairs(
        collection,
        cfg["max_pairs"],
        cfg["docs_per_query"],
        cfg["depth"],
        cfg["seed"],
        cfg["val_fraction"],
        cfg["test_fraction"],
    )
    subjects = [subject] if other is None else [subject, other]
    study = Study(subjects, tasks, sample, options, training, cache, cache_dir, device)
    if earlier is not None:
        check_earlier(earlier, study.prepare(), options.seeds, study.layers_of(subject))
    results = study.run()
    warnings = [*study.warnings]
    for path in (cfg["checkpoint"], cfg["compare"] if other is not None else None):
        if path is not None:
            warnings += seen_in_training(Path(path), cfg["data"], splits, study.queries)
    if earlier is not None:
        results, added = with_earlier(results, earlier)
        warnings += added
    results.write(folder)
    seconds = time.perf_counter() - started
    notes = [
        f"{len(sample.pairs)} shared pairs of {_data_name(cfg['data'])}, split {cfg['split']}; "
        f"parts by {options.group_by}",
        f"seeds {list(options.seeds)}, controls with the first {options.control_seeds}; "
        f"validation {options.validation}",
        f"training: {', '.join(f'{key}={value}' for key, value in cfg['training'].items())}; states in {cache.dtype}",
        f"{seconds:.0f} s on {device}",
    ]
    shown = write_report(folder, results, warnings, notes)
    write_json(folder / "result.json", _objective(results) | {"seconds": seconds, "warnings": warnings})
    if logger is not None and hasattr(logger, "log_image"):
        log_to_wandb(logger, results, shown)
    for warning in warnings:
        log.warning("%s", warning)
    log.info("report: %s", folder / "report.md")
    return results


def _data_name(data: Mapping[str, Any]) -> str:
    name = source_name(data)
    return f"{name} {Path(data['path']).name}" if data.get("path") else name


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device: expected one of auto, cpu, cuda; got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: expected a GPU for cuda, got none; set device=cpu")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def _second(compare: str | None, weights: str) -> tuple[Subject | None, Results | None]:
    """Return a second ranker to probe, or the results of an earlier probing run; both are None without `compare`."""
    if compare is None:
        return None, None
    if (Path(compare) / "probe_results.csv").is_file():
        return None, Results.read(Path(compare))
    return Subject.of_checkpoint(Path(compare), weights), None


def check_earlier(
    earlier: Results, records: Mapping[str, TaskRecord], seeds: Sequence[int], layers: Sequence[int]
) -> None:
    """Refuse an earlier run whose codes can't be compared with those of this run, before this run is computed.

    Args:
        earlier: Results of the earlier run; its first subject is compared.
        records: The tasks of this run.
        seeds: The seeds of this run.
        layers: The layers of this run.

    Raises:
        ConfigError: The earlier run has none of the tasks, or other data, seeds, layers or coding options.
    """
    model = earlier.models[0]
    shared = [task for task in records if earlier.of(model, task)]
    if not shared:
        raise ConfigError(
            f"compare: expected an earlier run of one of {', '.join(records)}, got {', '.join(earlier.tasks)}"
        )
    for task in shared:
        ours, theirs = records[task].description, earlier.tasks[task].description
        our_coding, their_coding = (description.get("coding", {}) for description in (ours, theirs))
        other = next((name for name in our_coding if our_coding[name] != their_coding.get(name)), None)
        if other is not None:
            raise ConfigError(
                f"compare: {task}: expected an earlier run with {other}={our_coding[other]}, "
                f"got {their_coding.get(other, 'a run without this option')}; set the same value, or probe again"
            )
        if ours["data_hash"] != theirs["data_hash"]:
            raise ConfigError(
                f"compare: {task}: expected an earlier run on the same pairs, spans and labels "
                f"(data hash {ours['data_hash']}), got {theirs['data_hash']}; set data, split, max_pairs, "
                "docs_per_query, depth, seed, group_by, val_fraction and test_fraction as in the earlier run, or "
                "probe both rankers in one run: set compare to the folder of the other ranker"
            )
        probed = earlier.by_layer(model, task)
        known = sorted({result.seed for results in probed.values() for result in results})
        if known != sorted(seeds):
            raise ConfigError(
                f"compare: {task}: expected an earlier run with seeds={sorted(seeds)}, got {known}; set the same seeds"
            )
        if not probed.keys() & set(layers):
            raise ConfigError(
                f"compare: {task}: expected an earlier run of one of the layers {list(layers)}, "
                f"got {list(probed)}; set layers"
            )


def with_earlier(results: Results, earlier: Results) -> tuple[Results, list[str]]:
    """Add the first subject of an earlier run as the second subject of this run.

    Returns:
        The results of the tasks that both runs have, and a warning for each other task.
    """
    model = earlier.models[0]
    name = f"{model} (earlier run)" if model in results.models else model
    shared = [task for task in results.tasks if earlier.of(model, task)]
    lacking = [task for task in results.tasks if task not in shared]
    kept = [result for result in results.all if result.task in shared]
    kept += [replace(result, model=name) for result in earlier.all if result.model == model and result.task in shared]
    warnings = [f"{task} is not in the earlier run and is left out" for task in lacking]
    return Results(kept, {task: results.tasks[task] for task in shared}, results.units), warnings


def _objective(results: Results) -> dict[str, Any]:
    best = {
        model: {
            task: {"layer": summary.best, "compression": summary.compression}
            for task in results.tasks
            for summary in [summarise(results, model, task)]
        }
        for model in results.models
    }
    return {"best": best}
