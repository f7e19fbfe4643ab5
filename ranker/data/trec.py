"""Read and write TREC files: qrels, runs, candidates. Errors name file and line. No file is written partly."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ranker.data.collection import Candidates
from ranker.data.parsing import check_grade, check_id, read_grade, shown
from ranker.data.ragged import row_offsets
from ranker.data.ranking import rank_docs
from ranker.data.trec_lines import QRELS_COLUMNS, RUN_COLUMNS, score_of, text_of, trec_rows
from ranker.errors import DataError
from ranker.files.writing import write_whole

if TYPE_CHECKING:  # ranker.types imports torch, which reading a run does not need
    from ranker.types import Qrels, Run

log = logging.getLogger(__name__)

_CHUNK_DOCS = 65_536  # number of ids that are collected as Python objects, then packed into an array


# reading
# ----------------------------------------------------------------------------------------------------------------------


def read_qrels(path: str | Path) -> Qrels:
    r"""Read judgements of 4 columns, plain or gzipped. A repeated line is dropped with a warning.

    Raises:
        DataError: The file is missing, empty or malformed, or has two grades for one query and doc.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "qrels.txt")
    ...     _ = path.write_text("q1 0 d1 2\nq1 0 d2 0\n")
    ...     read_qrels(path)
    {'q1': {'d1': 2, 'd2': 0}}
    """
    path = Path(path)
    qrels: Qrels = {}
    repeats: list[int] = []
    for line, (query, _, doc, grade) in trec_rows(path, QRELS_COLUMNS):
        query_id, doc_id = text_of(path, line, query), text_of(path, line, doc)
        relevance = read_grade(grade, f"{path}:{line}")
        judged = qrels.setdefault(query_id, {})
        if doc_id not in judged:
            judged[doc_id] = relevance
        elif judged[doc_id] == relevance:
            repeats.append(line)
        else:
            raise DataError(
                f"{path}:{line}: expected one relevance for query {shown(query_id)} and doc {shown(doc_id)}, "
                f"got {relevance} after {judged[doc_id]} on an earlier line; remove the wrong one"
            )
    if repeats:
        log.warning("%s: %d repeated judgements dropped, the first on line %d", path, len(repeats), repeats[0])
    return qrels


def read_run(path: str | Path, single: bool = False) -> Run:
    """Read a run of 6 columns, plain or gzipped. Lines may be in any order; the rank column is not used.

    Args:
        path: The file.
        single: Whether scores must also be finite in single precision, as a teacher's scores must be.

    Raises:
        DataError: The file is missing, empty or malformed, a score is not a finite number, or a query has a doc twice.
    """
    run: Run = {}
    for query_id, doc_id, score in iter_run(path, single):
        run.setdefault(query_id, {})[doc_id] = score
    return run


def iter_run(path: str | Path, single: bool = False) -> Iterator[tuple[str, str, float]]:
    """Yield (query_id, doc_id, score) line by line, with the checks of `read_run`.

    If the lines of each query are consecutive, this takes 8 bytes of memory per line.
    """
    path = Path(path)
    seen = _SeenDocs()
    last, query_id = b"", ""
    for line, (query, _, doc, _, number, _) in trec_rows(path, RUN_COLUMNS):
        if query != last:  # most lines have the query of the previous line
            last, query_id = query, text_of(path, line, query)
        doc_id, score = text_of(path, line, doc), score_of(path, line, number, single)
        if not seen.is_new(query_id, doc_id):
            raise DataError(
                f"{path}:{line}: expected each doc once per query, got doc {shown(doc_id)} again for query "
                f"{shown(query_id)}; remove one"
            )
        yield query_id, doc_id, score


def read_candidates(path: str | Path) -> Candidates:
    """Read a run as candidates to re-rank, in trec_eval's order; 7 million lines take about 230 MB.

    Scores stay float64, because rounding could make two scores equal, and the tie rule would then change their order.

    If a query has a doc twice, the best score is kept, and a warning is logged.

    Raises:
        DataError: The file is missing, empty or malformed, or a score is not finite in single precision.
    """
    path = Path(path)
    query_ids, query_of_line, doc_ids, scores = _read_columns(path)
    if np.any(np.diff(query_of_line) < 0):  # the lines of a query are not consecutive
        order = np.argsort(query_of_line, kind="stable")
        query_of_line, doc_ids, scores = query_of_line[order], doc_ids[order], scores[order]
    starts = row_offsets(np.bincount(query_of_line, minlength=len(query_ids))).tolist()
    offsets, repeats, repeated_query = [0], 0, ""
    for query_id, (start, stop) in zip(query_ids, pairwise(starts), strict=True):
        order = start + _best_first(doc_ids[start:stop], scores[start:stop])
        end = offsets[-1] + len(order)
        doc_ids[offsets[-1] : end], scores[offsets[-1] : end] = doc_ids[order], scores[order]
        offsets.append(end)
        if len(order) < stop - start:
            repeats, repeated_query = repeats + stop - start - len(order), repeated_query or query_id
    if repeats:
        log.warning(
            "%s: %d repeated candidates dropped, as for query %r; each doc is kept with its best score",
            path,
            repeats,
            repeated_query,
        )
    return Candidates(query_ids, np.array(offsets, np.int64), doc_ids[: offsets[-1]], scores[: offsets[-1]])


def _read_columns(path: Path) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
    """Read the lines of a run into arrays.

    Returns:
        The query ids in the order of their first lines; the number of each line's query, integers [lines]; the doc ids,
        UTF-8 in a bytes array [lines]; the scores, float64 [lines].
    """
    numbers: dict[bytes, int] = {}
    query_of_line, scores = array("i"), array("d")
    packed: list[np.ndarray] = []
    pending: list[bytes] = []
    for line, (query, _, doc, _, score, _) in trec_rows(path, RUN_COLUMNS):
        if query not in numbers:
            text_of(path, line, query)
            numbers[query] = len(numbers)
        if not doc.isascii():
            text_of(path, line, doc)
        query_of_line.append(numbers[query])
        scores.append(score_of(path, line, score, single=True))
        pending.append(doc)
        if len(pending) == _CHUNK_DOCS:
            packed.append(np.array(pending, dtype=np.bytes_))
            pending.clear()
    packed.append(np.array(pending, dtype=np.bytes_))
    return (
        [query.decode() for query in numbers],
        np.frombuffer(query_of_line, np.intc),
        np.concatenate(packed),
        np.frombuffer(scores, np.float64),
    )


def _best_first(doc_ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return the indices of one query's different docs in trec_eval's order, int64 [docs]."""
    order = np.arange(len(scores)) if np.all(np.diff(scores) < 0) else np.lexsort((doc_ids, scores))[::-1]
    first = np.unique(doc_ids[order], return_index=True)[1]
    return order if len(first) == len(order) else order[np.sort(first)]


