"""Check a composed configuration: one error lists all faults, before torch or another slow package is imported."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ranker.config import trainer, value_checks
from ranker.config.environment import environment_faults
from ranker.config.groups import group_faults, is_set, missing_keys, schema_of, unknown_keys
from ranker.config.rules import rule_faults
from ranker.config.targets import is_trusted, target_faults, untrusted
from ranker.config.text_keys import text_faults
from ranker.errors import ConfigError, shorten


def check(cfg: DictConfig) -> None:
    """Check a composed configuration.

    Raises:
        ConfigError: One line per fault: dotted key, expected value, actual value, how to fix it.
    """
    groups = group_faults(cfg)  # these faults come first, because the other checks read the nodes of the groups
    missing = [] if groups else missing_keys(cfg)
    if groups or any("." not in fault.split(":")[0] for fault in missing):
        raise ConfigError("\n".join(map(shorten, [*untrusted(OmegaConf.to_container(cfg), ""), *groups, *missing])))
    rules = _model_rules(cfg)
    faults = [
        *missing,
        *unknown_keys(cfg, schema_of(cfg)),
        *untrusted(OmegaConf.to_container(cfg), ""),
        *target_faults(cfg),
        *_model_faults(cfg, rules),
        *trainer.faults_of(cfg),
        *text_faults(cfg),
        *value_checks.faults_of(cfg, () if rules is None else tuple(f"model.{key}" for key in rules.KEYS)),
        *rule_faults(cfg),
        *environment_faults(cfg),
    ]
    if faults:
        raise ConfigError("\n".join(dict.fromkeys(map(shorten, faults))))


def fill_in(cfg: DictConfig) -> None:
    """Replace `auto` in the model's node by computed values, so that the run folder shows what was used."""
    rules = _model_rules(cfg)
    if rules is not None:
        rules.fill_in(cfg)


def _model_rules(cfg: DictConfig) -> Any:
    """Return the module `check` of the model's package, such as ranker/multitask/check.py; None if there is none.

    Such a module has `KEYS` (keys of the model's node whose values it checks), `faults_of(model, encoder)` and
    `fill_in(cfg)`.
    """
    target = str(OmegaConf.select(cfg, "model._target_")) if is_set(cfg, "model") else ""
    name = f"{target.rpartition('.')[0].rpartition('.')[0]}.check"
    if not is_trusted(target, "model") or not name.startswith("ranker."):
        return None
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def _model_faults(cfg: DictConfig, rules: Any) -> list[str]:
    if rules is None:
        return []
    model: Any = OmegaConf.to_container(cfg.model, resolve=True)
    faults: list[str] = rules.faults_of(model, cfg.get("encoder") or {})
    return faults
