"""Model folders: write weights and configuration for other programs, and read them to evaluate or train further."""

from __future__ import annotations

import copy
import importlib
import logging
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ranker import export
from ranker.config.stored import load_stored, resumed_runs
from ranker.config.targets import constructor_keys, is_trusted
from ranker.data.scorer_inputs import pair_layout
from ranker.encoders.alignment import align
from ranker.encoders.execution import Execution
from ranker.encoders.loading import needs_trust
from ranker.encoders.lora import merge_adapter
from ranker.encoders.lora_layers import has_adapter
from ranker.encoders.model_folder import ADAPTER
from ranker.errors import CheckpointError, ConfigError, RankerError
from ranker.export import _adapter
from ranker.export._modules import has_modules
from ranker.files.checksums import verify_folder
from ranker.files.folders import write_folder
from ranker.models.interface import Scorer, is_bi_encoder
from ranker.passages.build import with_passages
from ranker.passages.windowed import Windowed, scorer_of_windows
from ranker.training.checkpoint_weights import load_checkpoint

log = logging.getLogger(__name__)

# keys of the training's configuration that a model folder stores in ranker.yaml
DESCRIBED = (
    "model",
    "encoder",
    "data",
    "passages",
    "max_query_tokens",
    "max_doc_tokens",
    "max_pair_tokens",
    "depth",
    "length_buckets",
)


def save_model(folder: Path, scorer: Scorer, cfg: DictConfig) -> None:
    """Write a scorer's Hugging Face folder and `ranker.yaml`; the folder is complete or absent at any time.

    If the scorer has adapters, the folder contains them and the other trained weights, but not the base weights, see
    `ranker.export._adapter`. If the base weights are random, the folder contains the merged weights instead.

    Args:
        folder: The folder; it must not exist or must be empty.
        scorer: The scorer.
        cfg: Configuration of the scorer's training.

    Raises:
        CheckpointError: The folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(
            f"{folder}: expected a new or an empty folder to write the model to, got one that is in use; name another"
        )
    if _adapter.has_adapters(scorer) and scorer.encoder.source is None:
        log.info("model/: the base weights of the adapters are random, so the merged weights are written")
        scorer, cfg = without_adapters(scorer, cfg)
    with write_folder(folder) as partial:
        write_model(partial, scorer, cfg)
    elsewhere = scorer.elsewhere() if hasattr(scorer, "elsewhere") else ""
    if elsewhere:
        log.warning("%s/: %s", folder.name, elsewhere)


def save_merged(folder: Path, scorer: Scorer, cfg: DictConfig) -> None:
    """Write a scorer with adapters as a folder without adapters, whose weights are the base weights plus the adapters.

    Args:
        folder: See `save_model`.
        scorer: The scorer, which keeps its adapters.
        cfg: Configuration of the scorer's training.
    """
    save_model(folder, *without_adapters(scorer, cfg))


def without_adapters(scorer: Scorer, cfg: DictConfig) -> tuple[Scorer, DictConfig]:
    """Return a copy of a scorer whose adapters are merged into its weights, and a configuration without adapters."""
    whole, plain = copy.deepcopy(scorer), cfg.copy()
    for module in list(whole.modules()):
        if has_adapter(module):
            merge_adapter(module)
    OmegaConf.update(plain, "encoder.lora", None, merge=False)
    return whole, plain


def write_model(partial: Path, scorer: Scorer, cfg: DictConfig) -> None:
    """Write a scorer's files and `ranker.yaml` into a folder, without checksums; see `save_model`."""
    positions = scorer.encoder.max_tokens
    longest_pair, longest_doc = longest_pair_of(scorer, cfg), cfg.max_doc_tokens
    if isinstance(scorer, Windowed):  # other programs read one row per doc, about as long as one window
        longest_doc = scorer.windows.length + scorer.windows.title
    if _adapter.has_adapters(scorer):
        # a model of the hub has a cache folder as its `source`, so the name in the configuration is stored instead
        base = scorer.encoder.source if cfg.encoder.get("package") else cfg.encoder.name
        _adapter.write(partial, scorer_of_windows(scorer), str(base), longest_pair)
        if isinstance(scorer, Windowed):
            scorer.save_aggregation(partial)
    elif is_bi_encoder(scorer):
        query, doc = scorer.layouts()
        longest_query = min(positions, cfg.max_query_tokens + query.num_added)
        scorer.save(partial, max_tokens=min(positions, longest_doc + doc.num_added), max_query_tokens=longest_query)
    else:
        scorer.save(partial, max_tokens=longest_pair)
    if "model" in cfg:  # if it is missing, nothing is known about the training
        write_description(partial, cfg)


