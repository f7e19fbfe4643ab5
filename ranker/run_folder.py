"""Make sure that a run folder contains the files of one run only.

The folder must be new or empty when the run begins. Only files that the run wrote are ever removed from it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ranker.errors import ConfigError

# files that every run writes before its first result
WRITTEN = ("config.yaml", "checksums.json", "environment.json", "train.log")
SHOWN = 3  # number of entries of a folder that an error names

_new: set[Path] = set()  # folders that did not exist before this process


def note(folder: Path) -> None:
    """Remember whether a folder exists. Call this before Hydra creates the folder."""
    if not folder.exists():
        _new.add(folder.absolute())


def is_new(folder: Path) -> bool:
    """Return whether a folder did not exist before this process."""
    return folder.absolute() in _new


def check_unused(key: str, folder: Path, expected: Collection[str] = ()) -> None:
    """Check that a folder is empty, so that the run can overwrite no file.

    Args:
        key: The configuration key that names the folder.
        folder: The folder; it need not exist.
        expected: Names of entries that the folder may contain.

    Raises:
        ConfigError: The folder contains another entry, or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{key}: expected a new or an empty folder, got the file {folder}; name another")
    names = (
        sorted({path.name for path in folder.iterdir()} - set(expected) - _log_files(folder)) if folder.is_dir() else []
    )
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise ConfigError(
            f"{key}: expected a new or an empty folder, got {folder}, "
            f"which contains {', '.join(names[:SHOWN])}{more}; name another"
        )


def _log_files(folder: Path) -> set[str]:
    """Return the names of log files in a folder that this process has open. Hydra's logging may write one there."""
    files = [
        Path(handler.baseFilename)
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.FileHandler)
    ]
    return {path.name for path in files if path.parent == folder.absolute()}


def discard(folder: Path) -> None:
    """Remove the files of a run without results, and the folder if the run created it.

    A folder that contains anything else stays as it is.
    """
    if not folder.is_dir() or {path.name for path in folder.iterdir()} - set(WRITTEN):
        return
    for name in WRITTEN:
        with suppress(OSError):
            (folder / name).unlink()
    if is_new(folder):
        with suppress(OSError):  # fails if the folder is not empty
            folder.rmdir()
