"""The keys of `ranker compress` and their types; conf/compress.yaml explains them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from ranker.config.shared_keys import BatchConfig, Text, TrainerConfig


@dataclass
class CompressConfig:
    """Root of `ranker compress`."""

    name: Text = "compress"
    checkpoint: Text = MISSING
    weights: Text = "best"
    trust_remote_code: bool = False
    data: Any = None
    layers: Any = None
    drop: Text = "top"
    heads: float = 1.0
    units: float = 1.0
    multiple: int = 8
    tune: bool = False
    pairs: int = 128
    split: Text = "train"
    candidates: Text | None = None
    depth: int | None = None
    add_positives: bool = False
    batch: BatchConfig = field(default_factory=BatchConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    cache_dir: Text = ".cache"
