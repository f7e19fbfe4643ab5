"""The keys of `ranker calibrate` and their types; conf/calibrate.yaml explains them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from ranker.config.shared_keys import BatchConfig, Text, TrainerConfig


@dataclass
class CalibrateConfig:
    """Root of `ranker calibrate`."""

    name: Text = "calibrate"
    checkpoint: Text = MISSING
    weights: Text = "best"
    trust_remote_code: bool = False
    map: Text = "platt"
    data: Any = None
    split: Text = "val"
    test: Text = "test"
    candidates: Text | None = None
    depth: int | None = None
    add_positives: bool = False
    store: bool = False
    batch: BatchConfig = field(default_factory=BatchConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    cache_dir: Text = ".cache"
