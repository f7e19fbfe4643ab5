"""The keys of `ranker export` and their types; conf/export.yaml explains them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from ranker.config.shared_keys import BatchConfig, Text, TrainerConfig


@dataclass
class ExportConfig:
    """Root of `ranker export`."""

    name: Text = "export"
    checkpoint: Text = MISSING
    weights: Text = "best"
    trust_remote_code: bool = False
    format: Text = MISSING
    dtype: Text = "float32"
    to: Text | None = None
    max_gap: float | None = None
    max_loss: float = 0.01
    data: Any = None
    split: Text = "test"
    candidates: Text | None = None
    depth: int | None = None
    max_queries: int | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    cache_dir: Text = ".cache"
