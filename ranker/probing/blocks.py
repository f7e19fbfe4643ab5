"""Store finished blocks of the online code on disk, so that a killed run resumes and ends with the same numbers."""

from __future__ import annotations

import io
import logging
import sqlite3
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ranker.errors import DataError
from ranker.files import MAKE_ROOM, room_for

log = logging.getLogger(__name__)

KEY = "key of the block"  # name of the array that repeats the row's key


class BlockStore:
    """Arrays by key in one SQLite file. A block is stored completely or not at all, even if the process is killed.

    Args:
        path: The file; created if missing. None stores nothing.

    Raises:
        DataError: The file is not an SQLite database, or the disk is full or read-only.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._data_errors():
                self._connection = sqlite3.connect(path, timeout=600)
                self._connection.execute(
                    "CREATE TABLE IF NOT EXISTS blocks (key TEXT PRIMARY KEY, arrays BLOB NOT NULL)"
                )
                self._connection.commit()

    def get(self, key: str) -> dict[str, np.ndarray] | None:
        """The arrays of a key, or None if the store has none or they are damaged.

        Raises:
            DataError: The database is damaged.
        """
        if self._connection is None:
            return None
        with self._data_errors():
            row = self._connection.execute("SELECT arrays FROM blocks WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        try:
            with zipfile.ZipFile(io.BytesIO(row[0])) as archive:
                damaged = archive.testzip()  # NumPy does not compare the checksum of each part
            if damaged is not None:
                raise ValueError(f"a damaged part {damaged}")
            with np.load(io.BytesIO(row[0]), allow_pickle=False) as stored:
                arrays = dict(stored)
            if str(arrays.pop(KEY, key)) != key:  # a damaged database index can return another row
                raise ValueError("those of another block")
            return arrays
        except Exception as error:  # zipfile raises many exception classes for damaged headers
            log.warning("%s: expected whole arrays of block %s, got %s; it is computed anew", self.path, key, error)
            return None

    @contextmanager
    def _data_errors(self) -> Iterator[None]:
        """Raise database errors as DataError."""
        try:
            with room_for(self.path or "", f"{MAKE_ROOM}; finished blocks are kept"):
                yield
        except sqlite3.DatabaseError as error:
            raise DataError(
                f"{self.path}: expected a database of finished blocks, got {error}; delete it, its blocks are computed "
                "anew"
            ) from error

    def put(self, blocks: Sequence[tuple[str, Mapping[str, np.ndarray]]]) -> None:
        """Store several blocks in one transaction.

        Raises:
            DataError: The database is damaged, or the disk is full or read-only.
        """
        if self._connection is None:
            return
        rows = []
        for key, arrays in blocks:
            buffer = io.BytesIO()
            np.savez(buffer, **{KEY: np.array(key)}, **arrays)  # type: ignore[arg-type]
            rows.append((key, buffer.getvalue()))
        with self._data_errors(), self._connection:
            self._connection.executemany("INSERT OR REPLACE INTO blocks VALUES (?, ?)", rows)

    def close(self) -> None:
        """Close the file."""
        if self._connection is not None:
            self._connection.close()
