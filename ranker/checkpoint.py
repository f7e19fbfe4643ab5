"""Weights and configuration in one folder: written for other programs, read back for evaluation and further training."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from ranker.config import constructor_keys, load_stored
from ranker.errors import CheckpointError
from ranker.layers.encoder import Encoder

# what a model folder says of its own: how the texts were cut and what the scorer is
DESCRIBED = ("model", "encoder", "data", "max_query_tokens", "max_doc_tokens", "max_pair_tokens", "depth")
# files that say which program wrote a folder
FOREIGN = ("modules.json", "config_sentence_transformers.json", "config.json")


def save_model(folder: Path, scorer: Any, cfg: DictConfig) -> None:
    """Write a scorer's Hugging Face folder and `ranker.yaml`, whole or not at all."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    positions = scorer.encoder.max_tokens
    if scorer.reads == "texts":
        query, doc = scorer.layouts()
        longest_query = min(positions, cfg.max_query_tokens + query.num_added)
        scorer.save(partial, max_tokens=min(positions, cfg.max_doc_tokens + doc.num_added), max_query_tokens=longest_query)
    else:
        scorer.save(partial, max_tokens=min(positions, cfg.max_pair_tokens or positions))
    described = OmegaConf.create({key: cfg[key] for key in DESCRIBED})
    (partial / "ranker.yaml").write_text(OmegaConf.to_yaml(described, resolve=True), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.replace(folder)


def read_description(path: Path) -> dict[str, Any]:
    """What is known of a run folder, a model folder or a plain Hugging Face folder (then nothing)."""
    for described in (path / "config.yaml", path / "ranker.yaml"):
        if described.is_file():
            content: Any = OmegaConf.to_container(load_stored(described))
            return {key: content[key] for key in DESCRIBED if key in content}
    if (path / "config.json").is_file() or (path / "modules.json").is_file():
        return {}
    raise CheckpointError(
        f"checkpoint: expected a run folder or a model folder, got {str(path)!r}, which has no config.yaml, ranker.yaml, config.json or modules.json"
    )


def load_scorer(path: Path, weights: str = "best") -> Any:
    """Load a scorer from a run folder, a `model/` folder, or a folder of another program.

    Others are a Hugging Face sequence classification model, a sentence-transformers model of one or several vectors, a Stanford ColBERT.

    Args:
        path: The folder.
        weights: Of a run folder, `best` (`model/`, or `checkpoints/best.ckpt` of an unfinished run) or `last`.

    Raises:
        CheckpointError: There are no trained weights.
    """
    description = read_description(path)
    in_run = (path / "config.yaml").is_file()
    if weights == "last" and not in_run:
        raise CheckpointError(f"weights: expected weights=best, since {path} is no run folder and holds one set of weights; got 'last'")
    model = path / "model" if in_run else path
    if weights == "last" or not model.is_dir():
        scorer = instantiate(
            OmegaConf.create(constructor_keys("model", description["model"])),
            encoder=instantiate(constructor_keys("encoder", description["encoder"])),
        )
        _load_state(scorer, path / "checkpoints" / ("last.ckpt" if weights == "last" else "best.ckpt"), prefix="scorer.")
        return scorer
    target = description.get("model", {}).get("_target_") or _target_of(model)
    module, _, name = target.rpartition(".")
    encoder = description.get("encoder", {})
    scorer = getattr(importlib.import_module(module), name).load(model, ragged=encoder.get("ragged", True))
    for part in scorer.modules():
        if isinstance(part, Encoder):
            part.compiled, part.attention, part.fused = (encoder.get(key, "auto") for key in ("compile", "attention", "fused"))
    return scorer


def _target_of(folder: Path) -> str:
    """The scorer that reads a folder of another program."""
    try:
        read = {name: json.loads((folder / name).read_text(encoding="utf-8")) for name in FOREIGN if (folder / name).is_file()}
    except ValueError as error:
        raise CheckpointError(f"checkpoint: expected {folder} to hold readable JSON files, got one that is not ({error})") from error
    several = read.get("config_sentence_transformers.json", {}).get("model_type") == "MultiVectorEncoder"
    if several or "HF_ColBERT" in (read.get("config.json", {}).get("architectures") or []):
        return "ranker.models.colbert.ColBERT"
    return "ranker.models.dpr.DPR" if "modules.json" in read else "ranker.models.monobert.MonoBERT"


def load_checkpoint(module: nn.Module, path: Path) -> None:
    """Load a training checkpoint's weights into the module that wrote it."""
    _load_state(module, path, prefix="")


def _load_state(module: nn.Module, path: Path, prefix: str) -> None:
    if not path.is_file():
        raise CheckpointError(f"checkpoint: expected {path}, got no such file; the run may have stopped before its first checkpoint")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    except Exception as error:
        raise CheckpointError(f"{path}: expected a whole training checkpoint, got one that can't be read ({error})") from error
    own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    expected = module.state_dict()
    for key in sorted(set(own) | set(expected)):
        if key not in own or key not in expected or own[key].shape != expected[key].shape:
            got = tuple(own[key].shape) if key in own else "no such weight"
            want = tuple(expected[key].shape) if key in expected else "no such weight"
            raise CheckpointError(f"{path}: weight {key}: expected {want}, got {got}; the configuration differs from the checkpoint's")
    module.load_state_dict(own)
