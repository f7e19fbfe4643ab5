"""Write checkpoint files so that each is complete or absent, and verify them before they are read."""

from __future__ import annotations

import io
import logging
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities import rank_zero_only

from ranker.errors import CheckpointError, DataError
from ranker.files.checksums import zip_fault
from ranker.files.writing import beside, write_whole
from ranker.training.checkpoint_shards import SHARDS, fault_of_parts, joined, other_parts, part_of

log = logging.getLogger(__name__)

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"


class WholeFiles(CheckpointIO):
    """Checkpoint files for Lightning. A kill or a power cut leaves no incomplete file, and reading runs no code."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: dict[str, Path] | None = None
    ) -> None:
        """Write a checkpoint to a temporary file, which then replaces the old one.

        Args:
            checkpoint: The content.
            path: The file.
            storage_options: `{"previous": path}`: the replaced file is renamed to this path.

        Raises:
            CheckpointError: The disk is full, or the folder is not writable. The old file is kept.
        """
        path = Path(path)
        content = io.BytesIO()  # torch.save to a file would hide the system's error message for a full disk
        torch.save(checkpoint, content)
        try:
            with write_whole(path, binary=True) as file:
                file.write(content.getbuffer())
                if storage_options is not None and path.is_file():
                    link(path, storage_options["previous"])
        except DataError as error:
            reason = getattr(error.__cause__, "strerror", None)
            if (path.parent / LAST).is_file():
                fix = "the previous checkpoint is kept; make room, then go on with python train.py "
                fix += f"checkpoint={path.parent.parent} resume=true"
            else:
                fix = "there is no earlier checkpoint; make room, then start again"
            raise CheckpointError(f"{path}: expected to write a checkpoint, got {reason!r}; {fix}") from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = "cpu",
        weights_only: bool | None = True,
    ) -> dict[str, Any]:
        """Read tensors and plain values. `weights_only` is ignored, because other objects are never read.

        Raises:
            CheckpointError: The file is no checkpoint, is damaged, or contains other objects.
        """
        return read_checkpoint(Path(path), map_location or "cpu")

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint and its parts."""
        for part in (Path(path), *other_parts(Path(path))):
            part.unlink(missing_ok=True)


def read_checkpoint(path: Path, map_location: Any = "cpu", mmap: bool = False) -> dict[str, Any]:
    """Verify the checksums of a checkpoint, and return its tensors and plain values.

    Args:
        path: The file.
        map_location: Device of the tensors.
        mmap: Whether tensors are memory-mapped instead of read.

    Raises:
        CheckpointError: The file is missing, damaged, no checkpoint, or contains other objects.
    """
    damage = fault(path)
    if damage is not None:
        raise CheckpointError(
            f"{path}: expected a whole checkpoint, got {damage}; use another one, such as previous.ckpt, which was "
            "written before last.ckpt"
        )
    content = _load(path, map_location, mmap)
    if SHARDS not in content:
        return content
    return joined(content, [_load(part, map_location, mmap) for part in other_parts(path)])


def _load(path: Path, map_location: Any, mmap: bool) -> dict[str, Any]:
    """Read a checkpoint file without verifying it; see `read_checkpoint`."""
    try:
        content = torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(f"{path}: expected a checkpoint of tensors and plain values, got {reason}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a training checkpoint, got {type(content).__name__}")
    return content


def link(source: Path, target: Path) -> None:
    """Give a checkpoint a second name by hard links, or by copies if the file system has no links.

    A later checkpoint does not change the linked content, because checkpoint files are replaced and never modified.
    """
    for number, part in enumerate(other_parts(source), start=1):
        _link(part, part_of(target, number))
    _link(source, target)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = beside(target)
    partial.unlink(missing_ok=True)
    try:
        os.link(source, partial)
    except OSError:
        shutil.copyfile(source, partial)
    partial.replace(target)


def fault(path: Path) -> str | None:
    """Return what is wrong with a checkpoint; None if it is complete.

    A checkpoint is a zip archive. torch does not verify its checksums, so this function does. If a checkpoint has
    parts, all parts must exist.
    """
    others = other_parts(path)
    damage = next((found for part in (path, *others) if (found := zip_fault(part)) is not None), None)
    if damage is not None or not path.is_file() or (not others and not _names_shards(path)):
        return damage
    try:
        first = _load(path, "cpu", mmap=True)
        return fault_of_parts(first, [_load(part, "cpu", mmap=True) for part in others]) if SHARDS in first else None
    except CheckpointError:  # the caller reads the file next, and then reports that it is no checkpoint
        return None


def _names_shards(path: Path) -> bool:
    """Whether the pickled values of a checkpoint contain the key of a part, without unpickling them."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(
                SHARDS.encode() in archive.read(name) for name in archive.namelist() if name.endswith("data.pkl")
            )
    except (OSError, zipfile.BadZipFile):  # removed meanwhile; the caller reads the file next, and then says so
        return False


def to_resume_from(folder: Path) -> Path:
    """Return the last complete checkpoint of a run: `last.ckpt`, or `previous.ckpt` if `last.ckpt` is damaged.

    Args:
        folder: The run folder.

    Raises:
        CheckpointError: The run has no complete checkpoint.
    """
    faults: list[str] = []
    for name in (LAST, PREVIOUS):
        path = folder / "checkpoints" / name
        damage = fault(path)
        if damage is None:
            if faults:
                rank_zero_only(log.warning)("%s; going on from %s", faults[0], path)
            return path
        faults.append(f"{path}: expected a whole checkpoint, got {damage}")
    if not (folder / "checkpoints" / LAST).exists():
        raise CheckpointError(
            f"checkpoint: expected {folder / 'checkpoints' / LAST}, "
            "which a training writes while it runs, got no such file"
        )
    raise CheckpointError("; ".join(faults))