def longest_pair_of(scorer: Scorer, cfg: DictConfig) -> int:
    """Return the length of a training's longest pair, special tokens included.

    If docs are cut into windows, a pair is a query and a window; the result is then approximate.
    """
    positions = scorer.encoder.max_tokens
    longest = min(positions, cfg.max_pair_tokens or positions)
    if not isinstance(scorer, Windowed) or scorer.reads != "pairs":
        return longest
    layout = pair_layout(scorer)
    prompts = sum(layout.affixes_of(text).prefix_tokens for text in range(2))
    window = scorer.windows.length + scorer.windows.title
    return min(longest, cfg.max_query_tokens + window + layout.num_special + prompts)


def write_description(folder: Path, cfg: DictConfig) -> None:
    """Write `ranker.yaml`, the `DESCRIBED` keys of a training's configuration."""
    # resolved before the other keys are left out, since values may refer to them
    whole: Any = OmegaConf.to_container(cfg, resolve=True)
    described = OmegaConf.create({key: whole[key] for key in DESCRIBED if key in whole})
    (folder / "ranker.yaml").write_text(OmegaConf.to_yaml(described), encoding="utf-8")


def read_description(path: Path) -> dict[str, Any]:
    """Return the `DESCRIBED` keys of a run folder or model folder; empty for a folder of another program.

    Raises:
        CheckpointError: The folder is not a run folder or model folder.
    """
    for described in (path / "config.yaml", path / "ranker.yaml"):
        if described.is_file():
            content: Any = OmegaConf.to_container(load_stored(described))
            return {key: content[key] for key in DESCRIBED if key in content}
    if any((path / name).is_file() for name in ("config.json", "modules.json", ADAPTER)):
        return {}
    raise CheckpointError(
        f"checkpoint: expected a run folder or a model folder, got {str(path)!r}, "
        "which has no config.yaml, ranker.yaml, config.json, modules.json or adapter_config.json"
    )


def load_scorer(
    path: Path, weights: str = "best", execution: Execution | None = None, trust_remote_code: bool = False
) -> Scorer:
    """Load a scorer from a run folder, its `model/` folder, or a folder of another program.

    Folders of other programs are: a Hugging Face model for sequence classification, a sentence-transformers model with
    one or several vectors per text, a Stanford ColBERT.

    Args:
        path: The folder.
        weights: For a run folder, `best` (`model/`, or `checkpoints/best.ckpt` of an unfinished run) or `last`.
        execution: How the encoders compute; None: as the folder says.
        trust_remote_code: Whether to allow running code from the folder. Ignored if `execution` is given, which has the
            same option.

    Raises:
        CheckpointError: The folder has no trained weights, or its weights do not fit its configuration.
    """
    description = read_description(path)
    in_run = (path / "config.yaml").is_file()
    _refuse_pretraining(path)
    if execution is None:
        stored = Execution.of(description.get("encoder") or {})
        execution = replace(stored, trust_remote_code=trust_remote_code)
    if weights == "last" and not in_run:
        raise CheckpointError(
            f"weights: expected 'best', got 'last': {path} is not a run folder and contains only one set of weights"
        )
    model = path / "model" if in_run else path
    if weights == "last" or not model.is_dir():
        if not description.get("model") or not description.get("encoder"):
            raise CheckpointError(
                f"{path}: expected a run that trained a model, got a config.yaml without model or encoder"
            )
        scorer: Any = built_for(path, description, execution)
        load_checkpoint(
            scorer, path / "checkpoints" / ("last.ckpt" if weights == "last" else "best.ckpt"), prefix="scorer."
        )
        align(scorer)
        return scorer
    verify_folder(model, error=CheckpointError)
    if (model / "onnx.json").is_file():
        raise CheckpointError(
            f"{model}: expected weights, got an ONNX export, which only ranks; use ranker rerank, or Reranker.load"
        )
    if _adapter.is_own(model):
        scorer = built_for(path, read_description(model), execution)
        _adapter.read(model, scorer_of_windows(scorer))
    else:
        target = (description.get("model") or {}).get("_target_") or _target_of(model)
        scorer = with_passages(_load(model, target, execution), description.get("passages"))
    if isinstance(scorer, Windowed):
        scorer.load_aggregation(model)
    align(scorer)
    return scorer


