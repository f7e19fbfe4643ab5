"""Read and copy the map from scores to probabilities that `ranker calibrate store=true` puts into a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

from ranker.errors import CheckpointError
from ranker.evaluation.calibration import Calibration, write_calibration

FILE = "calibration.json"


def read_calibration(checkpoint: str | Path, wanted: bool, file: str | Path | None = None) -> Calibration | None:
    """Return the map that turns scores into probabilities; None: scores stay as they are.

    Args:
        checkpoint: The model's folder.
        wanted: Whether to read the map in this folder.
        file: A `calibration.json` of `ranker calibrate` to read instead.

    Raises:
        CheckpointError: There is no map, or the file has none.
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
    """Copy a model's map into the folder of an export, if it has one; return it."""
    found = next((path for path in (checkpoint / FILE, checkpoint / "model" / FILE) if path.is_file()), None)
    if found is None:
        return None
    content = json.loads(found.read_text(encoding="utf-8"))
    write_calibration(folder / FILE, {key: value for key, value in content.items() if key != "checkpoint"})
    return Calibration.read(found)
