"""Read the compression of each task and layer from a probing report. This module does not import torch."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ranker.config.stored import load_stored
from ranker.errors import ConfigError


def read_profile(report: Path | str, key: str) -> dict[str, dict[int, float]]:
    """Return task -> layer -> mean compression over seeds, for the first model of a probing run.

    Args:
        report: Folder of the run.
        key: Dotted configuration key that names the folder, for the message.

    Raises:
        ConfigError: The folder is not a finished probing run.
    """
    path = Path(report) / "probe_results.csv"
    if not path.is_file():
        raise ConfigError(f"{key}: expected a finished probing run with probe_results.csv, got {str(report)!r}")
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("control") == "none" and row.get("layer")]
    seeds: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row["model"] == rows[0]["model"]:
            layers = seeds.setdefault(row["task"], {})
            layers.setdefault(int(row["layer"]), []).append(float(row["compression"]))
    return {
        task: {layer: sum(values) / len(values) for layer, values in sorted(layers.items())}
        for task, layers in sorted(seeds.items())
    }


def probed_encoder(report: Path | str) -> Mapping[str, Any]:
    """Return the `encoder` node of the encoder or ranker that a probing run has probed.

    Args:
        report: Folder of the run.

    Returns:
        The node; empty if no configuration names the probed model.
    """
    stored = Path(report) / "config.yaml"
    probed: Any = load_stored(stored) if stored.is_file() else {}
    if probed.get("checkpoint"):
        known = (path for name in ("config.yaml", "ranker.yaml") if (path := Path(probed.checkpoint) / name).is_file())
        trained = next(known, None)
        probed = {} if trained is None else load_stored(trained)
    return probed.get("encoder") or {}


def check_encoder(report: Path | str, encoder: Mapping[str, Any], key: str) -> None:
    """Refuse a probing run of another encoder; accept a run that does not name its encoder.

    Args:
        report: Folder of the run.
        encoder: The `encoder` node of the encoder whose layers are to be chosen.
        key: Dotted configuration key that names the folder, for the message.

    Raises:
        ConfigError: The encoders have different names.
    """
    wanted, got = (
        "/".join(str(node[key]) for key in ("package", "name") if node.get(key))
        for node in (encoder, probed_encoder(report))
    )
    same = wanted == got or (Path(wanted).exists() and Path(wanted).resolve() == Path(got).resolve())
    if wanted and got and not same:
        raise ConfigError(
            f"{key}: expected a report on {wanted}, got a report on {got} in {str(report)!r}; run probe.py with the "
            "same encoder, or name layers"
        )
