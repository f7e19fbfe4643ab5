"""Store finished blocks of the online code on disk, so that a resumed run ends with the same numbers."""

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
from ranker.files.space import MAKE_ROOM, room_for

log = logging.getLogger(__name__)

KEY = "key of the block"  # name of an array that repeats the key of its database row


class BlockStore:
    """A store of arrays by key in one SQLite file. Even a killed process stores a block completely or not at all.

    Args:
        path: The file, created if missing; None: nothing is stored.

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
        """Return the arrays of a key; None if the arrays are missing or damaged.

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
                damaged = archive.testzip()  # this compares checksums, which NumPy does not
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
        """Convert errors of the database to DataError."""
        try:
            with room_for(self.path or "", f"{MAKE_ROOM}; finished blocks are kept"):
                yield
        except sqlite3.DatabaseError as error:
            raise DataError(
                f"{self.path}: expected a database of finished blocks, got {error}; delete it, and its blocks will be "
                "computed again"
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
