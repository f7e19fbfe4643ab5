"""Find the sets of a mix (`data=mixed`) and of a suite in a configuration; list the further keys of a mix's set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

MIXED = "ranker.data.sources.mixed.Mixed"
# Keys that the program reads in the node of a set, and their types; `loss` is a node of its own.
SET_KEYS: dict[str, tuple[str, ...]] = {
    "weight": ("int", "float"),
    "cap": ("int", "None"),
    "evaluate": ("bool",),
    "loss": ("dict", "None"),
    "max_query_tokens": ("int", "None"),
    "max_doc_tokens": ("int", "None"),
    "max_pair_tokens": ("int", "None"),
    "instruction": ("str", "None"),
    "prompt": ("str", "None"),
    "query_prompt": ("str", "None"),
    "doc_prompt": ("str", "None"),
}
PROMPT_KEYS = ("instruction", "prompt", "query_prompt", "doc_prompt")  # a set and a model's yaml both have these keys
_NODE = re.compile(r"(?:data|suite)\.sets\.[^.]+(?=\.|$)")


def is_set(path: str) -> bool:
    """Whether a dotted path names the node of a set of a mix, or a node below it.

    >>> is_set("data.sets.a"), is_set("data.sets.a.loss"), is_set("data")
    (True, False, False)
    """
    return path.startswith("data.") and _NODE.fullmatch(path) is not None


def as_alone(path: str) -> str:
    """Return the path that a set's key would have if the set were the only one.

    >>> as_alone("data.sets.a.path"), as_alone("data.sets.a.loss._target_"), as_alone("data.negatives")
    ('data.path', 'loss._target_', 'data.negatives')
    >>> as_alone("suite.sets.a")
    'data'
    """
    alone = _NODE.sub("data", path, count=1)
    return alone.removeprefix("data.") if alone != path and re.match(r"data\.loss(\.|$)", alone) else alone


def is_mixed(node: Any) -> bool:
    """Whether a `data` node is a mix."""
    return isinstance(node, Mapping | DictConfig) and node.get("_target_") == MIXED


def sets_of(node: Any) -> dict[str, Any]:
    """Return the nodes of a mix's sets by name; empty if the `data` node is faulty or no mix."""
    sets = node.get("sets") if is_mixed(node) else None
    if not isinstance(sets, Mapping | DictConfig):
        return {}
    return {str(name): part for name, part in sets.items() if isinstance(part, Mapping | DictConfig)}


def source_nodes(cfg: DictConfig) -> dict[str, DictConfig]:
    """Return dotted path -> node of each source: `data`, or every set of a mix or a suite."""
    nodes = {f"suite.sets.{name}": node for name, node in suite_of(cfg).items()}
    data = cfg.get("data") if "data" in cfg and not OmegaConf.is_missing(cfg, "data") else None
    if not isinstance(data, DictConfig):
        return nodes
    return nodes | ({f"data.sets.{name}": part for name, part in sets_of(data).items()} or {"data": data})


def suite_of(cfg: DictConfig) -> dict[str, DictConfig]:
    """Return the nodes of a suite's sets by name; empty if there is no suite or it is faulty."""
    suite = cfg.get("suite") if "suite" in cfg and not OmegaConf.is_missing(cfg, "suite") else None
    sets = suite.get("sets") if isinstance(suite, DictConfig) else None
    if not isinstance(sets, DictConfig):
        return {}
    return {str(name): node for name, node in sets.items() if isinstance(node, DictConfig)}
