"""The keys of `ranker merge` and their types; conf/merge.yaml explains them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from ranker.config.shared_keys import Text


@dataclass
class MergeConfig:
    """Root of `ranker merge`."""

    name: Text = "merge"
    runs: Any = MISSING
    shares: Any = None
    interpolation: Text = "linear"
    weights: Text = "best"
    trust_remote_code: bool = False
