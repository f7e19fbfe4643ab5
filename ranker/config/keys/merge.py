"""The keys of `ranker merge` and their types; conf/merge.yaml explains them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from ranker.config.shared_keys import BatchConfig, Text, TrainerConfig


@dataclass
class SharesSearchConfig:
    """Search for the shares of a merge; conf/merge.yaml explains the keys."""

    measure: Text | None = None
    per_layer: bool = True
    step: float = 0.25


@dataclass
class MergeConfig:
    """Root of `ranker merge`."""

    name: Text = "merge"
    runs: Any = MISSING
    shares: Any = None
    interpolation: Text = "linear"
    weights: Text = "best"
    trust_remote_code: bool = False
    tune: SharesSearchConfig = field(default_factory=SharesSearchConfig)
    data: Any = None
    split: Text = "val"
    candidates: Text | None = None
    depth: int | None = None
    add_positives: bool = False
    batch: BatchConfig = field(default_factory=BatchConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    cache_dir: Text = ".cache"
