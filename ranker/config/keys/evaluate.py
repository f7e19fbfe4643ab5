"""The keys of `ranker evaluate` and their types; conf/evaluate.yaml explains them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ranker.config.shared_keys import BatchConfig, InferenceConfig, ReportConfig, Text, TrainerConfig


@dataclass
class ListsConfig:
    """How a listwise model ranks long lists; conf/evaluate.yaml explains the keys."""

    window: Any = "auto"
    stride: Any = "auto"
    merge: Text = "auto"


@dataclass
class EvaluateConfig:
    """Root of evaluate.py."""

    name: Text = "evaluate"
    checkpoint: Text | None = None
    weights: Text = "best"
    trust_remote_code: bool = False
    data: Any = None
    suite: Any = None
    run: Text | None = None
    qrels: Text | None = None
    baseline: Text | None = None
    relevance: int = 1
    split: Text = "test"
    measures: list[str] = field(default_factory=list)
    length_buckets: list[int] | None = None
    depth: int | None = None
    candidates: Text | None = None
    add_positives: bool = False
    orders: int = 1
    lists: ListsConfig = field(default_factory=ListsConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    cache_dir: Text = ".cache"
    inference: InferenceConfig = field(default_factory=InferenceConfig)
