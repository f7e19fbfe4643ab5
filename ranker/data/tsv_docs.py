"""Docs of a file of lines `id`, tab, text, which are read on access."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ranker.data.collection import Doc
from ranker.data.separated import SortedIds, field_bounds, fields, whole_lines
from ranker.data.stored_fingerprint import stored_fingerprint
from ranker.errors import DataError

_READ = 1 << 22  # number of bytes per read in a pass over all docs


class TsvDocs:
    """Docs of a file such as MS MARCO's `collection.tsv`; only ids and positions are in memory, some 30 bytes a doc.

    Texts are read from the file on access, so that a pass over all docs takes no memory. Several processes may read.

    Args:
        path: The file.

    Raises:
        DataError: A line does not have exactly two columns, or ends in a carriage return; or an id is repeated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process_id, self._file = -1, -1
        ids, ends, position, line = [], [np.zeros(1, dtype=np.int64)], 0, 1
        with path.open("rb") as stream:
            for text in whole_lines(stream):
                block = np.frombuffer(text, dtype=np.uint8)
                bounds = field_bounds(block, 2)
                if bounds is None:
                    raise DataError(f"{path}: expected lines of id, tab and text, got others after line {line - 1}")
                starts, stops = bounds
                ids.append(fields(block, starts[:, 0], stops[:, 0]))
                ends.append(position + stops[:, 1] + 1)
                position, line = position + len(block), line + len(starts)
        self._offsets = np.concatenate(ends)
        self._ids = SortedIds(np.concatenate(ids) if ids else np.empty(0, dtype="S1"))
        if self._ids.repeat is not None:
            first, second = sorted(self._ids.repeat)
            raise DataError(f"{path}:{second + 1}: expected each doc id once, got that of line {first + 1} again")
        self.fingerprint = stored_fingerprint(self, path, Path(f"{path}.ranker_fingerprint.json"))

    def _read(self, first: int, last: int) -> bytes:
        """Return the bytes of the lines `first` to `last` - 1."""
        if self._process_id != os.getpid():
            self._file, self._process_id = os.open(self.path, os.O_RDONLY), os.getpid()
        start, stop = int(self._offsets[first]), int(self._offsets[last])
        parts = b""
        while len(parts) < stop - start:  # a call may return fewer bytes
            part = os.pread(self._file, stop - start - len(parts), start + len(parts))
            if not part:
                break  # the last line has no line feed
            parts += part
        return parts

    def _doc(self, line: bytes) -> Doc:
        try:
            doc_id, _, text = line.decode().partition("\t")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path}: expected UTF-8, got byte {line[error.start]:#04x} in {line[:40]!r}; convert the file"
            ) from None
        return Doc(doc_id, text)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __iter__(self) -> Iterator[Doc]:
        row = 0
        while row < len(self):
            after = int(np.searchsorted(self._offsets, self._offsets[row] + _READ))
            after = max(row + 1, min(after, len(self)))
            yield from map(self._doc, self._read(row, after).removesuffix(b"\n").split(b"\n"))
            row = after

    def __getitem__(self, doc_id: str) -> Doc:
        row = self._ids.row(doc_id)
        if row < 0:
            raise KeyError(doc_id)
        return self._doc(self._read(row, row + 1).removesuffix(b"\n"))

    def __contains__(self, doc_id: object) -> bool:
        return self._ids.row(doc_id) >= 0

    def known(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids, UTF-8 in a bytes array [ids], belong to docs, bool [ids]."""
        return self._ids.known(ids)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_process_id": -1, "_file": -1}
