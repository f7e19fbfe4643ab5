"""A run folder belongs to one run: it is new or empty when the run begins, and only what the run wrote itself is ever removed from it."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ranker.errors import ConfigError

# what every run writes before there is any result
WRITTEN = ("config.yaml", "checksums.json", "environment.json", "train.log")
SHOWN = 3  # entries of a folder that an error names

_new: set[Path] = set()  # folders that were not there before this process


def note(folder: Path) -> None:
    """Remember whether a folder is there already; to be called before Hydra makes it."""
    if not folder.exists():
        _new.add(folder.absolute())


def is_new(folder: Path) -> bool:
    """Whether a folder was not there before this process."""
    return folder.absolute() in _new


def check_unused(key: str, folder: Path, expected: Collection[str] = ()) -> None:
    """Refuse a folder that holds anything, so that nothing in it can be overwritten.

    Args:
        key: The setting that names the folder.
        folder: The folder; one that does not exist is fine.
        expected: Names of entries that may be there.

    Raises:
        ConfigError: The folder holds something else, or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{key}: expected a new or an empty folder, got the file {folder}; name another")
    names = (
        sorted({path.name for path in folder.iterdir()} - set(expected) - _log_files(folder)) if folder.is_dir() else []
    )
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise ConfigError(
            f"{key}: expected a new or an empty folder, got {folder}, which holds {', '.join(names[:SHOWN])}{more}; name another"
        )


def _log_files(folder: Path) -> set[str]:
    """Names of the log files in a folder that this process has open: Hydra's own logging writes one there."""
    files = [
        Path(handler.baseFilename)
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.FileHandler)
    ]
    return {path.name for path in files if path.parent == folder.absolute()}


def discard(folder: Path) -> None:
    """Remove what a run without results wrote, and the folder if it is the run's; a folder that holds anything else is kept whole."""
    if not folder.is_dir() or {path.name for path in folder.iterdir()} - set(WRITTEN):
        return
    for name in WRITTEN:
        with suppress(OSError):
            (folder / name).unlink()
    if is_new(folder):
        with suppress(OSError):  # not empty after all
            folder.rmdir()
