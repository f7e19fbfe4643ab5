"""The keys of `ranker pretrain` and their types; conf/pretrain.yaml explains them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from ranker.config.shared_keys import Text, TrainerConfig


@dataclass
class TextBatchConfig:
    """Sizes of a step and of a micro-batch; conf/pretrain.yaml explains the keys."""

    texts: int = 64
    max_tokens: int | None = None
    workers: int | None = None


@dataclass
class PretrainConfig:
    """Root of `ranker pretrain`."""

    name: Text = MISSING
    objective: Any = MISSING
    encoder: Any = MISSING
    data: Any = MISSING
    optim: Any = MISSING
    schedule: Any = MISSING
    callbacks: Any = None
    logger: Any = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    batch: TextBatchConfig = field(default_factory=TextBatchConfig)
    max_query_tokens: int = 64
    max_doc_tokens: int = 256
    seed: int = 0
    checkpoint: Text | None = None
    resume: bool = False
    save_every_steps: int = 500
    sharded_checkpoints: bool = False
    nonfinite: Text = "stop"
    cache_dir: Text = ".cache"
