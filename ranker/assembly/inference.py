"""Options of a trained model's forward passes in evaluation, re-ranking and serving."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ranker.errors import ConfigError
from ranker.exits.early_exit import EarlyExit
from ranker.models.interface import Scorer

log = logging.getLogger(__name__)


def prepare(scorer: Scorer, options: Mapping[str, Any]) -> Scorer:
    """Return the scorer with the options of the node `inference`; null options change nothing.

    Args:
        scorer: A loaded scorer, on the CPU.
        options: `exit` and `margin`, see `EarlyExit.leave`.

    Raises:
        ConfigError: The scorer can't do that.
    """
    exit, margin = options.get("exit"), options.get("margin")
    if exit is not None or margin is not None:
        if not isinstance(scorer, EarlyExit):
            key = "exit" if exit is not None else "margin"
            raise ConfigError(
                f"inference.{key}: expected null, or a model with early heads (model=early_exit), got "
                f"{type(scorer).__name__}"
            )
        scorer.leave(exit, margin)
        log.info("inference: pairs leave at layer %s", exit if margin is None else f"{scorer.exits}, margin {margin}")
    return scorer
