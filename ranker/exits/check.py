"""Checks of `model.exits`, and the layer that a probing report suggests for `auto`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ranker.errors import ConfigError
from ranker.probing.profile import read_profile

KEYS = ("exits",)  # keys of the `model` node whose values `faults_of` checks
NEARLY = 0.95  # share of the best layer's compression


def faults_of(model: Mapping[str, Any], encoder: Mapping[str, Any]) -> list[str]:
    """Return one fault for each value of the `model` node that can't be used.

    Args:
        model: The node.
        encoder: The `encoder` node.
    """
    exits = model.get("exits")
    if exits == "auto":
        if model.get("report") is None:
            return ["model.report: expected the folder of a probing run with model.exits=auto, got null"]
        try:
            read_profile(str(model["report"]), "model.report")
        except ConfigError as error:
            return [str(error)]
        return []
    if exits == "middle":
        return []
    entries: list[Any] = exits if isinstance(exits, list) else [exits]
    numbers = [entry for entry in entries if isinstance(entry, int) and not isinstance(entry, bool) and entry >= 1]
    if not entries or len(numbers) < len(entries) or numbers != sorted(set(numbers)):
        return [f"model.exits: expected middle, auto, or rising layers from 1, as [2,4]; got {exits!r}"]
    layers = encoder.get("layers")
    if isinstance(layers, int) and numbers[-1] >= layers:
        return [f"model.exits: expected layers below the last, {layers}, got {numbers[-1]}"]
    return []


def fill_in(cfg: Any) -> None:
    """Replace `exits: auto` in the configuration by the layer that the probing report suggests, in place."""
    if cfg.model.exits == "auto":
        cfg.model.exits = [early_layer(read_profile(str(cfg.model.report), "model.report"))]


def early_layer(profile: Mapping[str, Mapping[int, float]]) -> int:
    """Return the lowest layer that encodes nearly as much as the best one, over all tasks.

    A layer's value is the mean over tasks of its compression divided by the task's highest. The layer is the lowest
    from 1 on, below the last, whose value is at least `NEARLY` of the highest value; if none is, the middle one.

    Args:
        profile: Task -> layer, 0 for the embeddings -> compression.

    >>> early_layer({"bm25": {0: 1.0, 1: 2.0, 2: 3.9, 3: 4.0, 4: 3.8}})
    2
    """
    layers = sorted(set.intersection(*(set(values) for values in profile.values()))) if profile else []
    if len(layers) < 2 or layers[-1] < 2:
        raise ConfigError("model.report: expected a probing run of at least two layers, got fewer; give model.exits")
    values = {layer: sum(by_layer[layer] / max(by_layer.values()) for by_layer in profile.values()) for layer in layers}
    enough = NEARLY * max(values.values())
    found = (layer for layer in layers if 1 <= layer < layers[-1] and values[layer] >= enough)
    return next(found, layers[-1] // 2)
