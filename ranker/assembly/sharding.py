"""Prepare encoders for a sharded training, and load the whole model after it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from omegaconf import DictConfig

from ranker.checkpoint import load_scorer
from ranker.config.trainer import FSDP
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution


def run_as_configured(cfg: DictConfig, model: Any) -> None:
    """With `trainer.strategy=fsdp`, let the encoders run transformers' own forward pass, on any number of devices.

    Args:
        cfg: The configuration.
        model: The model to train.
    """
    if cfg.trainer.strategy == FSDP:
        for encoder in model.modules():
            if isinstance(encoder, Encoder):
                encoder.execution = replace(encoder.execution, compile=False)
                encoder.run_by_transformers()


def whole_scorer(cfg: DictConfig, trainer: pl.Trainer, weights: str) -> Any:
    """Return a scorer with whole (unsharded) weights on each device, read from the run's checkpoint.

    Args:
        cfg: The configuration.
        trainer: The trainer of the run.
        weights: `best` or `last`.
    """
    folder = Path(trainer.strategy.broadcast(str(trainer.default_root_dir)))
    scorer: Any = load_scorer(folder, weights, Execution.of(cfg.encoder))
    return scorer.to(trainer.strategy.root_device)
