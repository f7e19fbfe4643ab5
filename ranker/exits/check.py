"""Check `model.exits`, and choose the layer for `exits=auto` from a probing report. This module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ranker.errors import ConfigError
from ranker.probing.profile import check_encoder, read_profile

KEYS = ("exits",)  # keys of the `model` node whose values `faults_of` checks
NEARLY = 0.95  # for `auto`: least value of the chosen layer, divided by the highest value (see `early_layer`)


def faults_of(model: Mapping[str, Any], encoder: Mapping[str, Any]) -> list[str]:
    """Return an error message for each value of the `model` node that can't be used.

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
            check_encoder(str(model["report"]), encoder, "model.report")
        except ConfigError as error:
            return [str(error)]
        return []
    if exits == "middle":
        return []
    entries: list[Any] = exits if isinstance(exits, list) else [exits]
    numbers = [entry for entry in entries if isinstance(entry, int) and not isinstance(entry, bool) and entry >= 1]
    if not entries or len(numbers) < len(entries) or numbers != sorted(set(numbers)):
        return [f"model.exits: expected middle, auto, or ascending layers from 1, such as [2,4]; got {exits!r}"]
    layers = encoder.get("layers")
    if isinstance(layers, int) and numbers[-1] >= layers:
        return [f"model.exits: expected layers below the last, {layers}, got {numbers[-1]}"]
    return []


def fill_in(cfg: Any) -> None:
    """Replace `exits: auto` in the configuration, in place, by the layer that `early_layer` chooses."""
    if cfg.model.exits == "auto":
        kept = cfg.encoder.get("layers")  # the report may have more layers than are kept
        profile = {
            task: {layer: value for layer, value in layers.items() if kept is None or layer <= kept}
            for task, layers in read_profile(str(cfg.model.report), "model.report").items()
        }
        cfg.model.exits = [early_layer(profile)]


def early_layer(profile: Mapping[str, Mapping[int, float]]) -> int:
    """Return the lowest layer that encodes nearly as much as the best layer, over all tasks.

    The value of a layer is its compression, divided by the task's highest compression and averaged over tasks. All
    layers from 1 on except the last one can be chosen. The lowest of them whose value is at least `NEARLY` times the
    highest value is returned. If no layer reaches this, the middle layer is returned.

    Args:
        profile: Task -> layer -> compression; layer 0 is the embeddings.

    Raises:
        ConfigError: The report has fewer than two layers.

    >>> early_layer({"bm25": {0: 1.0, 1: 2.0, 2: 3.9, 3: 4.0, 4: 3.8}})
    2
    """
    layers = sorted(set.intersection(*(set(values) for values in profile.values()))) if profile else []
    if len(layers) < 2 or layers[-1] < 2:
        raise ConfigError("model.report: expected a probing run of at least two layers, got fewer; set model.exits")
    values = {layer: sum(by_layer[layer] / max(by_layer.values()) for by_layer in profile.values()) for layer in layers}
    enough = NEARLY * max(values.values())
    found = (layer for layer in layers if 1 <= layer < layers[-1] and values[layer] >= enough)
    return next(found, layers[-1] // 2)
