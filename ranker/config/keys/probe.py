"""The keys of `ranker probe` and their types; conf/probe.yaml explains them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from ranker.config.shared_keys import Text


@dataclass
class ProbeTrainingConfig:
    """Training of a probe; conf/probe.yaml explains the keys."""

    lr: float = 1e-3
    batch_pairs: int = 64
    max_rounds: int = 50
    round_steps: int = 5
    patience: int = 2
    small_val_pairs: int | None = 2000
    lr_factor: float = 0.5
    clip: float = 5.0
    hidden: int = 256
    dropout: float = 0.3
    head: Text = "edge"


@dataclass
class ProbeCacheConfig:
    """The encoder's states on disk; conf/probe.yaml explains the keys."""

    dtype: Text = "float16"
    tokens: Text = "all"
    max_bytes: float = 2e10
    max_tokens: int = 8192


@dataclass
class ProbeConfig:
    """Root of probe.py."""

    name: Text = "probe"
    encoder: Any = MISSING
    checkpoint: Text | None = None
    weights: Text = "best"
    reads: Text = "pairs"
    compare: Text | None = None
    data: Any = MISSING
    probe: Any = MISSING
    logger: Any = None
    split: Text = "val"
    max_pairs: int = 2000
    docs_per_query: int = 10
    depth: int = 100
    group_by: Text = "query"
    val_fraction: float = 0.1667
    test_fraction: float = 0.1667
    max_query_tokens: int = 64
    max_doc_tokens: int = 256
    layers: list[int] | None = None
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    controls: list[str] = field(default_factory=list)
    control_seeds: int = 1
    portions: list[float] = field(default_factory=list)
    validation: Text = "fixed"
    units: Text = "bits"
    batching: Text = "auto"
    device: Text = "auto"
    workers: int | None = None
    seed: int = 0
    skip_unavailable: bool = False
    reuse: bool = True
    training: ProbeTrainingConfig = field(default_factory=ProbeTrainingConfig)
    cache: ProbeCacheConfig = field(default_factory=ProbeCacheConfig)
    cache_dir: Text = ".cache"
