"""Space on the disk: full disks are reported in one line, and space is reserved."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ranker.errors import DataError, RankerError

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # errors of a full or a read-only disk
FULL_DATABASE = ("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_READONLY_DIRECTORY")
MAKE_ROOM = "free some space there, or name a path that can be written to"


@contextmanager
def room_for(what: str | Path, fix: str = MAKE_ROOM) -> Iterator[None]:
    """Report a full or read-only disk in one line; other errors are raised unchanged.

    Args:
        what: The file, folder or database that the block writes.
        fix: Advice at the end of the message.

    Raises:
        DataError: The disk is full or read-only.
    """
    try:
        yield
    except Exception as error:
        reason = no_room(error)
        if reason is None or isinstance(error, RankerError):
            raise
        raise DataError(f"{what}: expected a place to write to, got {reason!r}; {fix}") from error


def no_room(error: BaseException) -> str | None:
    """Return the system's message if the cause of an error is a full or read-only disk; otherwise None.

    Rust libraries (safetensors, tokenizers) put the system's error number into their message; SQLite has names of
    errors.
    """
    cause: BaseException | None = error
    while cause is not None:
        in_text = re.search(r"\(os error (\d+)\)", str(cause))
        number = cause.errno if isinstance(cause, OSError) else int(in_text.group(1)) if in_text else None
        if number in FULL_DISK:
            return os.strerror(number)
        if getattr(cause, "sqlite_errorname", None) in FULL_DATABASE:
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return None


def reserve(path: Path, size: int) -> None:
    """Create a file of `size` zero bytes, and reserve the space on the disk.

    Without this, writing to the file through a memory map kills the process (SIGBUS) when the disk is full.

    Raises:
        OSError: There is not enough space; the file is removed.
    """
    try:
        with path.open("wb") as file:
            file.truncate(size)
            if size and hasattr(os, "posix_fallocate"):  # macOS has no posix_fallocate
                os.posix_fallocate(file.fileno(), 0, size)
    except OSError:
        path.unlink(missing_ok=True)
        raise
