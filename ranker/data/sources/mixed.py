"""Options of a mix of several sets in one training. Each set is a node of `conf/data/` with its own options."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ranker.errors import ConfigError

BATCHES = ("mixed", "one_set")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class Mixed:
    """The sets of a training and how they are mixed; `conf/data/mixed.yaml` explains the arguments.

    Args:
        sets: Set name -> node with the set's source and options.
        temperature: Shares are in proportion to `weight * size ** (1 / temperature)`; None: shares are in proportion to
            the weights.
        batches: `mixed`: a step has groups of all sets; `one_set`: a step has groups of one set.
        groups_per_epoch: Number of groups of an epoch; None: the sum of the sets' groups, each set up to its `cap`.

    Raises:
        ConfigError: There is no set, a name has other characters than letters, digits, - and _, or an option has an
            unusable value.
    """

    sets: dict[str, Any]
    temperature: float | None = 1.0
    batches: str = "mixed"
    groups_per_epoch: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.sets, Mapping) or not self.sets:
            raise ConfigError(
                "data.sets: expected at least one set, got none; add +data@data.sets.NAME=SOURCE, as "
                "+data@data.sets.first=cwe"
            )
        for name in self.sets:
            if not NAME.fullmatch(str(name)):
                raise ConfigError(f"data.sets: expected names of letters, digits, - and _, got {name!r}")
        if self.temperature is not None and not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(f"data.temperature: expected a number above 0 or null, got {self.temperature!r}")
        if self.batches not in BATCHES:
            raise ConfigError(f"data.batches: expected one of {', '.join(BATCHES)}; got {self.batches!r}")
