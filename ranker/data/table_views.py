"""Views of a `TextTable`: its texts as the docs or the queries of a collection."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping

import numpy as np

from ranker.data.collection import Doc
from ranker.data.text_table import TextTable
from ranker.hashing import digest


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
