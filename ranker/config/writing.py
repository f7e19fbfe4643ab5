"""Check that callbacks and loggers write to the run folder only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ranker.files.folders import leads_out

# Groups whose objects write files.
WRITING = ("callbacks", "logger")
# Parameters of Lightning's callbacks that are paths; Lightning resolves relative paths in the working directory.
CALLBACK_PATHS = ("dirpath", "exclude_batches_path")
# Parameters that set the folder of a logger; the program passes the run folder as the first argument.
LOGGER_FOLDERS = ("folder", "earlier", "save_dir", "dir", "root_dir", "log_dir", "tracking_uri", "artifact_location")


def parts_of(node: Any, path: str) -> list[tuple[Any, str]]:
    """Return the children of a node of plain values, each with its dotted path."""
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [(part, f"{path}.{key}" if path else str(key)) for key, part in entries]


def writing_faults(content: Mapping[str, Any]) -> list[str]:
    """Return one fault for each value of callbacks and loggers that leads out of the run folder.

    Args:
        content: A configuration of plain values.
    """
    faults = [fault for key in WRITING for fault in _leading_out(content.get(key), key)]
    logger = content.get("logger")
    if isinstance(logger, dict) and "_target_" in logger:
        if logger.get("_partial_") is not True:
            faults.append("logger._partial_: expected true, since a logger gets the run's folder when the run begins")
        faults += [
            f"logger.{key}: expected no such key, since loggers write to the run's folder"
            for key in LOGGER_FOLDERS
            if key in logger
        ]
    return faults


def _leading_out(node: Any, path: str) -> list[str]:
    if isinstance(node, str) and leads_out(node):
        return [
            f"{path}: expected a path inside the run's folder, got {node!r}; "
            "leave the path out, or give a path relative to this folder"
        ]
    return [fault for part, name in parts_of(node, path) for fault in _leading_out(part, name)]


def inside(folder: Path, node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a callback's node with its paths resolved in the run folder."""
    return {
        key: str(folder / value) if key in CALLBACK_PATHS and isinstance(value, str) else value
        for key, value in node.items()
    }
