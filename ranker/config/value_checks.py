"""Checks of single values against the tables in values.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ranker.config.sets import as_alone
from ranker.config.values import ANY, NON_EMPTY, RANGES, WORDS
from ranker.data.parsing import shown


def faults_of(cfg: DictConfig, skipped: tuple[str, ...] = ()) -> list[str]:
    """Check each value of a composed configuration on its own.

    Args:
        cfg: The configuration.
        skipped: Dotted keys that another check handles; all keys below them are skipped, too.

    Returns:
        One line per fault.
    """
    faults = []
    for key, rules, value in _leaves(cfg, ""):
        if f"{key}.".startswith(tuple(f"{other}." for other in skipped)):
            continue
        entries = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
        of_value = [fault for entry in entries if (fault := _fault(rules, entry))]
        if isinstance(value, list):
            of_value += _list_faults(key, value)
        faults += [f"{key}: {fault}" for fault in dict.fromkeys(of_value)]
    return faults


def _fault(rules: tuple[str, ...], value: Any) -> str:
    if isinstance(value, str):
        known = next((WORDS[rule] for rule in rules if rule in WORDS), (value,))
        return _text_fault(value) if value in known else f"expected one of {', '.join(known)}; got {shown(value)}"
    return next((RANGES[rule] for rule in rules if rule in RANGES), ANY).fault(value)


def _text_fault(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        return f"expected text that UTF-8 can hold, got {value[:60]!r}"
    return f"expected text without NUL characters, got {shown(value)}" if "\0" in value else ""


def _list_faults(key: str, value: list[Any]) -> Iterator[str]:
    if key in NON_EMPTY and not value:
        yield "expected at least one entry, got none; leave it out or name some"
    if any(entry is None for entry in value):
        yield f"expected entries without null, got {shown(value)}"
    plain = [entry for entry in value if isinstance(entry, (str, int, float))]
    if key in (*NON_EMPTY, "controls") and len(set(plain)) < len(plain):
        yield f"expected each entry once, got {shown(value)}"
    numbers = [entry for entry in value if isinstance(entry, (int, float))]
    if key == "length_buckets" and numbers != sorted(numbers):
        yield f"expected rising bounds, got {shown(value)}"
    if key == "portions" and numbers and (numbers != sorted(numbers) or numbers[-1] != 1):
        yield f"expected rising shares above 0 that end in 1.0, got {shown(value)}; set portions=[0.1,0.5,1.0]"


def _leaves(node: DictConfig, path: str) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Yield each leaf: dotted key, the names of the key in `RANGES` and `WORDS`, plain value. A list is a leaf."""
    target = "" if OmegaConf.is_missing(node, "_target_") else str(node.get("_target_") or "").rpartition(".")[2]
    for key in map(str, node):
        name = f"{path}.{key}" if path else key
        if OmegaConf.is_missing(node, key) or key.startswith("_"):
            continue
        value = node[key]
        alone = as_alone(name)
        if isinstance(value, DictConfig) and alone not in ("data.relevance", "data.candidates", "trainer.max_time"):
            yield from _leaves(value, name)
        elif value is not None:
            plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            yield name, (f"{target}.{key}", alone), plain
