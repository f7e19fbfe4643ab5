"""Checkpoint files that are whole or not there, and a look at whether they still are."""

from __future__ import annotations

import io
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities import rank_zero_only

from ranker.errors import CheckpointError, DataError
from ranker.files import beside, write_whole, zip_fault

log = logging.getLogger(__name__)

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"


class WholeFiles(CheckpointIO):
    """Checkpoints that are there whole or not at all, after a kill and after a power cut; reading one runs no code of its."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: dict[str, Path] | None = None
    ) -> None:
        """Write beside the file, then take its place.

        Args:
            checkpoint: What to save.
            path: The file.
            storage_options: `{"previous": path}`: where the file that is replaced goes.

        Raises:
            CheckpointError: There is no room, or no right to write; what was there before is still there.
        """
        path = Path(path)
        content = io.BytesIO()  # torch, writing into a full disk, hides the disk's error behind one of its own
        torch.save(checkpoint, content)
        try:
            with write_whole(path, binary=True) as file:
                file.write(content.getbuffer())
                if storage_options is not None and path.is_file():
                    link(path, storage_options["previous"])
        except DataError as error:
            reason = getattr(error.__cause__, "strerror", None)
            raise CheckpointError(
                f"{path}: expected to write a checkpoint, got {reason!r}; the one before is kept; make room, then go on with "
                f"python train.py checkpoint={path.parent.parent} resume=true"
            ) from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = "cpu",
        weights_only: bool | None = True,
    ) -> dict[str, Any]:
        """Read tensors and plain values, whatever Lightning asks for.

        Raises:
            CheckpointError: The file is not a checkpoint, is damaged, or holds anything else.
        """
        return read_checkpoint(Path(path), map_location or "cpu")

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove it."""
        Path(path).unlink(missing_ok=True)


def read_checkpoint(path: Path, map_location: Any = "cpu", mmap: bool = False) -> dict[str, Any]:
    """Read a checkpoint whose parts equal their checksums: tensors and plain values.

    Args:
        path: The file.
        map_location: Device of the tensors.
        mmap: Whether tensors stay in the file until they are used.

    Raises:
        CheckpointError: It is missing, damaged, no checkpoint, or holds anything else.
    """
    damage = fault(path)
    if damage is not None:
        raise CheckpointError(
            f"{path}: expected a whole checkpoint, got {damage}; use another one: previous.ckpt is the last.ckpt before"
        )
    try:
        content = torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(f"{path}: expected a checkpoint of tensors and plain values, got {reason}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a training checkpoint, got {type(content).__name__}")
    return content


def link(source: Path, target: Path) -> None:
    """Give a file a second name (where that can't be, a copy); files are replaced, never written into, so both stay what they are."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = beside(target)
    partial.unlink(missing_ok=True)
    try:
        os.link(source, partial)
    except OSError:
        shutil.copyfile(source, partial)
    partial.replace(target)


def fault(path: Path) -> str | None:
    """What is wrong with a checkpoint file, None if it is whole: a zip archive whose checksums torch itself does not compare."""
    return zip_fault(path)


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
        raise CheckpointError(
            f"checkpoint: expected {folder / 'checkpoints' / LAST}, which a training writes as it goes, got no such file"
        )
    raise CheckpointError("; ".join(faults))
