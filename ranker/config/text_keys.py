"""Find the keys that take text in the typed roots, and check the values of these keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ranker.config.roots import ROOTS, root_of
from ranker.data.parsing import shown


def text_keys(root: type, prefix: str = "") -> dict[str, bool]:
    """Return the dotted keys of a root dataclass that take text -> whether the key may be null."""
    keys: dict[str, bool] = {}
    for entry in fields(root):
        if str(entry.type) in ("Text", "Text | None"):
            keys[prefix + entry.name] = str(entry.type).endswith("None")
        elif is_dataclass(entry.default_factory):
            keys |= text_keys(entry.default_factory, f"{prefix}{entry.name}.")  # type: ignore[arg-type]
    return keys


def text_faults(cfg: DictConfig) -> list[str]:
    """Return a fault for each text key that holds no text: yaml reads 007 as a number, and characters are lost."""
    typed: Any = OmegaConf.get_type(cfg) in ROOTS.values()
    keys: Mapping[str, bool] = text_keys(OmegaConf.get_type(cfg) if typed else root_of(cfg))  # type: ignore[arg-type]
    faults = []
    for key, may_be_null in keys.items():
        value = None if _is_missing(cfg, key) else OmegaConf.select(cfg, key)
        if _is_missing(cfg, key) or isinstance(value, str) or (value is None and (may_be_null or not typed)):
            continue
        got = "null" if value is None else shown(value)
        faults.append(
            f"{key}: expected text, got {got}" + ("; put it in quotes" if isinstance(value, (bool, int, float)) else "")
        )
    return faults


def _is_missing(cfg: DictConfig, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    node: Any = OmegaConf.select(cfg, parent) if parent else cfg
    return node is not None and OmegaConf.is_missing(node, name)
