"""The keys of `ranker compare` and their types; conf/compare.yaml explains them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from ranker.config.shared_keys import ReportConfig, Text


@dataclass
class CompareConfig:
    """Root of `ranker compare`."""

    name: Text = "compare"
    runs: Any = MISSING
    labels: Any = None
    sets: Any = None
    qrels: Text | None = None
    queries: Text | None = None
    docs: Text | None = None
    data: Any = None
    split: Text = "test"
    relevance: int = 1
    measures: list[str] = field(default_factory=list)
    report: ReportConfig = field(default_factory=ReportConfig)
    cache_dir: Text = ".cache"
