"""Read docs and queries from plain or gzipped text files, in bounded memory; errors name file and line."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import mmap
import zlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ranker.data.collection import Doc, add_to_digest
from ranker.data.parsing import check_id, parse_json, shown
from ranker.data.separated import SortedIds
from ranker.errors import DataError

log = logging.getLogger(__name__)

_BOM = b"\xef\xbb\xbf"
_BIG_BYTES = 2**30
_BROKEN_GZIP = (OSError, EOFError, zlib.error)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    r"""Yield (line number, text) of a UTF-8 file, plain or gzipped; blank lines are skipped.

    Only LF or CRLF ends a line: U+0085, U+2028 and quotes are part of the text. A byte order mark is dropped.

    Raises:
        DataError: The file cannot be opened or unpacked, or a line is not UTF-8.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "queries.tsv"
    ...     _ = path.write_bytes("\ufeff7\tsay \"hi\r\n\r\n8\tone\u2028two".encode())
    ...     list(read_lines(path))
    [(1, '7\tsay "hi'), (3, '8\tone\u2028two')]
    """
    with opened(path) as stream:
        for number, raw in _numbered(stream, path):
            if raw.strip():
                yield number, _decode(raw.removesuffix(b"\n").removesuffix(b"\r"), path, number)


def read_queries(path: Path) -> dict[str, str]:
    r"""Read `id<TAB>text` lines; everything after the first tab is the text, unchanged.

    Raises:
        DataError: The file has no query, or a line has no tab or an empty text, or an id is empty, has white space or
            is repeated.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "queries.tsv"
    ...     _ = path.write_text("01\tnull\n1\tNA\n")
    ...     read_queries(path)
    {'01': 'null', '1': 'NA'}
    """
    queries: dict[str, str] = {}
    for number, line in read_lines(path):
        query_id, tab, text = line.partition("\t")
        where = f"{path}:{number}"
        if not tab:
            raise DataError(
                f"{where}: expected a query id, a tab and the query text, got {shown(line)}; put a tab after the id"
            )
        check_id(query_id, where)
        if not text.strip():
            raise DataError(
                f"{where}: expected a text for query {query_id!r}, got {shown(text)}; write one or remove the line"
            )
        if query_id in queries:
            raise DataError(f"{where}: expected each query id once, got {query_id!r} again; remove one of the lines")
        queries[query_id] = text
    if not queries:
        raise DataError(f"{path}: expected lines of query id, tab and text, got an empty file; write the queries there")
    return queries


class JsonlDocs:
    """Docs of a JSON Lines file (`{"id", "text", "title"?}`); a doc is parsed on access.

    A plain file is mapped into memory; a gzipped file is unpacked into memory. In addition each doc takes about 20
    bytes and the bytes of its id. Other keys are ignored. An id may be a whole number, which is converted to its digits
    without loss; any other type is an error.

    Args:
        path: The file.

    Raises:
        DataError: The file has no doc, or a line is no object with these keys; the message names file and line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data: bytes | mmap.mmap = self._read()
        starts, ends, ids = array("q"), array("q"), []
        digest = hashlib.blake2b(digest_size=16)
        position = 0
        for number, raw in _numbered(_lines_of(self._data), path):
            start = position + (len(_BOM) if position == 0 and self._data[: len(_BOM)] == _BOM else 0)
            position = start + len(raw)
            if raw.strip():
                doc = _parse_doc(_decode(raw, path, number), f"{path}:{number}")
                starts.append(start)
                ends.append(position)
                ids.append(doc.doc_id.encode())
                add_to_digest(digest, doc)
        if not ids:
            raise DataError(
                f'{path}: expected lines like {{"id": "d1", "text": "..."}}, got an empty file; write the docs there'
            )
        self._starts, self._ends = np.frombuffer(starts, dtype=np.int64), np.frombuffer(ends, dtype=np.int64)
        self._ids = SortedIds(np.array(ids, dtype=np.bytes_))
        self._refuse_repeated_ids()
        self.fingerprint = digest.hexdigest()

    def _read(self) -> bytes | mmap.mmap:
        with opened(self.path) as stream:
            if isinstance(stream, gzip.GzipFile):
                try:
                    data = stream.read()
                except _BROKEN_GZIP as error:
                    raise DataError(f"{self.path}: expected a whole gzip file, got {error}; copy it again") from None
                if len(data) > _BIG_BYTES:
                    log.warning(
                        "%s: %.1f GiB are held unpacked in memory; gunzip it to have it mapped",
                        self.path,
                        len(data) / 2**30,
                    )
                return data
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if stream.seek(0, io.SEEK_END) else b""

    def _refuse_repeated_ids(self) -> None:
        if self._ids.repeat is not None:
            first, second = (self._data[: self._starts[row]].count(b"\n") + 1 for row in self._ids.repeat)
            doc_id = self._doc(self._ids.repeat[0]).doc_id
            raise DataError(
                f"{self.path}:{second}: expected each doc id once, got {doc_id!r} here and in line {first}; remove one"
            )

    def _doc(self, row: int) -> Doc:
        return _parse_doc(self._data[self._starts[row] : self._ends[row]].decode(), f"{self.path}, doc {row + 1}")

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Doc]:
        return (self._doc(row) for row in range(len(self)))

    def __getitem__(self, doc_id: str) -> Doc:
        if (row := self._ids.row(doc_id)) < 0:
            raise KeyError(doc_id)
        return self._doc(row)

    def __contains__(self, doc_id: object) -> bool:
        return self._ids.row(doc_id) >= 0

    def known(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids, UTF-8 in a bytes array [ids], belong to docs, bool [ids]."""
        return self._ids.known(ids)


def _is_packed(path: Path) -> bool:
    # Decide by content, because browsers may unpack a download but keep its name
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def check_regular(path: Path) -> None:
    """Refuse folders, pipes and devices: a file is read twice, and the second read of a pipe would never end.

    Raises:
        DataError: The path is not a regular file.
    """
    if not path.is_file():
        raise DataError(
            f"{path}: expected a file, got {'a folder' if path.is_dir() else 'a pipe or device'}; check the path"
        )


def opened(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """Open a file for reading bytes; gzip content is unpacked.

    Raises:
        DataError: The file cannot be opened, or is not a regular file.
    """
    if path.exists():
        check_regular(path)
    try:
        return gzip.open(path, "rb") if _is_packed(path) else path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: expected a readable file, got {error.strerror!r}; check the path") from None


def _lines_of(data: bytes | mmap.mmap) -> Iterator[bytes]:
    start = 0
    while start < len(data):
        end = data.find(b"\n", start) + 1 or len(data)
        yield data[start:end]
        start = end


def _numbered(lines: Iterable[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield numbered lines without a byte order mark; an error of unpacking becomes a DataError that names the file."""
    try:
        for number, raw in enumerate(lines, 1):
            yield number, raw.removeprefix(_BOM) if number == 1 else raw
    except _BROKEN_GZIP as error:
        raise DataError(f"{path}: expected a whole gzip file, got {error}; copy it again") from None


def _decode(raw: bytes, path: Path, number: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{number}: expected UTF-8, got byte {raw[error.start]:#04x}; convert the file, as with iconv"
        ) from None


def _parse_doc(line: str, where: str) -> Doc:
    record = parse_json(line, where)
    if not isinstance(record, dict) or "id" not in record or "text" not in record:
        raise DataError(
            f'{where}: expected a JSON object with "id" and "text", got {shown(line.strip())}; add what is missing'
        )
    doc_id, text, title = record["id"], record["text"], record.get("title")
    if isinstance(doc_id, int) and not isinstance(doc_id, bool):
        doc_id = str(doc_id)
    title = "" if title is None else title
    for key, value in (("id", doc_id), ("text", text), ("title", title)):
        if not isinstance(value, str):
            raise DataError(f'{where}: expected a string as "{key}", got {shown(json.dumps(value))}; put it in quotes')
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f'{where}: expected characters in "{key}", got the lone surrogate {value[error.start]!r}; remove it'
            ) from None
    check_id(doc_id, where)
    return Doc(doc_id, text, title)
