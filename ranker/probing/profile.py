"""The compression of each task and layer in a probing report. Imports no torch."""

from __future__ import annotations

import csv
from pathlib import Path

from ranker.errors import ConfigError


def read_profile(report: Path | str, key: str) -> dict[str, dict[int, float]]:
    """Return task -> layer -> compression of the first model of a probing run, the mean over seeds.

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
