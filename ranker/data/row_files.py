"""Read rows of parquet, Arrow, JSON lines, CSV and TSV files, 2,048 at a time; errors name file and row."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ranker.data.corpus_files import read_lines
from ranker.data.parsing import parse_json, shown
from ranker.data.row_paths import EXTRA, kind_of
from ranker.errors import DataError

CHUNK = 2048  # rows that are read at a time
MAX_FIELD = 2**31 - 1  # characters of a CSV field; the module's default is 131,072


@dataclass(frozen=True)
class Rows:
    """Some consecutive rows of a file.

    Args:
        path: The file.
        numbers: Number of each row, from 1; in a text file, number of its line.
        columns: Name -> values. The values of a text file are strings, or None if a JSON object lacks the key.
        text: Whether the file is a text file.
    """

    path: Path
    numbers: list[int]
    columns: dict[str, list[Any]]
    text: bool

    def where(self, row: int, column: str) -> str:
        """Return the start of a message, which names file, row and column."""
        place = f"{self.path}:{self.numbers[row]}" if self.text else f"{self.path}: row {self.numbers[row]}"
        return f"{place}: column {column!r}"


def read_columns(path: Path) -> list[str]:
    """Return the names of a file's columns; for JSON lines, these are the keys of the first object.

    Raises:
        DataError: The file is empty or unreadable.
    """
    kind = kind_of(path)
    if kind == "parquet":
        with _arrow_errors(path) as pa:
            return list(pa.parquet.read_schema(path).names)
    if kind == "arrow":
        with _arrow_errors(path) as pa, pa.memory_map(str(path)) as source:
            return list(_arrow_reader(pa, source).schema.names)
    records = _lines(path) if kind == "jsonl" else _table_records(path)
    first = next(records, None)
    if first is None:
        raise DataError(f"{path}: expected rows, got an empty file; remove it")
    number, part = first
    return list(_json_record(part, f"{path}:{number}") if isinstance(part, str) else part)


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a file that are not parsed yet. `rows` parses them; another process may call it.

    Args:
        path: The file.
        numbers: Number of each row, from 1; in a text file, number of its line.
        columns: The columns to read.
        content: A record batch of Arrow; for a text file, each row's line, or its fields by name.
    """

    path: Path
    numbers: list[int]
    columns: list[str]
    content: Any

    def rows(self) -> Rows:
        """Return the rows.

        Raises:
            DataError: A line of a text file is not a row.
        """
        if not isinstance(self.content, list):
            with _arrow_errors(self.path):
                values = {name: self.content.column(name).to_pylist() for name in self.columns}
            return Rows(self.path, self.numbers, values, text=False)
        records = [
            _json_record(part, f"{self.path}:{number}") if isinstance(part, str) else part
            for number, part in zip(self.numbers, self.content, strict=True)
        ]
        values = {name: [record.get(name) for record in records] for name in self.columns}
        return Rows(self.path, self.numbers, values, text=True)


def read_chunks(path: Path, columns: list[str]) -> Iterator[Chunk]:
    """Yield the rows of a file, `CHUNK` at a time, with these columns only.

    Memory does not grow with the file: pages of a parquet row group are read one by one, and Arrow files are mapped.

    Raises:
        DataError: The file is unreadable, or a line of a CSV or TSV file is not a row.
    """
    if kind_of(path) not in ("parquet", "arrow"):
        yield from _text_chunks(path, columns)
        return
    number = 1
    with _arrow_errors(path) as pa:
        for batch in _arrow_batches(pa, path, columns):
            for start in range(0, batch.num_rows, CHUNK):
                part = batch.slice(start, CHUNK)
                yield Chunk(path, list(range(number, number + part.num_rows)), columns, part)
                number += part.num_rows


def read_rows(path: Path, columns: list[str]) -> Iterator[Rows]:
    """Yield the parsed rows of a file, `CHUNK` at a time, with these columns only.

    Raises:
        DataError: The file is unreadable, or a line of a text file is not a row.
    """
    return (chunk.rows() for chunk in read_chunks(path, columns))


# Arrow and parquet
# ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def _arrow_errors(path: Path) -> Iterator[Any]:
    """Import pyarrow for a block; an error of pyarrow becomes a DataError that names the file."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: expected the package pyarrow to read this file, got none; run {EXTRA}") from None
    try:
        yield pyarrow
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        kind = kind_of(path)
        raise DataError(f"{path}: expected a whole {kind} file, got {shown(str(error))}; write it again") from error


def _arrow_batches(pa: Any, path: Path, columns: list[str]) -> Iterator[Any]:
    if kind_of(path) == "parquet":
        with pa.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            yield from file.iter_batches(batch_size=CHUNK, columns=columns)
        return
    with pa.memory_map(str(path)) as source:
        reader = _arrow_reader(pa, source)
        is_file = isinstance(reader, pa.ipc.RecordBatchFileReader)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader


def _arrow_reader(pa: Any, source: Any) -> Any:
    try:
        return pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_stream(source)  # the format that `datasets` writes


# text files
# ----------------------------------------------------------------------------------------------------------------------


def _text_chunks(path: Path, columns: list[str]) -> Iterator[Chunk]:
    records = _lines(path) if kind_of(path) == "jsonl" else _table_records(path)
    while part := list(islice(records, CHUNK)):
        yield Chunk(path, [number for number, _ in part], columns, [content for _, content in part])


def _lines(path: Path) -> Iterator[tuple[int, str | dict[str, Any]]]:
    yield from read_lines(path)


def _json_record(line: str, where: str) -> dict[str, Any]:
    record = parse_json(line, where)
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, got {shown(line.strip())}; correct the line")
    return record


def _table_records(path: Path) -> Iterator[tuple[int, str | dict[str, Any]]]:
    """Yield (line, row) of a file with a header. Fields of CSV may be quoted; in TSV, quotes are part of the text."""
    lines = _tsv_fields(path) if ".tsv" in path.suffixes else _csv_fields(path)
    header: list[str] | None = None
    for number, fields in lines:
        if header is None:
            header = fields
            if len(set(header)) < len(header):
                raise DataError(f"{path}:{number}: expected a header of different names, got {header}; rename one")
            continue
        if len(fields) != len(header):
            raise DataError(
                f"{path}:{number}: expected {len(header)} fields, as the header has, got {len(fields)}; "
                "correct the line"
            )
        yield number, dict(zip(header, fields, strict=True))


def _tsv_fields(path: Path) -> Iterator[tuple[int, list[str]]]:
    return ((number, line.split("\t")) for number, line in read_lines(path))


def _csv_fields(path: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(MAX_FIELD)
    opener: Any = gzip.open if path.suffix == ".gz" else io.open
    line = 1
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            for fields in reader:
                if fields:
                    yield line, fields
                line = reader.line_num + 1
    except (OSError, EOFError, ValueError, csv.Error) as error:
        raise DataError(f"{path}:{line}: expected a row of CSV in UTF-8, got {error}; correct the line") from None
