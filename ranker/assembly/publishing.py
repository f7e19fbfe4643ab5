"""Publish a run: its model, settings, test runs, and a card whose numbers are computed again from these test runs."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ranker.assembly.data import load_source, text_limits
from ranker.assembly.exporting import folder_type
from ranker.assembly.probabilities import copy_calibration
from ranker.assembly.run import quiet_libraries
from ranker.assembly.sets_to_rerank import sets_to_rerank
from ranker.checkpoint import load_scorer, without_adapters, write_model
from ranker.config.stored import load_stored
from ranker.data.collection import Collection
from ranker.data.trec import read_run, write_qrels, write_run
from ranker.encoders.model_folder import ADAPTER, read_object
from ranker.errors import CheckpointError, DataError
from ranker.evaluation.report import first_stage_run, write_evaluation
from ranker.evaluation.suite import FIRST_STAGE, QRELS
from ranker.export import _adapter
from ranker.files.checksums import SUMS, verify_folder
from ranker.files.folders import write_folder
from ranker.models.interface import Scorer
from ranker.release import hub
from ranker.release.card import Facts, card
from ranker.release.privacy import check_private, forget_origins, has_local, is_local, without_local
from ranker.run_folder import check_unused
from ranker.training.run_writer import write_text

log = logging.getLogger(__name__)

# keys of the run's configuration that are written to `ranker.yaml` of a published folder
SETTINGS = (
    "model", "encoder", "loss", "data", "optim", "schedule", "trainer", "batch", "max_query_tokens", "max_doc_tokens",
    "max_pair_tokens", "measures", "monitor", "depth", "val_depth", "seed",
)  # fmt: skip
HUB = "hub:"
EQUAL = 1e-9  # largest allowed difference between the stored and the recomputed value of a measure


def publish_checkpoint(cfg: DictConfig) -> None:
    """Write the folder to publish, or upload it.

    Raises:
        RankerError: The run is not complete, its stored measures differ from those of its run files, or the target
            can't be written to.
    """
    quiet_libraries()
    run = Path(cfg.checkpoint)
    if not (run / "config.yaml").is_file() or not (run / "model").is_dir():
        raise CheckpointError(f"checkpoint: expected the run folder of a training with model/, got {str(run)!r}")
    to_hub = str(cfg.to).startswith(HUB)
    target = Path(cfg.to).expanduser().absolute()
    if to_hub:
        hub.check_hub(cfg.to.removeprefix(HUB))
    else:
        check_unused("to", target)
    trained = load_stored(run / "config.yaml")
    verify_folder(run / "model", error=CheckpointError)
    sets = _sets(cfg, run, trained)
    scorer = load_scorer(run)
    if not to_hub:
        with write_folder(target) as partial:
            _fill(partial, target.name, run, trained, scorer, sets, cfg)
        log.info("published: %s", target)
        return
    with tempfile.TemporaryDirectory() as temporary:
        name = cfg.to.removeprefix(HUB)
        with write_folder(Path(temporary) / "model") as partial:
            _fill(partial, name, run, trained, scorer, sets, cfg)
        log.info("published: %s", hub.upload(Path(temporary) / "model", name, cfg.private))


def _sets(cfg: DictConfig, run: Path, trained: DictConfig) -> dict[str, Collection]:
    """Return the test sets for which the run folder has run files, with the candidates of each set.

    Raises:
        DataError: No test set has a run file.
    """
    source = cfg.data if cfg.data is not None else trained.data
    chosen = OmegaConf.create({"split": "test", "candidates": None, "cache_dir": cfg.cache_dir})
    tests = sets_to_rerank(chosen, source, trained.depth).tests
    found = {name: part for name, part in tests.items() if (run / "evaluation" / name / "run.trec").is_file()}
    if not found:
        raise DataError(
            f"{run / 'evaluation'}: expected a run file of {' or '.join(tests)}, got none; a card needs results, so "
            "train to the end with a test set"
        )
    return found


def _fill(
    folder: Path,
    name: str,
    run: Path,
    trained: DictConfig,
    scorer: Scorer,
    sets: Mapping[str, Collection],
    cfg: DictConfig,
) -> None:
    """Write all files of a published folder."""
    _copy_model(folder, run, trained, scorer)
    forget_origins(folder)
    settings: Any = OmegaConf.to_container(trained, resolve=True)
    settings = {key: settings[key] for key in SETTINGS if settings.get(key) is not None}
    base, is_public = _base_of(trained)
    if has_local(settings["data"]):
        del settings["data"]
    settings = without_local(settings)
    write_text(folder / "ranker.yaml", OmegaConf.to_yaml(OmegaConf.create(settings)))
    results = {key: _evaluation(folder, run, key, part, trained) for key, part in sets.items()}
    limits = text_limits(scorer, trained)
    model = {
        "folder_type": folder_type(folder),
        "labels": scorer.encoder.config.num_labels,
        "prompt": getattr(scorer, "prompt", None) is not None,
        "reads": scorer.reads,
        "alone": scorer.encoder.path == "by_length",
        "calibrated": copy_calibration(run, folder) is not None,
        "limits": (limits.query, limits.doc, limits.pair or scorer.encoder.max_tokens),
    }
    facts = Facts(
        name, settings, model, base, is_public, _licences(cfg, trained), cfg.license,
        _read(run / "result.json"), _read(run / "environment.json"),
    )  # fmt: skip
    write_text(folder / "README.md", card(facts, results))
    check_private(folder, [run.absolute(), Path(cfg.cache_dir).absolute()])


def _copy_model(folder: Path, run: Path, trained: DictConfig, scorer: Scorer) -> None:
    """Copy `model/`. If its adapters belong to a base model that exists only on this machine, write merged weights."""
    model = run / "model"
    base = str(read_object(model / ADAPTER).get("base_model_name_or_path"))
    if _adapter.is_own(model) and (is_local(base) or Path(base).exists()):
        write_model(folder, *without_adapters(scorer, trained))
        return
    shutil.copytree(model, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(SUMS))


def _evaluation(folder: Path, run: Path, name: str, collection: Collection, trained: DictConfig) -> dict[str, Any]:
    """Write the run, judgements and first stage of a set; return its measures, computed from the written files.

    Raises:
        DataError: `metrics.json` of the run has other values.
    """
    target = folder / "evaluation" / name
    qrels, first_stage = dict(collection.qrels), first_stage_run(collection, trained.depth)
    written = write_evaluation(
        target,
        read_run(run / "evaluation" / name / "run.trec"),
        qrels,
        list(trained.measures),
        collection.relevance,
        first_stage,
        "ranker",
    )
    write_qrels(target / QRELS, qrels)
    if first_stage is not None:
        write_run(target / FIRST_STAGE, first_stage, "first_stage")
    stored = _read(run / "evaluation" / name / "metrics.json").get("measures", {})
    for measure, value in written["measures"].items():
        if abs(stored.get(measure, value) - value) > EQUAL:
            raise DataError(
                f"{run / 'evaluation' / name / 'metrics.json'}: expected {measure} {value:.6f}, computed from the run "
                f"file, got {stored[measure]:.6f}; the run or the judgements have changed, so evaluate again"
            )
    return written


def _base_of(trained: DictConfig) -> tuple[str, bool]:
    """Return the name of the encoder from which the training started, and whether it is a Hugging Face Hub id."""
    encoder = trained.encoder
    if encoder.get("package"):
        return f"{encoder.name} of the package {encoder.package}", False
    if is_local(encoder.name) or Path(encoder.name).exists():
        return Path(encoder.name).name, False
    return str(encoder.name), "/" in encoder.name


def _licences(cfg: DictConfig, trained: DictConfig) -> dict[str, str]:
    """Return the licences that the encoder's package and the data source declare."""
    licences = {}
    package = trained.encoder.get("package")
    for distribution in importlib.metadata.packages_distributions().get(package, []) if package else []:
        metadata: Any = importlib.metadata.metadata(distribution)
        stated = metadata.get("License-Expression") or metadata.get("License")
        if stated:
            licences[f"Encoder ({distribution} {metadata['Version']})"] = stated
    notice = load_source(cfg.data if cfg.data is not None else trained.data, cfg.cache_dir).notice
    if notice:
        licences["Data"] = notice
    return licences


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return content
