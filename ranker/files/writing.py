"""Write a file atomically."""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ranker.errors import DataError
from ranker.files.space import MAKE_ROOM


@contextmanager
def write_whole(path: str | Path, binary: bool = False) -> Iterator[IO[Any]]:
    """Open a new file for writing; at the end of the block it atomically replaces `path`.

    The bytes are on the disk before the file gets its final name. If the block fails, nothing changes.

    Args:
        path: The file; a name that ends in `.gz` is compressed. A missing folder is created.
        binary: Whether the block writes bytes; otherwise it writes text, stored as UTF-8.

    Raises:
        DataError: The path cannot be written to, or the text cannot be encoded in UTF-8.
    """
    path = Path(path)
    partial = beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as layers:
            raw: Any = layers.enter_context(partial.open("wb"))
            file = raw
            if path.suffix == ".gz":
                packed = file = layers.enter_context(gzip.GzipFile("", "wb", fileobj=raw, mtime=0))
            if not binary:
                file = layers.enter_context(io.TextIOWrapper(file, encoding="utf-8", newline="\n"))
            yield file
            file.flush()
            if path.suffix == ".gz":
                packed.close()  # writes the trailer of the gzip file
            raw.flush()
            os.fsync(raw.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise DataError(f"{path}: expected a place to write to, got {error.strerror!r}; {MAKE_ROOM}") from error
    except UnicodeEncodeError as error:
        raise DataError(
            f"{path}: expected text that UTF-8 can hold, got {error.object[error.start : error.end]!r}"
        ) from None
    finally:
        with suppress(OSError):  # after a success, the temporary file no longer exists
            partial.unlink()


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk if the file system can. Otherwise a power cut can lose a new file name."""
    with suppress(OSError):
        sync(folder)


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def beside(path: Path) -> Path:
    """Return the temporary name under which this process writes a file or folder."""
    return path.with_name(f".{os.getpid()}.{path.name}.partial")
