"""Read files of rows into tables of docs, tables of queries and arrays of pairs, in bounded memory."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from ranker.data.row_files import Chunk, Rows, read_chunks, read_columns, read_rows
from ranker.data.row_pairs import NO_GRADE, PAIR, PairWriter, Relevant
from ranker.data.row_shapes import Columns, Examples, Shape, recognise
from ranker.data.row_values import read_id
from ranker.data.row_workers import in_order
from ranker.data.text_keys import key_of
from ranker.data.text_table import TextTable, TextWriter
from ranker.errors import DataError

log = logging.getLogger(__name__)

FORMAT = 1  # increase this number when the files change: folders with another format are not read
LOG_SECONDS = 30
TABLE_IDS = ("id", "_id", "query_id", "qid", "doc_id", "docid", "document_id", "passage_id", "pid")
TABLE_TEXTS = ("text", "contents", "content", "body", "query", "document", "passage")


@dataclass(frozen=True)
class RowSources:
    """The files from which tables are built.

    Args:
        sets: Name of each set -> its files.
        docs: Files of docs with ids, for rows of ids; None: rows have texts.
        queries: Files of queries with ids, for rows of ids; None: rows have texts.
        columns: Role -> column; None: the columns' names decide.
        workers: Number of processes that parse rows; None: the number of cores decides, and for few rows no process is
            started.
    """

    sets: dict[str, list[Path]]
    docs: list[Path] | None = None
    queries: list[Path] | None = None
    columns: Columns | None = None
    workers: int | None = None

    def files(self) -> list[Path]:
        """Return all files."""
        return [*(self.docs or []), *(self.queries or []), *(path for paths in self.sets.values() for path in paths)]


def build_rows(sources: RowSources, folder: Path, relevant: Relevant) -> None:
    """Write the tables and arrays of all sets, and `meta.json`.

    Texts are written to the disk at once. Memory holds 16 bytes for each different text, a few million pairs during
    sorting, and a few chunks of rows. Several processes parse the chunks. The numbers of texts and queries depend only
    on the order of the rows, not on the processes.

    Args:
        sources: The files.
        folder: An empty folder.
        relevant: Decides which docs are relevant.

    Raises:
        DataError: A file is unreadable, a row is faulty, or a file has another shape than the first of its set.
    """
    docs = _read_table(sources.docs, folder, "docs") if sources.docs else TextWriter(folder, "docs")
    known_queries = None
    if sources.queries:
        writer = _read_table(sources.queries, folder, "known")
        known_queries = (writer, TextTable(folder, "known", writer.close()))
    meta = {
        name: _build_set(name, paths, folder, sources, docs, known_queries, relevant)
        for name, paths in sources.sets.items()
    }
    for path in folder.glob("known.*"):
        path.unlink()
    content = {"format": FORMAT, "docs": docs.close(), "sets": meta}
    (folder / "meta.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def _build_set(
    name: str,
    paths: list[Path],
    folder: Path,
    sources: RowSources,
    docs: TextWriter,
    known: tuple[TextWriter, TextTable] | None,
    relevant: Relevant,
) -> dict[str, object]:
    shape = _shape_of(paths, sources)
    log.info("%s: rows of the shape %s; files: %d", name, shape, len(paths))
    queries = TextWriter(folder, f"{name}.queries", given_ids=known is not None)
    pairs = PairWriter(folder, name)
    num_rows, started, logged = 0, time.monotonic(), time.monotonic()
    chunks = (chunk for path in paths for chunk in read_chunks(path, shape.needed))
    for parsed in in_order(partial(_parse, shape), chunks, sources.workers):
        pairs.add(_pairs(parsed, shape, docs, queries, known))
        num_rows += len(parsed.rows.numbers)
        if time.monotonic() - logged > LOG_SECONDS:
            logged = time.monotonic()
            log.info("%s: %d rows, %.0f rows/s", name, num_rows, num_rows / (logged - started))
    if not num_rows:
        raise DataError(f"{paths[0]}: expected rows, got none in {len(paths)} files; name other files for {name}")
    counts = pairs.close(len(queries.numbers), relevant)
    log.info(
        "%s: %d rows, %d queries, %d pairs in %.1f s",
        name,
        num_rows,
        len(queries.numbers),
        counts["pairs"],
        time.monotonic() - started,
    )
    if counts["repeated"]:
        log.info(
            "%s: %d pairs are repeated, and keep their highest grade and score; %d of them had two grades: the doc is "
            "relevant in one row and a negative in another",
            name,
            counts["repeated"],
            counts["contradictory"],
        )
    return {"queries": queries.close(), "judged": shape.judged, "scored": shape.scored, "rows": num_rows, **counts}


def _shape_of(paths: list[Path], sources: RowSources) -> Shape:
    shapes = [recognise(read_columns(path), path, sources.columns) for path in paths]
    for path, shape in zip(paths, shapes, strict=True):
        if shape != shapes[0]:
            raise DataError(
                f"{path}: expected rows of the shape {shapes[0]}, as in {paths[0].name}, got {shape}; "
                "name the files of one shape, or the columns with data.columns"
            )
        if (shape.name == "ids") != (sources.docs is not None and sources.queries is not None):
            wanted = "data.docs and data.queries, the files with their texts" if shape.name == "ids" else "rows of ids"
            raise DataError(f"{path}: expected {wanted}, got rows of the shape {shape}; set or leave out both keys")
    return shapes[0]


@dataclass(frozen=True)
class _Parsed:
    """The result of a worker process: rows and their examples."""

    rows: Rows  # the rows without values, for messages
    examples: Examples
    query_keys: np.ndarray
    doc_keys: np.ndarray


def _parse(shape: Shape, chunk: Chunk) -> _Parsed:
    rows = chunk.rows()
    examples = shape.read(rows)
    return _Parsed(replace(rows, columns={}), examples, key_of(examples.queries), key_of(examples.docs))


def _pairs(
    parsed: _Parsed, shape: Shape, docs: TextWriter, queries: TextWriter, known: tuple[TextWriter, TextTable] | None
) -> np.ndarray:
    """Add the texts of some rows to the tables; return the pairs of the rows, `PAIR` [pairs]."""
    rows, examples = parsed.rows, parsed.examples
    counts = np.array(examples.counts)
    if known is None:
        query_numbers = queries.add(examples.queries, parsed.query_keys)
        doc_numbers = docs.add(examples.docs, parsed.doc_keys)
    else:
        query_numbers = _known_queries(parsed, shape, queries, known)
        doc_numbers = docs.numbers.find(parsed.doc_keys)
        _refuse_unknown(doc_numbers, rows, shape, examples.docs, "doc_ids", np.repeat(np.arange(len(counts)), counts))
    pairs = np.empty(len(doc_numbers), dtype=PAIR)
    pairs["query"], pairs["doc"] = np.repeat(query_numbers, counts), doc_numbers
    pairs["grade"] = examples.grades or NO_GRADE
    pairs["score"] = examples.scores or np.nan
    return pairs


def _known_queries(
    parsed: _Parsed, shape: Shape, queries: TextWriter, known: tuple[TextWriter, TextTable]
) -> np.ndarray:
    writer, table = known
    ids = parsed.examples.queries
    numbers = writer.numbers.find(parsed.query_keys)
    _refuse_unknown(numbers, parsed.rows, shape, ids, "query_id", np.arange(len(numbers)))
    return queries.add_given(ids, [table.text(number) for number in numbers.tolist()])[0]


def _refuse_unknown(
    numbers: np.ndarray, rows: Rows, shape: Shape, ids: list[str], role: str, row_of: np.ndarray
) -> None:
    unknown = np.flatnonzero(numbers < 0)
    if len(unknown):
        where = rows.where(int(row_of[unknown[0]]), shape.columns[role][0])
        key = "data.queries" if role == "query_id" else "data.docs"
        raise DataError(
            f"{where}: expected ids of {key}, got the unknown id {ids[unknown[0]]!r}; add its text, or use the "
            "files that belong together"
        )


def _read_table(paths: list[Path], folder: Path, name: str) -> TextWriter:
    """Read files with the columns id, text and optionally title into a table with these ids."""
    writer = TextWriter(folder, name, given_ids=True)
    for path in paths:
        columns = read_columns(path)
        id_column = next((column for column in TABLE_IDS if column in columns), None)
        text_column = next((column for column in TABLE_TEXTS if column in columns), None)
        if id_column is None or text_column is None:
            raise DataError(
                f"{path}: expected columns of ids and texts, such as id and text, got {', '.join(columns)}; rename them"
            )
        has_title = "title" in columns
        for rows in read_rows(path, [id_column, text_column, *(["title"] if has_title else [])]):
            ids = [
                read_id(value, partial(rows.where, row, id_column)) for row, value in enumerate(rows.columns[id_column])
            ]
            texts = [_table_text(rows, row, text_column, has_title) for row in range(len(ids))]
            new = writer.add_given(ids, texts)[1]
            if len(new) < len(ids):
                row = next(i for i in range(len(ids)) if i not in set(new.tolist()))
                raise DataError(
                    f"{rows.where(row, id_column)}: expected each id once, got {ids[row]!r} again; remove one"
                )
    return writer


def _table_text(rows: Rows, row: int, column: str, has_title: bool) -> str:
    title = rows.columns["title"][row] if has_title else None
    for name, value in ((column, rows.columns[column][row]), *((("title", title),) if title is not None else ())):
        if not isinstance(value, str):
            raise DataError(f"{rows.where(row, name)}: expected a text, got {value!r}; fill it in or remove the row")
    return f"{title} {rows.columns[column][row]}" if title else str(rows.columns[column][row])
