"""Check a multitask `model` node, and replace `layer: auto` in it. torch is not imported here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from ranker.errors import ConfigError
from ranker.multitask.auto_layers import auto_layers
from ranker.multitask.heads import read_heads
from ranker.multitask.options import AutoLayers, Head, TaskLabels, TaskSampling, TaskWeighting

# keys of the `model` node whose values `faults_of` checks
KEYS = ("auto", "heads", "labels", "sampling", "weighting")
_OPTIONS = {"sampling": TaskSampling, "weighting": TaskWeighting, "labels": TaskLabels, "auto": AutoLayers}


def faults_of(model: Mapping[str, Any], encoder: Mapping[str, Any]) -> list[str]:
    """Return the faults of a multitask `model` node, one line each.

    Args:
        model: The `model` node of the configuration.
        encoder: The `encoder` node of the configuration.
    """
    example = "[{task: bm25, layer: 5}]"
    if model.get("heads") is None:
        return [f"model.heads: expected a list such as {example}, got null"]
    if not isinstance(model["heads"], list):  # the check of signatures reports this fault
        return []
    faults: list[str] = []
    heads: list[Head] = []
    try:
        heads = read_heads(model["heads"])
        if not heads:
            faults.append(
                f"model.heads: expected at least one head, such as {example}, got none; model=monobert trains without"
            )
    except ConfigError as error:
        faults += str(error).split("\n")
    options: dict[str, Any] = {}
    for key, options_class in _OPTIONS.items():
        node = model.get(key) or {}
        if not isinstance(node, Mapping):
            faults.append(f"model.{key}: expected keys and values, got {node!r}")
            continue
        try:
            options[key] = options_class(**{name: value for name, value in node.items() if not name.startswith("_")})
        except ConfigError as error:
            faults.append(str(error))
        except TypeError:  # the check of signatures reports the unknown key
            continue
    faults += _contradictions(options.get("sampling"), options.get("weighting"))
    if any(head.layer == "auto" for head in heads) and "auto" in options:
        try:
            auto_layers(heads, options["auto"], encoder)
        except ConfigError as error:
            faults += str(error).split("\n")
    return faults


def _contradictions(sampling: TaskSampling | None, weighting: TaskWeighting | None) -> list[str]:
    """Return a fault for a weighting that needs several tasks per step if the sampling gives one task per step."""
    if sampling is None or weighting is None or sampling.composition != "homogeneous":
        return []
    return [
        f"model.weighting.{name}: {value} compares the tasks of a step, got steps of one task; "
        "set model.sampling.composition=mixed"
        for name, value in (("mode", weighting.mode), ("surgery", weighting.surgery))
        if value in ("gradnorm", "pcgrad", "guard")
    ]


def fill_in(cfg: Any) -> None:
    """Replace `layer: auto` in the configuration's heads by the layers that the probing report suggests, in place."""
    if any(head.get("layer") == "auto" for head in cfg.model.heads):
        plain: Any = OmegaConf.to_container(cfg.model, resolve=True)
        auto = AutoLayers(**{key: value for key, value in plain["auto"].items() if not key.startswith("_")})
        chosen = auto_layers(read_heads(plain["heads"]), auto, cfg.encoder)
        for head in cfg.model.heads:
            head.layer = chosen.get(head.get("name") or head.task, head.layer)