class _SeenDocs:
    """The docs so far in a run: a set for the current query, 8-byte hashes for earlier queries."""

    def __init__(self) -> None:
        self._query_id: str | None = None
        self._current: set[int] = set()
        self._finished: dict[str, array | set[int]] = {}

    def is_new(self, query_id: str, doc_id: str) -> bool:
        if query_id != self._query_id:
            if self._query_id is not None and self._query_id not in self._finished:
                self._finished[self._query_id] = array("q", self._current)
            before = self._finished.get(query_id)
            if before is None:
                self._current = set()
            else:  # the lines of this query are not consecutive, so it gets a set
                self._current = before if isinstance(before, set) else set(before)
                self._finished[query_id] = self._current
            self._query_id = query_id
        size = len(self._current)
        self._current.add(hash(doc_id))
        return len(self._current) > size


# writing
# ----------------------------------------------------------------------------------------------------------------------


def write_run(path: str | Path, run: Run, tag: str = "ranker") -> None:
    """Write a run, with ranks 1..n in trec_eval's order and all digits of scores; gzipped if the name ends in .gz.

    Raises:
        DataError: The run has no docs, an id or the tag is empty or has white space, or a score is not finite.
    """
    check_id(tag, "tag", "text")
    if not any(run.values()):
        raise DataError(f"{path}: expected a run with at least one doc, got none; check the candidates")
    with write_whole(path) as file:
        for query_id, docs in run.items():
            check_id(query_id, "query id", "text")
            for rank, doc_id in enumerate(rank_docs(docs), 1):
                check_id(doc_id, "doc id", "text")
                score = float(docs[doc_id])
                if not math.isfinite(score):
                    raise DataError(
                        f"run: expected a finite score for query {query_id!r} and doc {doc_id!r}, got {score}"
                    )
                file.write(f"{query_id} Q0 {doc_id} {rank} {score!r} {tag}\n")


def write_qrels(path: str | Path, qrels: Qrels) -> None:
    """Write judgements, gzipped if the name ends in .gz.

    Raises:
        DataError: An id is empty or has white space.
    """
    with write_whole(path) as file:
        for query_id, judged in qrels.items():
            check_id(query_id, "query id", "text")
            for doc_id, relevance in judged.items():
                check_id(doc_id, "doc id", "text")
                check_grade(relevance, f"qrels: query {shown(query_id)}, doc {shown(doc_id)}")
                file.write(f"{query_id} 0 {doc_id} {int(relevance)}\n")
