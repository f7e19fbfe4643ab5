"""The keys of `ranker sizes` and their types; conf/sizes.yaml explains them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from ranker.config.shared_keys import BatchConfig, Text, TrainerConfig


@dataclass
class SizesConfig:
    """Root of `ranker sizes`."""

    name: Text = "sizes"
    checkpoint: Text = MISSING
    weights: Text = "best"
    trust_remote_code: bool = False
    data: Any = None
    index: Any = MISSING
    split: Text = "test"
    dims: list[int] | None = None
    layers: Any = None
    keep: list[int] | None = None
    measures: list[str] = field(default_factory=list)
    depth: int = 100
    latency_queries: int = 100
    batch: BatchConfig = field(default_factory=BatchConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    seed: int = 0
    cache_dir: Text = ".cache"
