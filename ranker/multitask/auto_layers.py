"""Choose the layers of heads with `layer: auto` from a probing report. torch is not imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ranker.config.stored import load_stored
from ranker.errors import ConfigError
from ranker.multitask.heads import reported_name
from ranker.multitask.options import AutoLayers, Head
from ranker.probing.profile import check_encoder, probed_encoder, read_profile


def auto_layers(heads: Sequence[Head], auto: AutoLayers, encoder: Mapping[str, Any]) -> dict[str, int]:
    """Choose the layer of each head with `layer: auto`: the layer with the highest compression in a probing report.

    Compression is averaged over the seeds of the report. Among layers with equal compression, the lowest is chosen.

    Args:
        heads: All heads.
        auto: The report and the allowed layers.
        encoder: The configuration's `encoder` node.

    Returns:
        Name of the head -> layer.

    Raises:
        ConfigError: There is no report, or the report lacks a task or is about another encoder.
    """
    wanted = [head for head in heads if head.layer == "auto"]
    if not wanted:
        return {}
    if auto.report is None:
        raise ConfigError(
            "model.auto.report: expected the folder of a probing run for layer: auto, got none; run probe.py, or give "
            "a layer"
        )
    profile = read_profile(auto.report, "model.auto.report")
    allowed = _allowed_layers({layer for layers in profile.values() for layer in layers}, auto, encoder)
    chosen, faults = {}, []
    for head in wanted:
        name = reported_name(head)
        if name not in profile:
            faults.append(
                f"model.heads.{head.label}.layer: expected {name} in {auto.report}/probe_results.csv, got "
                f"{', '.join(profile) or 'no task'}; probe it, or give a layer"
            )
            continue
        by_layer = {layer: value for layer, value in profile[name].items() if layer in allowed}
        if not by_layer:
            faults.append(
                f"model.auto.last_layer: expected other layers than the last one in {auto.report}, got none for "
                f"{head.task}"
            )
            continue
        chosen[head.label] = max(by_layer, key=lambda layer: (by_layer[layer], -layer))
    if faults:
        raise ConfigError("\n".join(faults))
    return chosen


def _allowed_layers(layers: set[int], auto: AutoLayers, encoder: Mapping[str, Any]) -> set[int]:
    """Return the layers of a report that may be chosen.

    Raises:
        ConfigError: The report is about another encoder; or the last layer is not allowed, and the report does not show
            which layer is last.
    """
    assert auto.report is not None
    stored = Path(auto.report) / "config.yaml"
    report_cfg: Any = load_stored(stored) if stored.is_file() else {}
    probed = probed_encoder(auto.report)
    check_encoder(auto.report, encoder, "model.auto.report")
    if auto.last_layer:
        return layers
    last = encoder.get("layers") or (
        max(layers, default=0) if not report_cfg.get("layers") and not probed.get("layers") else None
    )
    if last is None:
        raise ConfigError(
            "model.auto.last_layer: expected a report on all layers, to know which is the last, got one on some in "
            f"{auto.report!r}; run probe.py with layers=null, or set model.auto.last_layer=true"
        )
    return {layer for layer in layers if layer < last}
