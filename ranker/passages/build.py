"""Build a scorer that reads windows from the `passages` node of a configuration."""

from __future__ import annotations

import importlib
from typing import Any

from ranker.config.signatures import attribute_of, parameters_of
from ranker.config.targets import WINDOW_KEYS, constructor_keys, is_trusted
from ranker.data.windows import Windows
from ranker.errors import ConfigError
from ranker.models.interface import Scorer
from ranker.passages.windowed import Windowed, scorer_of_windows


def with_passages(scorer: Any, node: Any) -> Scorer:
    """Return a scorer that reads docs as windows, as a `passages` node defines.

    Args:
        scorer: A scorer. If it already reads windows, the node replaces its options. The trained weights of its
            aggregation are kept if the node names the same class and options.
        node: The node; None: a doc is read as one row.

    Raises:
        ConfigError: The scorer can't score a doc by windows, or a value of the node is wrong.
    """
    inner: Any = scorer_of_windows(scorer)
    if node is None:
        return inner  # type: ignore[no-any-return]
    target = str(node.get("_target_"))
    if not getattr(inner, "takes_windows", False):
        raise ConfigError(
            f"passages: expected none with {type(inner).__name__}, which does not score a doc by windows, got {target}"
        )
    if not is_trusted(target, "passages") or attribute_of(target, "reads") not in ("scores", "vectors"):
        raise ConfigError(f"passages._target_: expected an aggregation of ranker.passages, got {target!r}")
    module, _, name = target.rpartition(".")
    options = {key: value for key, value in constructor_keys("passages", node).items() if not key.startswith("_")}
    if "dim" in (parameters_of(target) or {}):
        options["dim"] = inner.vector_dim
    aggregation = getattr(importlib.import_module(module), name)(**options)
    if isinstance(scorer, Windowed) and repr(scorer.aggregation) == repr(aggregation):
        aggregation.load_state_dict(scorer.aggregation.state_dict())
    windows = Windows(**{key: node[key] for key in WINDOW_KEYS if key in node})
    return Windowed.of(inner, windows, aggregation)  # type: ignore[return-value]
