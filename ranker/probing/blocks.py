"""Finished blocks of the online code on disk, so that a killed run goes on where it stopped and ends with the same numbers."""

from __future__ import annotations

import io
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


class BlockStore:
    """Arrays by key in one SQLite file: a block is there whole or not at all, also after a kill.

    Args:
        path: The file; made if missing. None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=600)
            self._connection.execute("CREATE TABLE IF NOT EXISTS blocks (key TEXT PRIMARY KEY, arrays BLOB NOT NULL)")
            self._connection.commit()

    def get(self, key: str) -> dict[str, np.ndarray] | None:
        """The arrays of a key, or None."""
        if self._connection is None:
            return None
        row = self._connection.execute("SELECT arrays FROM blocks WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        with np.load(io.BytesIO(row[0]), allow_pickle=False) as arrays:
            return dict(arrays)

    def put(self, blocks: Sequence[tuple[str, Mapping[str, np.ndarray]]]) -> None:
        """Keep several blocks, all or none."""
        if self._connection is None:
            return
        rows = []
        for key, arrays in blocks:
            buffer = io.BytesIO()
            np.savez(buffer, **arrays)  # type: ignore[arg-type]
            rows.append((key, buffer.getvalue()))
        with self._connection:
            self._connection.executemany("INSERT OR REPLACE INTO blocks VALUES (?, ?)", rows)

    def close(self) -> None:
        """Close the file."""
        if self._connection is not None:
            self._connection.close()
