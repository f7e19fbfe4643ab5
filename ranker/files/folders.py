"""Write a folder atomically, with checksums of its files; paths that lead out of a folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ranker.files.checksums import write_sums
from ranker.files.space import room_for
from ranker.files.writing import beside, sync, sync_folder


@contextmanager
def write_folder(folder: Path) -> Iterator[Path]:
    """Create a folder. At the end of the block, it gets checksums of its files and the name `folder`.

    If the block fails, the new folder is removed.

    Args:
        folder: The final name; only an empty folder may exist there. The caller must be the only writer, because
            folders that killed writers left unfinished are removed first.

    Yields:
        The folder to write into.

    Raises:
        DataError: The disk is full or read-only.
    """
    remove_partial(folder)
    partial = beside(folder)
    with room_for(folder):
        partial.mkdir(parents=True)
        try:
            yield partial
            write_sums(partial)
            for path in partial.rglob("*"):
                sync(path)
            partial.replace(folder)
            sync_folder(folder.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def remove_partial(path: Path) -> None:
    """Remove unfinished files that killed writers of a file or folder left. The caller must hold the lock."""
    if not path.parent.is_dir():
        return
    for left in path.parent.iterdir():
        if re.fullmatch(rf"\.\d+\.{re.escape(path.name)}\.partial", left.name):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def leads_out(path: str) -> bool:
    """Return whether a path is absolute, or leaves the folder to which it is relative.

    >>> [leads_out(path) for path in ("a/b", "../a", "/a", "a/../../b", "~/a", "val/nDCG@10")]
    [False, True, True, True, True, False]
    """
    return path.startswith(("/", "~", "file:")) or ".." in Path(path).parts or "\0" in path