def _refuse_pretraining(path: Path) -> None:
    """Refuse a run of `ranker pretrain`, or its `model/`: its weights would load as another kind of model.

    A pretrained bi-encoder passes, because it can rank.

    Raises:
        CheckpointError: The folder is such a run.
    """
    run = path if (path / "config.yaml").is_file() else path.resolve().parent
    if run != path and path.name != "model":
        return
    try:
        stored: Any = load_stored(run / "config.yaml") if (run / "config.yaml").is_file() else {}
    except ConfigError:  # a config.yaml beside a model folder may belong to any program
        stored = {}
    if stored.get("objective") is not None and not has_modules(run / "model"):
        raise CheckpointError(
            f"checkpoint: expected a trained ranker, got a run of ranker pretrain ({path}), which trains an encoder "
            f"alone; train a ranker on it with encoder.name={run / 'model'}"
        )


def built_for(run: Path, description: Mapping[str, Any] | DictConfig, execution: Execution | None = None) -> Scorer:
    """Return a scorer with the architecture of a run, into which a checkpoint of the run can be loaded.

    If the run started from a model folder (`checkpoint=`), the scorer is loaded from that folder, because it may have
    parts that no configuration names. For any other run, and if that folder no longer exists, it is built from the
    configuration.

    Args:
        run: The run folder.
        description: The run's configuration; only `model` and `encoder` are read.
        execution: How the encoders compute; None: as the run's configuration says.
    """
    first = resumed_runs(run)[0] / "config.yaml"
    start = OmegaConf.select(load_stored(first), "checkpoint") if first.is_file() else None
    if start is not None:
        in_run = (Path(start) / "config.yaml").is_file()
        if (Path(start) / "model").is_dir() if in_run else Path(start).is_dir():
            started = load_scorer(Path(start), "best", execution or Execution.of(description["encoder"]))
            return with_passages(started, description.get("passages"))
    scorer = instantiate(
        OmegaConf.create(constructor_keys("model", description["model"])),
        encoder=instantiate(
            constructor_keys("encoder", description["encoder"]), **(vars(execution) if execution else {})
        ),
    )
    return with_passages(scorer, description.get("passages"))


def _load(folder: Path, target: str, execution: Execution) -> Scorer:
    """Load the folder with the scorer class `target`. A library's error about the folder is reported in one line."""
    module, _, name = target.rpartition(".")
    scorer_class: type[Scorer] | None = (
        getattr(importlib.import_module(module), name) if is_trusted(target, "model") else None
    )
    if scorer_class is None or not hasattr(scorer_class, "load"):
        raise CheckpointError(f"{folder}: model._target_: expected a scorer of ranker.models, got {target!r}")
    try:
        return scorer_class.load(folder, execution)
    except RankerError:
        raise
    except Exception as error:  # the libraries raise errors of any type for a broken folder
        reason = needs_trust(error, "trust_remote_code") or " ".join(str(error).split()) or "no reason"
        raise CheckpointError(
            f"{folder}: expected a model folder that loads, got {type(error).__name__}: {reason}"
        ) from error


def _target_of(folder: Path) -> str:
    """Return the dotted path of the scorer class for a folder that another program wrote.

    The first export format that recognises the folder determines the class.
    """
    for module in pkgutil.iter_modules(export.__path__, f"{export.__name__}."):
        if not module.name.rpartition(".")[2].startswith("_"):
            folder_format: Any = importlib.import_module(module.name)
            if folder_format.recognises(folder):
                return str(folder_format.SCORER)
    raise CheckpointError(
        f"{folder}: expected a model folder of this or another program, got one that no format of ranker.export knows"
    )
