"""The keys of `ranker train` and their types; conf/train.yaml explains them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from ranker.config.shared_keys import BatchConfig, MiningConfig, ReportConfig, Text, TrainerConfig


@dataclass
class RefreshConfig(MiningConfig):
    """Negatives that are mined again and again during the training; conf/train.yaml explains the keys."""

    every: int | None = None
    unit: Text = "steps"


@dataclass
class TrainConfig:
    """Root of train.py."""

    name: Text = MISSING
    model: Any = MISSING
    encoder: Any = MISSING
    loss: Any = MISSING
    data: Any = MISSING
    suite: Any = None
    passages: Any = None
    distill: Any = None
    optim: Any = MISSING
    schedule: Any = MISSING
    callbacks: Any = None
    logger: Any = None
    report: ReportConfig = field(default_factory=ReportConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    max_query_tokens: int = 64
    max_doc_tokens: int = 256
    max_pair_tokens: int | None = None
    measures: list[str] = field(default_factory=list)
    length_buckets: list[int] | None = None
    monitor: Text | None = None
    depth: int = 100
    val_depth: int | None = None
    seed: int = 0
    checkpoint: Text | None = None
    resume: bool = False
    save_every_steps: int = 500
    sharded_checkpoints: bool = False
    nonfinite: Text = "stop"
    mining: RefreshConfig = field(default_factory=RefreshConfig)
    cache_dir: Text = ".cache"
