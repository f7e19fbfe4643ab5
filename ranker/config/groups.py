"""Check for missing keys, for unknown keys, and for groups that do not consist of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ranker.config.roots import ROOTS, known_keys, root_of
from ranker.config.sets import MIXED, is_mixed
from ranker.errors import did_you_mean

# Groups whose node is built from its `_target_`.
GROUPS = (
    "model", "encoder", "objective", "loss", "data", "passages", "distill", "optim", "schedule", "index", "probe",
)  # fmt: skip
OF_SEVERAL = ("probe", "callbacks")  # groups that hold several nodes, each with a `_target_`


def missing_keys(cfg: DictConfig) -> list[str]:
    """Return one fault for each key that needs a value and has none."""
    keys = sorted(OmegaConf.missing_keys(cfg))
    root: Any = OmegaConf.get_type(cfg)
    if root in ROOTS.values():  # `~key` on the command line deletes a key
        keys += [key for key in known_keys(root) if not _has(cfg, key)]
    return [f"{key}: expected a value, got none; set {key}=..." for key in dict.fromkeys(keys)]


def _has(cfg: DictConfig, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    node: Any = OmegaConf.select(cfg, parent) if parent else cfg
    return node is None or name in node or OmegaConf.is_missing(node, name)


def is_set(cfg: DictConfig, key: str) -> bool:
    """Whether a configuration has a top-level key with a value, which may be null."""
    return key in cfg and not OmegaConf.is_missing(cfg, key)


def group_faults(cfg: DictConfig) -> list[str]:
    """Return one fault for each group or typed node that is null or a plain value but must have keys and values."""
    root: Any = OmegaConf.get_type(cfg)
    required = [entry.name for entry in fields(root) if entry.default is not None] if root in ROOTS.values() else []
    faults = []
    for group in (*GROUPS, "callbacks", "logger", "trainer", "batch"):
        if not is_set(cfg, group):
            continue
        node = cfg.get(group)
        expected = "keys and values" if group in ("trainer", "batch") else f"the name of a file in conf/{group}/"
        if node is None and group in required:
            faults.append(f"{group}: expected {expected}, got null")
        elif node is not None and not isinstance(node, DictConfig):
            faults.append(f"{group}: expected {expected}, got {node!r} as a plain value")
        elif node is not None and (group in GROUPS or group == "callbacks"):
            faults += _without_target(group, node)
    return faults


def _without_target(group: str, node: DictConfig) -> list[str]:
    entries = {f"{group}.{key!s}": part for key, part in node.items()} if group in OF_SEVERAL else {group: node}
    if group == "data" and is_mixed(node) and isinstance(node.get("sets"), DictConfig):
        entries |= {f"data.sets.{key!s}": part for key, part in node.sets.items()}
    faults = [
        f"{name}._target_: expected the class or function to build, got none; choose a file of conf/{group}/"
        for name, part in entries.items()
        if not isinstance(part, DictConfig) or not isinstance(part.get("_target_"), str)
    ]
    faults += [
        f"{name}._target_: expected a source, got another mix; add its sets to data.sets"
        for name, part in entries.items()
        if name != "data" and isinstance(part, DictConfig) and part.get("_target_") == MIXED
    ]
    return faults if entries or group == "callbacks" else [f"{group}: expected at least one of conf/{group}/, got none"]


def unknown_keys(cfg: Mapping[Any, Any], root: Any) -> list[str]:
    """Return one fault for each key of a configuration or of its typed nodes that the typed root does not have."""
    typed = {
        "": root,
        **{entry.name: entry.default_factory for entry in fields(root) if is_dataclass(entry.default_factory)},
    }
    faults = []
    for path, schema in typed.items():
        node = cfg.get(path) if path else cfg
        known = [entry.name for entry in fields(schema)]
        for key in map(str, node if isinstance(node, Mapping) else ()):
            if key not in known:
                faults.append(f"{path + '.' if path else ''}{key}: unknown key{did_you_mean(key, known)}")
    return faults


def schema_of(cfg: DictConfig) -> type:
    """Return the typed root that the configuration was composed with, else the root that fits its keys best."""
    root: Any = OmegaConf.get_type(cfg)
    schema: type = root if root in ROOTS.values() else root_of(cfg)
    return schema
