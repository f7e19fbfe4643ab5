"""Read large files of separated columns into arrays, without a Python object per line."""

from __future__ import annotations

from collections.abc import Iterator
from gzip import GzipFile
from io import BufferedReader
from typing import IO

import numpy as np

from ranker.data.ragged import ranges

BLOCK = 1 << 24  # bytes that are read at a time
_LINE_FEED, _TAB, _RETURN = 10, 9, 13


def whole_lines(stream: IO[bytes] | GzipFile | BufferedReader, size: int = BLOCK) -> Iterator[bytes]:
    r"""Yield a stream in blocks of about `size` bytes that end with a line feed; if necessary, one is added at the end.

    >>> import io
    >>> list(whole_lines(io.BytesIO(b"1\n22\n333\n4"), size=4))
    [b'1\n', b'22\n', b'333\n', b'4\n']
    """
    rest = b""
    while block := stream.read(size):
        cut = block.rfind(b"\n") + 1
        if not cut:
            rest += block
            continue
        yield rest + block[:cut]
        rest = block[cut:]
    if rest:
        yield rest + b"\n"


def field_bounds(block: np.ndarray, num_columns: int) -> tuple[np.ndarray, np.ndarray] | None:
    r"""Find the fields of lines with exactly `num_columns` columns, separated by single tabs.

    Args:
        block: Whole lines, each with its line feed, uint8 [bytes].
        num_columns: Number of columns of each line.

    Returns:
        First byte of each field and the byte after it, int64 [lines, columns]; None if a line has another number of
        columns or a carriage return.

    >>> starts, ends = field_bounds(np.frombuffer(b"a\tbc\nd\t\n", np.uint8), 2)
    >>> starts.tolist(), ends.tolist()
    ([[0, 2], [5, 7]], [[1, 4], [6, 7]])
    """
    ends = np.flatnonzero((block == _TAB) | (block == _LINE_FEED))
    pattern = np.full(num_columns, _TAB, dtype=np.uint8)
    pattern[-1] = _LINE_FEED
    if len(ends) % num_columns or (block == _RETURN).any():
        return None
    if (block[ends].reshape(-1, num_columns) != pattern).any():
        return None
    starts = np.concatenate([[0], ends[:-1] + 1])
    return starts.reshape(-1, num_columns), ends.reshape(-1, num_columns)


def fields(block: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Copy fields out of a block.

    Returns:
        The fields, bytes of one width [fields].
    """
    lengths = ends - starts
    width = max(1, int(lengths.max(initial=0)))
    cells = np.zeros((len(starts), width), dtype=np.uint8)
    places = ranges(0, lengths)
    cells[np.repeat(np.arange(len(starts)), lengths), places] = block[np.repeat(starts, lengths) + places]
    return cells.reshape(-1).view(f"S{width}")


class SortedIds:
    """Ids with their rows, for the search of one or many ids. A short id takes some 20 bytes.

    Args:
        ids: UTF-8 in a bytes array [rows].

    Attributes:
        repeat: The first two rows with the same id, in the order of ids; None if all ids are different.
    """

    def __init__(self, ids: np.ndarray) -> None:
        self._order = np.argsort(ids, kind="stable").astype(np.int32)
        self._sorted = ids[self._order]
        repeats = np.flatnonzero(self._sorted[1:] == self._sorted[:-1])
        self.repeat = (int(self._order[repeats[0]]), int(self._order[repeats[0] + 1])) if len(repeats) else None

    def row(self, text_id: object) -> int:
        """Return the row of an id; -1 for an unknown id."""
        key = text_id.encode("utf-8", "surrogatepass") if isinstance(text_id, str) else b""
        # The search key is cut to the width of the ids, because NumPy would otherwise widen all ids. The comparison
        # below uses the whole key
        place = int(np.searchsorted(self._sorted, np.array(key, dtype=self._sorted.dtype)))
        return int(self._order[place]) if key and place < len(self._order) and self._sorted[place] == key else -1

    def known(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids have a row, bool [ids].

        Args:
            ids: UTF-8 in a bytes array [ids].
        """
        wanted = ids.astype(self._sorted.dtype)
        if not len(self._sorted):
            return np.zeros(len(ids), dtype=bool)
        places = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
        return (wanted == ids) & (self._sorted[places] == wanted)
