"""Typed roots of the configuration: `ranker.config.keys.search` has the class `SearchConfig`, and so on."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore

from ranker.config import keys
from ranker.config.shared_keys import CONF

__all__ = ["CONF", "ROOTS", "known_keys", "register", "root_of"]


def _root(command: str) -> type:
    found: type = getattr(importlib.import_module(f"{keys.__name__}.{command}"), f"{command.capitalize()}Config")
    return found


_COMMANDS = sorted(module.name for module in pkgutil.iter_modules(keys.__path__))
# train comes first: `root_of` returns the first of several equal roots
ROOTS: dict[str, type] = {name: _root(name) for name in sorted(_COMMANDS, key=lambda name: name != "train")}


def register(command: str | None = None) -> None:
    """Register the typed root of a command, or of all commands, with Hydra, as `train_schema` and so on."""
    store = ConfigStore.instance()
    for name, root in ROOTS.items() if command is None else [(command, ROOTS[command])]:
        if f"{name}_schema.yaml" not in store.repo:
            store.store(name=f"{name}_schema", node=root)


def root_of(keys: Iterable[Any]) -> type:
    """Return the typed root that lacks the fewest of a configuration's top-level keys; in a tie, the root of train."""
    given = set(map(str, keys))
    return min(ROOTS.values(), key=lambda root: len(given - {entry.name for entry in fields(root)}))


def known_keys(root: type, prefix: str = "") -> list[str]:
    """Return all dotted keys of a typed root."""
    found = []
    for entry in fields(root):
        found.append(prefix + entry.name)
        factory = entry.default_factory
        if is_dataclass(factory):
            found += known_keys(factory, f"{prefix}{entry.name}.")  # type: ignore[arg-type]
    return found
