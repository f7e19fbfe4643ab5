"""The keys of `ranker serve` and their types; conf/serve.yaml explains them."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from ranker.config.shared_keys import BatchConfig, InferenceConfig, Text, TrainerConfig


@dataclass
class LimitsConfig:
    """Bounds on requests; conf/serve.yaml explains the keys."""

    docs: int = 1000
    text_chars: int = 100000
    body_bytes: int = 10485760
    queue_pairs: int = 20000
    connections: int = 1024
    request_seconds: float = 30.0
    stop_seconds: float = 30.0


@dataclass
class ServeConfig:
    """Root of `ranker serve`."""

    name: Text = "serve"
    checkpoint: Text = MISSING
    weights: Text = "best"
    trust_remote_code: bool = False
    host: Text = "127.0.0.1"
    port: int = 8000
    token_env: Text | None = None
    token_file: Text | None = None
    scores: Text = "raw"
    log_requests: bool = False
    probabilities: bool = False
    calibration: Text | None = None
    max_query_tokens: int | None = None
    max_doc_tokens: int | None = None
    tokenizers: int | None = None
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
