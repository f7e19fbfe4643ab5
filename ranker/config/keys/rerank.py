"""The keys of `ranker rerank` and their types; conf/rerank.yaml explains them."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from ranker.config.shared_keys import BatchConfig, InferenceConfig, Text, TrainerConfig


@dataclass
class RerankConfig:
    """Root of `ranker rerank`."""

    name: Text = "rerank"
    checkpoint: Text = MISSING
    weights: Text = "best"
    trust_remote_code: bool = False
    run: Text | None = None
    queries: Text | None = None
    docs: Text | None = None
    depth: int | None = None
    top_k: int | None = None
    probabilities: bool = False
    calibration: Text | None = None
    max_query_tokens: int | None = None
    max_doc_tokens: int | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
