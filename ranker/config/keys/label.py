"""The keys of `ranker label` and their types; conf/label.yaml explains them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from ranker.config.shared_keys import BatchConfig, Text, TrainerConfig


@dataclass
class ReaderConfig:
    """The reader of `ranker label teacher=reader`; conf/label.yaml explains the keys."""

    name: Text | None = None
    answers: Text | None = None
    prompt: Text = "{doc}\n\nQuestion: {query}\nAnswer:"


@dataclass
class LabelConfig:
    """Root of `ranker label`."""

    name: Text = "label"
    teacher: Any = MISSING
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    scale: Text = "auto"
    weights: Text = "best"
    trust_remote_code: bool = False
    data: Any = None
    split: Text = "train"
    candidates: Text | None = None
    depth: int | None = None
    add_positives: bool = True
    keep: int | None = None
    measures: list[str] = field(default_factory=list)
    max_query_tokens: int | None = None
    max_doc_tokens: int | None = None
    shard_queries: int = 100
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    cache_dir: Text = ".cache"
