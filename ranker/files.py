"""Write files and folders atomically, report full disks, and compute checksums that detect changed bytes.

`python -m ranker.files FOLDER` computes `checksums.json` of a folder again, after a user has edited its files.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import logging
import os
import re
import shutil
import sys
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ranker.errors import DataError, RankerError

log = logging.getLogger(__name__)

SUMS = "checksums.json"
CHUNK = 1 << 20  # bytes per read
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # errors of a full or a read-only disk
FULL_DATABASE = ("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_READONLY_DIRECTORY")
MAKE_ROOM = "free some space there, or name a path that can be written to"
THREADS = 8  # number of files read in parallel; zlib releases the GIL
LOG_SECONDS = 10.0  # comparisons that take longer are logged
REBUILD = "the file is damaged; delete {folder}, it is built anew"
ACCEPT = "the file is damaged; if you changed it on purpose, run python -m ranker.files {folder} to accept it"
Sum = Mapping[str, int]  # bytes, crc32

_verified: set[tuple[int, ...]] = set()  # files that this process has already compared


# writing
# ----------------------------------------------------------------------------------------------------


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
                _sync(path)
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


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk if the file system can. Otherwise a power cut can lose a new file name."""
    with suppress(OSError):
        _sync(folder)


def beside(path: Path) -> Path:
    """Return the temporary name under which this process writes a file or folder."""
    return path.with_name(f".{os.getpid()}.{path.name}.partial")


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


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# checksums
# ----------------------------------------------------------------------------------------------------


def checksum(path: Path) -> dict[str, int]:
    """Return the size in bytes and the CRC-32 of a file, which is read in chunks of 1 MiB."""
    crc = size = 0
    buffer = memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:  # no memory map: its pages would count as memory of this process
        while count := file.readinto(buffer):
            crc, size = zlib.crc32(buffer[:count], crc), size + count
    return {"bytes": size, "crc32": crc}


def verify(folder: Path, sums: Mapping[str, Sum], fix: str = REBUILD, error: type[RankerError] = DataError) -> None:
    """Compare files with their checksums; several files are read in parallel.

    A process compares each file once. Only the first process of a machine compares bytes; others compare sizes.

    Args:
        folder: The folder of the files.
        sums: File name -> `bytes` and `crc32`, as `checksum` gives them.
        fix: Advice at the end of the error message, in which `{folder}` is replaced.
        error: Class of the error.

    Raises:
        RankerError: A file is missing, or its size or bytes differ. The error is of class `error` and names the file.
    """
    started = time.monotonic()

    def compare(name: str) -> int:
        path, expected = folder / name, sums[name]
        try:
            size, crc = int(expected["bytes"]), int(expected["crc32"])
            state = path.stat()
            key = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, crc)
            if state.st_size != size:
                raise error(f"{path}: expected {size} bytes, got {state.st_size}; {fix.format(folder=folder)}")
            if key in _verified or not _is_first_of_machine():
                return 0
            got = checksum(path)["crc32"]
        except (OSError, ValueError, TypeError, KeyError) as fault:
            reason = fault.strerror if isinstance(fault, OSError) else f"an unreadable checksum ({fault!r})"
            raise error(f"{path}: expected a readable file, got {reason}; {fix.format(folder=folder)}") from fault
        if got != crc:
            raise error(f"{path}: expected CRC-32 {crc:08x}, got {got:08x}; {fix.format(folder=folder)}")
        _verified.add(key)
        return size

    with ThreadPoolExecutor(min(THREADS, max(1, len(sums)))) as pool:
        size = sum(pool.map(compare, sums))
    seconds = time.monotonic() - started
    if seconds > LOG_SECONDS:
        log.info("%s: compared %.1f GB with their checksums in %.0f s", folder, size / 1e9, seconds)


def write_sums(folder: Path, names: Iterable[str] | None = None) -> None:
    """Write `checksums.json` into a folder.

    Args:
        folder: The folder.
        names: Files to add to the list; None: replace the list by all files of the folder and its subfolders.
    """
    listed = read_sums(folder) if names is not None and (folder / SUMS).is_file() else {}
    if names is None:
        paths = (path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
        names = [path.relative_to(folder).as_posix() for path in paths]
    with write_whole(folder / SUMS) as file:
        json.dump(
            {**listed, **{name: checksum(folder / name) for name in sorted(names)}}, file, indent=1, ensure_ascii=False
        )
        file.write("\n")


def verify_folder(
    folder: Path, name: str | None = None, error: type[RankerError] = DataError, fix: str = ACCEPT
) -> None:
    """Compare a folder with its `checksums.json`. A folder of another program has no such file and is accepted.

    Args:
        folder: The folder.
        name: Compare only this file, if it is listed; None: all listed files.
        error: Class of the error.
        fix: As for `verify`.

    Raises:
        RankerError: A listed file, or the list itself, has changed or can't be read. The error is of class `error`.
    """
    if (folder / SUMS).is_file():
        sums = read_sums(folder, error)
        verify(folder, sums if name is None else {key: value for key, value in sums.items() if key == name}, fix, error)


def read_sums(folder: Path, error: type[RankerError] = DataError) -> dict[str, Sum]:
    """Return the content of a folder's `checksums.json`.

    Raises:
        RankerError: The list can't be read, or names a file outside the folder. The error is of class `error`.
    """
    path = folder / SUMS
    try:
        sums = json.loads(path.read_text(encoding="utf-8"))
        for name in sums:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"a file outside the folder: {name!r}")
            sums[name]["bytes"], sums[name]["crc32"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as fault:
        raise error(
            f"{path}: expected the sizes and checksums of the folder's files, got {fault!r}; "
            "if the other files are right, delete this file; the others are then used without a check"
        ) from fault
    return sums


def leads_out(path: str) -> bool:
    """Return whether a path is absolute, or leaves the folder to which it is relative.

    >>> [leads_out(path) for path in ("a/b", "../a", "/a", "a/../../b", "~/a", "val/nDCG@10")]
    [False, True, True, True, True, False]
    """
    return path.startswith(("/", "~", "file:")) or ".." in Path(path).parts or "\0" in path


def zip_fault(path: Path) -> str | None:
    """Compare the members of a zip archive (a checkpoint, an `.npz`) with their CRC-32.

    Readers of arrays do not compare CRC-32s. Every process of a run compares the archive once, so all decide alike.

    Returns:
        A description of the fault; None if the archive is intact.
    """
    if not path.is_file():
        return "no such file"
    state = path.stat()
    key = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
    if key in _verified:
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # for damaged headers, zipfile raises errors of many classes
        return f"a broken one of {state.st_size} bytes ({str(error).strip().split(chr(10))[0] or type(error).__name__})"
    if damaged is None:
        _verified.add(key)
    return f"one whose part {damaged} is damaged" if damaged else None


def _is_first_of_machine() -> bool:
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) or 0) == 0


def main(arguments: list[str]) -> int:
    """Compute the checksums of the listed files of each folder again; return the exit code."""
    if not arguments or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)  # noqa: T201
        return 1
    try:
        for folder in map(Path, arguments):
            if not (folder / SUMS).is_file():
                raise DataError(f"{folder}: expected a folder with {SUMS}, got none; nothing is compared there")
            names = [name for name in read_sums(folder) if (folder / name).is_file()]
            (folder / SUMS).unlink()
            write_sums(folder, names)
            print(f"{folder}: accepted {len(names)} files as they are")  # noqa: T201
    except RankerError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
