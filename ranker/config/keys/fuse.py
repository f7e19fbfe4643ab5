"""The keys of `ranker fuse` and their types; conf/fuse.yaml explains them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from ranker.config.shared_keys import Text


@dataclass
class TuningConfig:
    """Search for the weights of a fusion; conf/fuse.yaml explains the keys."""

    qrels: Text | None = None
    runs: Any = None
    measure: Text = "nDCG@10"
    relevance: int = 1
    step: float = 0.1


@dataclass
class FuseConfig:
    """Root of `ranker fuse`."""

    name: Text = "fuse"
    runs: Any = MISSING
    method: Text = "rrf"
    k: float = 60.0
    scaling: Text = "minmax"
    weights: Any = None
    depth: int = 1000
    tune: TuningConfig = field(default_factory=TuningConfig)
