"""Read and copy `calibration.json`, by which a model's scores become probabilities (`ranker calibrate`)."""

from __future__ import annotations

import json
from pathlib import Path

from ranker.errors import CheckpointError
from ranker.evaluation.calibration import Calibration, write_calibration

FILE = "calibration.json"


def read_calibration(checkpoint: str | Path, wanted: bool, file: str | Path | None = None) -> Calibration | None:
    """Return the map that turns scores into probabilities, or None if scores are to stay unchanged.

    Args:
        checkpoint: The model's folder.
        wanted: Whether probabilities are wanted; the map is then read from the model's folder, or from `file`.
        file: A `calibration.json` of `ranker calibrate` to read instead.

    Raises:
        CheckpointError: The folder or `file` has no map.
    """
    if file is not None:
        return Calibration.read(Path(file).expanduser())
    if not wanted:
        return None
    path = Path(checkpoint).expanduser() / FILE
    if not path.is_file():
        raise CheckpointError(
            f"probabilities: expected {FILE} in {str(checkpoint)!r}, got none; write it with ranker calibrate "
            f"checkpoint={checkpoint} store=true, or name one with calibration=FILE"
        )
    return Calibration.read(path)


def copy_calibration(checkpoint: Path, folder: Path) -> Calibration | None:
    """Copy the map of a model, if the model has one, into the folder of an export; return the map."""
    found = next((path for path in (checkpoint / FILE, checkpoint / "model" / FILE) if path.is_file()), None)
    if found is None:
        return None
    content = json.loads(found.read_text(encoding="utf-8"))
    write_calibration(folder / FILE, {key: value for key, value in content.items() if key != "checkpoint"})
    return Calibration.read(found)
