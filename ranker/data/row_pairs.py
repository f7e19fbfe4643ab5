"""Store pairs of query and doc, with grades and a teacher's scores, grouped by query in memory-mapped files."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ranker.data.collection import Candidates
from ranker.data.ragged import ranges, row_offsets
from ranker.data.table_views import TableQueries
from ranker.data.text_table import TextTable
from ranker.data.token_writer import map_array

log = logging.getLogger(__name__)

PAIR = np.dtype([("query", "<i4"), ("doc", "<i4"), ("grade", "<i2"), ("score", "<f4")])
NO_GRADE = -32768
_PART = 4_000_000  # pairs that are sorted at a time


@dataclass(frozen=True)
class Relevant:
    """The rule that decides which docs are relevant.

    Args:
        grade: Smallest relevant grade.
        score: Smallest relevant score, for sets that have scores only; None: the best doc of each query is relevant.
    """

    grade: int = 1
    score: float | None = None


class PairWriter:
    """Collects pairs in any order, then groups them by query; memory does not grow with the number of pairs.

    Args:
        folder: Folder of the files.
        name: First part of the files' names.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._path = folder / f"{name}.unsorted"
        self._file = self._path.open("wb")
        self.num_pairs = 0

    def add(self, pairs: np.ndarray) -> None:
        """Append pairs, `PAIR` [pairs]."""
        self._file.write(pairs.tobytes())
        self.num_pairs += len(pairs)

    def close(self, num_queries: int, relevant: Relevant) -> dict[str, int]:
        """Write the grouped files; return the number of pairs, of repeated pairs, and of pairs with two grades.

        A repeated pair keeps its highest grade and its highest score, in any order of the rows.
        """
        self._file.close()
        counts = {"pairs": 0, "repeated": 0, "contradictory": 0}
        bounds = np.linspace(0, num_queries, -(-self.num_pairs // _PART) + 1).astype(np.int64)
        parts = [self._path] if len(bounds) <= 2 else self._partition(bounds)
        names = ("docs", "grades", "scores", "sizes", "positives")
        files = {name: (self._folder / f"{self._name}.{name}").open("wb") for name in names}
        try:
            for path, first, stop in zip(parts, bounds[:-1], bounds[1:], strict=True):
                pairs, repeated, contradictory = _merged(np.fromfile(path, dtype=PAIR))
                path.unlink()
                pairs, is_positive = _ordered(pairs, relevant)
                files["docs"].write(pairs["doc"].astype("<i4").tobytes())
                files["grades"].write(pairs["grade"].astype("<i2").tobytes())
                files["scores"].write(pairs["score"].astype("<f4").tobytes())
                rows, width = pairs["query"] - first, int(stop - first)
                files["sizes"].write(np.bincount(rows, minlength=width).astype("<i4").tobytes())
                files["positives"].write(np.bincount(rows[is_positive], minlength=width).astype("<i4").tobytes())
                for key, number in zip(counts, (len(pairs), repeated, contradictory), strict=True):
                    counts[key] += number
        finally:
            for file in files.values():
                file.close()
            self._path.unlink(missing_ok=True)
        return counts

    def _partition(self, bounds: np.ndarray) -> list[Path]:
        """Split the file into one file for each range of queries."""
        paths = [self._folder / f"{self._name}.part{i}" for i in range(len(bounds) - 1)]
        files = [path.open("wb") for path in paths]
        with self._path.open("rb") as source:
            while len(pairs := np.fromfile(source, dtype=PAIR, count=_PART // 8)):
                part_of = np.searchsorted(bounds, pairs["query"], side="right") - 1
                for part in np.unique(part_of):
                    files[part].write(pairs[part_of == part].tobytes())
        for file in files:
            file.close()
        return paths


def _merged(pairs: np.ndarray) -> tuple[np.ndarray, int, int]:
    """Return each pair once, by query and doc, and the numbers of repeated pairs and of pairs with two grades."""
    pairs = pairs[np.lexsort((pairs["doc"], pairs["query"]))]
    changes = (np.diff(pairs["query"]) != 0) | (np.diff(pairs["doc"]) != 0)
    starts = np.flatnonzero(np.concatenate([[True], changes])) if len(pairs) else np.empty(0, dtype=np.int64)
    merged = pairs[starts]
    if len(starts) == len(pairs):
        return merged, 0, 0
    merged["grade"] = np.maximum.reduceat(pairs["grade"], starts)
    merged["score"] = np.fmax.reduceat(pairs["score"], starts)
    lowest = np.minimum.reduceat(pairs["grade"], starts)
    return merged, len(pairs) - len(starts), int((lowest != merged["grade"]).sum())


def _ordered(pairs: np.ndarray, relevant: Relevant) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of each query, relevant docs first, then by score; and return which docs are relevant."""
    scores = np.nan_to_num(pairs["score"], nan=-np.inf)
    if len(pairs) and pairs["grade"][0] == NO_GRADE:  # pairs with scores only: the scores decide relevance
        starts = np.flatnonzero(np.diff(pairs["query"], prepend=-1))
        least: Any = relevant.score
        if least is None:
            best = np.maximum.reduceat(scores, starts)
            least = np.repeat(best, np.diff(starts, append=len(pairs)))
        is_positive = scores >= least
        pairs["grade"] = np.where(is_positive, relevant.grade, 0)
    else:
        is_positive = pairs["grade"] >= relevant.grade
    order = np.lexsort((pairs["doc"], -scores, ~is_positive, pairs["query"]))
    return pairs[order], is_positive[order]


class RowSet:
    """The queries of one split with their docs, as arrays from which training groups are drawn.

    The docs of query i are `docs[starts[i]:starts[i] + sizes[i]]`, of which the first `positives[i]` are relevant.

    Attributes:
        queries: query_id -> text.
        docs: Numbers in the table of docs, int32 [pairs].
        grades: int16 [pairs].
        scores: A teacher's scores, float32 [pairs]; None: the rows have no scores.
        judged: Whether the rows have grades; otherwise the scores decide relevance.
        starts, sizes, positives: Integers [queries].

    Args:
        folder: Folder of the files.
        name: First part of the files' names.
        queries: Table of the split's queries.
        table: Table of all docs.
        meta: `scored` and `judged`: whether the rows have scores and grades.
        members: Numbers of the queries to use, ascending; None: all.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        queries: TextTable,
        table: TextTable,
        meta: Mapping[str, Any],
        members: np.ndarray | None = None,
    ) -> None:
        self.queries, self.table = TableQueries(queries, members), table
        self.docs = map_array(folder / f"{name}.docs", "<i4")
        self.grades = map_array(folder / f"{name}.grades", "<i2")
        self.scores = map_array(folder / f"{name}.scores", "<f4") if meta["scored"] else None
        self.judged = bool(meta["judged"])
        self.sizes: np.ndarray = map_array(folder / f"{name}.sizes", "<i4")
        self.positives: np.ndarray = map_array(folder / f"{name}.positives", "<i4")
        self.starts = row_offsets(self.sizes)[:-1]
        if members is not None:
            self.starts, self.sizes = self.starts[members], self.sizes[members]
            self.positives = self.positives[members]

    def __len__(self) -> int:
        return len(self.sizes)

    def judged_docs(self, row: int) -> dict[str, int]:
        """Return doc_id -> grade of a query's docs."""
        part = slice(int(self.starts[row]), int(self.starts[row] + self.sizes[row]))
        numbers, grades = self.docs[part].tolist(), self.grades[part].tolist()
        return {self.table.id(number): grade for number, grade in zip(numbers, grades, strict=True)}

    def candidates(self) -> Candidates:
        """Return each query's docs as candidates, all with score 0, so that ids decide their order."""
        ids = list(self.queries)
        numbers = self.docs[ranges(self.starts, np.asarray(self.sizes, dtype=np.int64))]
        known, place = np.unique(numbers, return_inverse=True)
        doc_ids = np.array([self.table.id(number).encode() for number in known.tolist()] or [b""], dtype=np.bytes_)
        by_id = np.argsort(np.argsort(doc_ids, kind="stable"), kind="stable")[place]
        query_of = np.repeat(np.arange(len(ids)), self.sizes)
        order = np.lexsort((-by_id, query_of))  # trec_eval's order of equal scores: doc id descending
        return Candidates(ids, row_offsets(self.sizes), doc_ids[place[order]], np.zeros(len(order)))


class RowQrels(Mapping[str, dict[str, int]]):
    """The judgements of a set of rows, query_id -> doc_id -> grade, read from its arrays."""

    def __init__(self, rows: RowSet) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows.queries)

    def __contains__(self, query_id: object) -> bool:
        return query_id in self._rows.queries

    def __getitem__(self, query_id: str) -> dict[str, int]:
        row = self._rows.queries.index(self._rows.queries.table.find(query_id))
        if row < 0:
            raise KeyError(query_id)
        return self._rows.judged_docs(row)
