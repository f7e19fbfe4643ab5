"""The keys of `ranker search` and their types; conf/search.yaml explains them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ranker.config.shared_keys import BatchConfig, InferenceConfig, MiningConfig, ReportConfig, Text, TrainerConfig


@dataclass
class EncodeConfig:
    """Vectors on disk; conf/search.yaml explains the keys."""

    folder: Text | None = None
    dtype: Text = "float32"
    shard_docs: int = 10000


@dataclass
class LateConfig:
    """Search for docs with several vectors each; see LateOptions in ranker/retrieval/vector_engine.py."""

    token_depth: int = 256
    candidates: int = 1000


@dataclass
class SearchConfig:
    """Root of search.py."""

    name: Text = "search"
    checkpoint: Text | None = None
    weights: Text = "best"
    trust_remote_code: bool = False
    model: Any = None
    data: Any = None
    index: Any = None
    split: Text | None = "test"
    mine: Text | None = None
    measures: list[str] = field(default_factory=list)
    depth: int = 100
    baseline: Text | None = "bm25"
    latency_queries: int = 100
    candidates: Text | None = None
    explain: Text | None = None
    max_query_tokens: int | None = None
    max_doc_tokens: int | None = None
    encode: EncodeConfig = field(default_factory=EncodeConfig)
    late: LateConfig = field(default_factory=LateConfig)
    mining: MiningConfig = field(default_factory=MiningConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    seed: int = 0
    cache_dir: Text = ".cache"
    inference: InferenceConfig = field(default_factory=InferenceConfig)
