"""The lines and columns of TREC files, plain or gzipped. Errors name file and line."""

from __future__ import annotations

import gzip
import io
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from ranker.data.parsing import MAX_ID_BYTES, check_id, read_score, shown
from ranker.errors import DataError

QRELS_COLUMNS = "query_id iteration doc_id relevance"
RUN_COLUMNS = "query_id Q0 doc_id rank score tag"


def trec_rows(path: Path, layout: str) -> Iterator[tuple[int, list[bytes]]]:
    """Yield line numbers and columns.

    As in trec_eval, lines are split at ASCII white space only, because ids may contain U+00A0 or U+2028.

    Args:
        path: The file.
        layout: Names of the columns, `QRELS_COLUMNS` or `RUN_COLUMNS`.

    Raises:
        DataError: The file is missing, empty or unreadable, or a line has another number of columns.
    """
    num_columns = len(layout.split())
    doc_column = layout.split().index("doc_id")
    line = 0
    for line, text in _lines(path):
        columns = text.split()
        if len(columns) != num_columns:
            raise DataError(
                f"{path}:{line}: expected {num_columns} columns ({layout}), got {len(columns)}: {shown(text.strip())}"
            )
        if len(text) > MAX_ID_BYTES or b"\0" in text:
            for column in (columns[0], columns[doc_column]):
                check_id(text_of(path, line, column), f"{path}:{line}")
        yield line, columns
    if line == 0:
        raise DataError(
            f"{path}: expected lines of {num_columns} columns ({layout}), got an empty file; write it again"
        )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield numbered lines that are not blank. Only a line feed ends a line; a leading byte order mark is dropped."""
    line = 0
    try:
        with path.open("rb") as raw:
            file = cast(IO[bytes], raw)
            if raw.peek(2)[:2] == b"\x1f\x8b":  # by content: browsers may unpack a download but keep its name
                file = io.BufferedReader(gzip.GzipFile(fileobj=raw))  # type: ignore[arg-type]
            for line, text in enumerate(file, 1):
                if line == 1:
                    text = text.removeprefix(b"\xef\xbb\xbf")
                    if text.startswith((b"\xff\xfe", b"\xfe\xff")):
                        raise DataError(f"{path}: expected UTF-8 text, got UTF-16; save it as UTF-8")
                if text.strip():
                    yield line, text
    except FileNotFoundError:
        raise DataError(f"{path}: expected a file, got nothing at this path; check the path") from None
    except IsADirectoryError:
        raise DataError(f"{path}: expected a file, got a folder; name the file in it") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: expected a whole gzip file, got one that breaks after line {line} ({error}); copy it again"
        ) from None
    except OSError as error:
        raise DataError(
            f"{path}: expected a file that can be read, got {error.strerror!r}; check its permissions"
        ) from None


def text_of(path: Path, line: int, column: bytes) -> str:
    """Return a column as text.

    Raises:
        DataError: The column is not UTF-8.
    """
    try:
        return column.decode()
    except UnicodeDecodeError:
        raise DataError(f"{path}:{line}: expected UTF-8 text, got {column[:60]!r}; save the file as UTF-8") from None


def score_of(path: Path, line: int, column: bytes, single: bool) -> float:
    """Return a column as a score.

    Args:
        path: The file.
        line: Number of the line.
        column: The column.
        single: Whether the score must also be finite in single precision.

    Raises:
        DataError: The column is not a finite number.
    """
    try:
        score = float(column)
    except ValueError:
        score = math.nan
    return score if abs(score) < 3e38 and b"_" not in column else read_score(column, f"{path}:{line}", single)


def line_with(path: Path, word: str) -> str:
    """Return `FILE:LINE` of the first line of qrels or a run whose query or doc is `word`; `FILE` if there is none."""
    columns = {len(QRELS_COLUMNS.split()), len(RUN_COLUMNS.split())}
    for line, text in _lines(path):
        parts = text.split()
        if len(parts) in columns and word.encode() in (parts[0], parts[2]):
            return f"{path}:{line}"
    return str(path)
