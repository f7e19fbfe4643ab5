"""Checkpoint files that are whole or not there, and a look at whether they still are."""

from __future__ import annotations

import io
import logging
import os
import shutil
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities import rank_zero_only

from ranker.errors import CheckpointError

log = logging.getLogger(__name__)

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"


class WholeFiles(CheckpointIO):
    """Checkpoints that are there whole or not at all, after a kill and after a power cut; reading one runs no code of its."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: dict[str, Path] | None = None) -> None:
        """Write beside the file, then take its place.

        Args:
            checkpoint: What to save.
            path: The file.
            storage_options: `{"previous": path}`: where the file that is replaced goes.

        Raises:
            CheckpointError: There is no room, or no right to write; what was there before is still there.
        """
        path = Path(path)
        partial = path.with_name(f".{path.name}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = io.BytesIO()  # torch, writing into a full disk, hides the disk's error behind one of its own
            torch.save(checkpoint, content)
            with partial.open("wb") as file:
                file.write(content.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            if storage_options is not None and path.is_file():
                link(path, storage_options["previous"])
            partial.replace(path)
            _sync_folder(path.parent)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise CheckpointError(
                f"{path}: expected to write a checkpoint, got {error.strerror!r}; the one before is kept; make room, then go on with "
                f"python train.py checkpoint={path.parent.parent} resume=true"
            ) from error

    def load_checkpoint(self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = True) -> dict[str, Any]:  # noqa: ARG002
        """Read tensors and plain values, whatever Lightning asks for.

        Raises:
            CheckpointError: The file is not a checkpoint, or holds anything else.
        """
        try:
            return torch.load(path, map_location=map_location or "cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{path}: expected a checkpoint of tensors and plain values, got {_first_line(error)}") from error

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove it."""
        Path(path).unlink(missing_ok=True)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def link(source: Path, target: Path) -> None:
    """Give a file a second name (where that can't be, a copy); files are replaced, never written into, so both stay what they are."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        os.link(source, partial)
    except OSError:
        shutil.copyfile(source, partial)
    partial.replace(target)


def _sync_folder(folder: Path) -> None:
    """A new name outlives a power cut only when its folder has reached the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fault(path: Path) -> str | None:
    """Say what is wrong with a checkpoint file, None if it is whole.

    It is a zip archive with a checksum for each part; torch reads parts without comparing it.
    """
    if not path.is_file():
        return "no such file"
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        return f"a broken one of {path.stat().st_size} bytes ({_first_line(error)})"
    return f"one whose part {damaged} is damaged" if damaged else None


def to_resume_from(folder: Path) -> Path:
    """The last whole checkpoint of a run: `last.ckpt`, or the one before where that is broken.

    Args:
        folder: The run folder.

    Raises:
        CheckpointError: There is none.
    """
    faults: list[str] = []
    for name in (LAST, PREVIOUS):
        path = folder / "checkpoints" / name
        found = fault(path)
        if found is None:
            if faults:
                rank_zero_only(log.warning)("%s; going on from %s", faults[0], path)
            return path
        faults.append(f"{path}: expected a whole checkpoint, got {found}")
    if not (folder / "checkpoints" / LAST).exists():
        raise CheckpointError(f"checkpoint: expected {folder / 'checkpoints' / LAST}, which a training writes as it goes, got no such file")
    raise CheckpointError("; ".join(faults))
