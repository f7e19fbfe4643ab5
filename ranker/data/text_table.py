"""Tables of different texts in memory-mapped files. A text is found by its hash or by a given id."""

from __future__ import annotations

import hashlib
from collections.abc import ItemsView, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from ranker.data.collection import Doc, add_to_digest
from ranker.data.token_writer import map_array
from ranker.errors import DataError
from ranker.hashing import digest

KEY = np.dtype([("high", "<u8"), ("low", "<u4")])  # 96 bits of BLAKE2b; `low` is compared after a search by `high`
_SPLIT = np.dtype([("high", ">u8"), ("low", ">u4")])
_CHUNK = 4096


def key_of(words: list[str]) -> np.ndarray:
    """Return the keys of texts or ids, `KEY` [words]; equal texts have equal keys."""
    digests = b"".join(hashlib.blake2b(word.encode(), digest_size=12).digest() for word in words)
    return np.frombuffer(digests, dtype=_SPLIT).astype(KEY)


class KeyNumbers:
    """Numbers keys from 0 in the order of their first appearance; each key takes 16 bytes of memory.

    Keys are in sorted runs. Two runs are merged if the older run is less than twice as long as the newer run, so each
    key is merged a logarithmic number of times.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # arrays of a run: sorted high, low, number
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the numbers of keys, int64 [keys]; -1 for a key without a number."""
        numbers = np.full(len(keys), -1, dtype=np.int64)
        for high, low, known in self._runs:
            places = np.minimum(np.searchsorted(high, keys["high"]), len(high) - 1)
            hits = high[places] == keys["high"]
            if np.any(hits & (low[places] != keys["low"])):
                raise DataError("rows: expected texts of different hashes, got two that share 64 bits; change one")
            numbers[hits] = known[places[hits]]
        return numbers

    def add(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Number keys.

        Returns:
            Number of each key, int64 [keys]; and the index at which each new key first appears, int64 [new].
        """
        numbers = self.find(keys)
        unknown = np.flatnonzero(numbers < 0)
        if not len(unknown):
            return numbers, unknown
        fresh = keys[unknown]
        high, first, inverse = np.unique(fresh["high"], return_index=True, return_inverse=True)
        if np.any(fresh["low"][first][inverse] != fresh["low"]):
            raise DataError("rows: expected texts of different hashes, got two that share 64 bits; change one")
        new_numbers = np.empty(len(first), dtype=np.int32)  # numbered in the order of first appearance
        new_numbers[np.argsort(first)] = self._count + np.arange(len(first), dtype=np.int32)
        numbers[unknown] = new_numbers[inverse]
        self._count += len(first)
        self._runs.append((high, fresh["low"][first].copy(), new_numbers))
        while len(self._runs) > 1 and len(self._runs[-2][0]) < 2 * len(self._runs[-1][0]):
            self._merge()
        return numbers, unknown[np.sort(first)]

    def sorted_numbers(self) -> np.ndarray:
        """Return all numbers in the order of their keys, int32 [keys]."""
        while len(self._runs) > 1:
            self._merge()
        return self._runs[0][2] if self._runs else np.empty(0, dtype=np.int32)

    def _merge(self) -> None:
        older, newer = self._runs[-2:]
        del self._runs[-2:]
        high = np.concatenate([older[0], newer[0]])
        order = np.argsort(high, kind="stable")  # a stable sort merges two sorted runs in linear time
        low, number = (np.concatenate([older[i], newer[i]])[order] for i in (1, 2))
        self._runs.append((high[order], low, number))


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


class TableDocs:
    """All texts of a table as docs (`ranker.data.collection.Docs`)."""

    def __init__(self, table: TextTable) -> None:
        self._table = table
        self.fingerprint = table.fingerprint

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[Doc]:
        return (Doc(doc_id, text) for doc_id, text in self._table.items())

    def __getitem__(self, doc_id: str) -> Doc:
        number = self._table.find(doc_id)
        if number < 0:
            raise KeyError(doc_id)
        return Doc(doc_id, self._table.text(number))

    def __contains__(self, doc_id: object) -> bool:
        return self._table.find(doc_id) >= 0


class TableQueries(Mapping[str, str]):
    """A mapping query_id -> text of some texts of a table, in the order of their numbers.

    Args:
        table: The table.
        members: Numbers of the queries, ascending, int64 [queries]; None: all.
    """

    def __init__(self, table: TextTable, members: np.ndarray | None = None) -> None:
        self.table, self._members = table, members
        self.fingerprint = table.fingerprint if members is None else f"{table.fingerprint} {digest(members)}"

    def __len__(self) -> int:
        return len(self.table) if self._members is None else len(self._members)

    def __iter__(self) -> Iterator[str]:
        numbers = range(len(self.table)) if self._members is None else self._members.tolist()
        return (self.table.id(number) for number in numbers)

    def __getitem__(self, query_id: str) -> str:
        number = self.table.find(query_id)
        if self.index(number) < 0:
            raise KeyError(query_id)
        return self.table.text(number)

    def __contains__(self, query_id: object) -> bool:
        return self.index(self.table.find(query_id)) >= 0

    def items(self) -> ItemsView[str, str]:
        """Return a view of (query_id, text), whose iteration reads the table from front to back."""
        return _Items(self)

    def index(self, number: int) -> int:
        """Return the position of a number among these queries; -1 if no query has this number."""
        if self._members is None or number < 0:
            return number
        place = int(np.searchsorted(self._members, number))
        return place if place < len(self._members) and self._members[place] == number else -1

    def hashes(self) -> np.ndarray:
        """Return a hash of each query's id, uint64 [queries]."""
        return self.table.hashes() if self._members is None else self.table.hashes()[self._members]

    def in_order(self) -> Iterator[tuple[str, str]]:
        """Yield (query_id, text)."""
        return self.table.items(self._members)


class _Items(ItemsView[str, str]):
    _mapping: TableQueries

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return self._mapping.in_order()
