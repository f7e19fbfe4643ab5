"""Tables of different texts in memory-mapped files. A text is found by its hash or by a given id."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from ranker.data.collection import Doc, add_to_digest
from ranker.data.text_keys import KEY, KeyNumbers, key_of
from ranker.data.token_writer import map_array

_CHUNK = 4096


class TextWriter:
    """Writes the files of a `TextTable`. Texts are written to the disk at once; only their keys stay in memory.

    Args:
        folder: Folder of the files.
        name: First part of the files' names.
        given_ids: Whether the caller gives ids. Otherwise the id of a text is its key, 24 hexadecimal digits.
    """

    def __init__(self, folder: Path, name: str, given_ids: bool = False) -> None:
        self.numbers = KeyNumbers()
        self.given_ids = given_ids
        self._digest = hashlib.blake2b(digest_size=16)
        names = ("texts", "ends", "keys", *(("ids", "id_ends") if given_ids else ()))
        self._order_path = folder / f"{name}.order"
        self._files: dict[str, IO[bytes]] = {part: (folder / f"{name}.{part}").open("wb") for part in names}
        self._ends = {"texts": 0, "ids": 0}

    def add(self, texts: list[str], keys: np.ndarray | None = None) -> np.ndarray:
        """Add texts and return their numbers, int64 [texts]; equal texts have the same number.

        Args:
            texts: The texts.
            keys: The keys of the texts, if another process has computed the keys.
        """
        keys = key_of(texts) if keys is None else keys
        numbers, new = self.numbers.add(keys)
        if len(new):
            chosen = [texts[i] for i in new]
            self._write(chosen, keys[new], [f"{high:016x}{low:08x}" for high, low in keys[new].tolist()])
        return numbers

    def add_given(self, ids: list[str], texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Add texts with their ids; if an id is repeated, its first text is stored.

        Returns:
            The numbers, int64 [texts]; and the indices of the new ids, int64 [new].
        """
        keys = key_of(ids)
        numbers, new = self.numbers.add(keys)
        chosen = [ids[i] for i in new]
        self._write([texts[i] for i in new], keys[new], chosen)
        self._append("ids", "id_ends", chosen)
        return numbers, new

    def _write(self, texts: list[str], keys: np.ndarray, ids: list[str]) -> None:
        for text_id, text in zip(ids, texts, strict=True):
            add_to_digest(self._digest, Doc(text_id, text))
        self._append("texts", "ends", texts)
        self._files["keys"].write(keys.tobytes())

    def _append(self, name: str, ends_name: str, words: list[str]) -> None:
        encoded = [word.encode() for word in words]
        ends = self._ends[name] + np.cumsum([len(word) for word in encoded], dtype=np.int64)
        self._files[name].write(b"".join(encoded))
        self._files[ends_name].write(ends.astype("<i8").tobytes())
        if len(ends):
            self._ends[name] = int(ends[-1])

    def close(self) -> str:
        """Finish the files, and return the fingerprint of ids and texts."""
        for file in self._files.values():
            file.close()
        self.numbers.sorted_numbers().astype("<i4").tofile(self._order_path)
        return self._digest.hexdigest()


class TextTable:
    """The texts of a finished table, numbered from 0, with their ids. The files are mapped and read on access.

    Args:
        folder: Folder of the files.
        name: First part of the files' names.
        fingerprint: Hash of ids and texts, which `TextWriter.close` returned.
    """

    def __init__(self, folder: Path, name: str, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._texts = map_array(folder / f"{name}.texts", "u1").data
        self._ends = map_array(folder / f"{name}.ends", "<i8")
        self._keys: Any = map_array(folder / f"{name}.keys", "u1").view(KEY)
        self._order = map_array(folder / f"{name}.order", "<i4")
        self._ids: memoryview | None = None
        if (folder / f"{name}.ids").is_file():
            self._ids = map_array(folder / f"{name}.ids", "u1").data
            self._id_ends = map_array(folder / f"{name}.id_ends", "<i8")

    def __len__(self) -> int:
        return len(self._ends)

    def text(self, number: int) -> str:
        """Return a text."""
        return _cut(self._texts, self._ends, number)

    def id(self, number: int) -> str:
        """Return a text's id."""
        if self._ids is not None:
            return _cut(self._ids, self._id_ends, number)
        high, low = self._keys[number].tolist()
        return f"{high:016x}{low:08x}"

    def items(self, numbers: np.ndarray | None = None) -> Iterator[tuple[str, str]]:
        """Yield (id, text) of some numbers, or of all, in order."""
        for start in range(0, len(self) if numbers is None else len(numbers), _CHUNK):
            part = range(start, min(start + _CHUNK, len(self)))
            for number in part if numbers is None else numbers[start : start + _CHUNK].tolist():
                yield self.id(number), self.text(number)

    def hashes(self) -> np.ndarray:
        """Return the first 64 bits of each key, uint64 [texts]."""
        return self._keys["high"]

    def find(self, text_id: object) -> int:
        """Return the number of an id; -1 if the table does not have it."""
        if not isinstance(text_id, str):
            return -1
        try:
            if self._ids is not None:
                high, low = key_of([text_id])[0].tolist()
            else:
                high, low = int(text_id[:16], 16), int(text_id[16:], 16)
        except ValueError:  # not hexadecimal, or with characters that UTF-8 does not have
            return -1
        start, stop = 0, len(self)
        while start < stop:
            middle = (start + stop) // 2
            if int(self._keys[self._order[middle]]["high"]) < high:
                start = middle + 1
            else:
                stop = middle
        if start == len(self):
            return -1
        number = int(self._order[start])
        return number if self._keys[number].tolist() == (high, low) and self.id(number) == text_id else -1


def _cut(data: memoryview, ends: np.ndarray, number: int) -> str:
    return str(data[int(ends[number - 1]) if number else 0 : int(ends[number])], "utf-8")
