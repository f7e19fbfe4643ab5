"""Checksums that detect changed bytes: of files, of folders with `checksums.json`, and of zip archives."""

from __future__ import annotations

import json
import logging
import os
import time
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ranker.errors import DataError, RankerError
from ranker.files.writing import write_whole

log = logging.getLogger(__name__)

SUMS = "checksums.json"
CHUNK = 1 << 20  # bytes per read
THREADS = 8  # number of files read in parallel; zlib releases the GIL
LOG_SECONDS = 10.0  # comparisons that take longer are logged
REBUILD = "the file is damaged; delete {folder}, it is built anew"
ACCEPT = "the file is damaged; if you changed it on purpose, run python -m ranker.files {folder} to accept it"
Sum = Mapping[str, int]  # bytes, crc32

_verified: set[tuple[int, ...]] = set()  # files that this process has already compared


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
