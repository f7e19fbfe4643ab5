"""The keys of `ranker publish` and their types; conf/publish.yaml explains them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from ranker.config.shared_keys import Text


@dataclass
class PublishConfig:
    """Root of `ranker publish`."""

    name: Text = "publish"
    checkpoint: Text = MISSING
    to: Text = MISSING
    private: bool = True
    license: Text | None = None
    data: Any = None
    cache_dir: Text = ".cache"
