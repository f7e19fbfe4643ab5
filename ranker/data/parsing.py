"""Rules for ids, grades, scores and JSON lines, for all readers and writers of text files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from ranker.errors import DataError

MAX_ID_BYTES = 1024  # arrays of ids are as wide as the longest id, so one id of megabytes would take gigabytes
MAX_GRADE = 10_000  # because the time of trec_eval's nDCG is quadratic in the largest grade
_MAX_FLOAT32 = 3.4028235677973366e38  # numbers of smaller magnitude round to a finite float32
_ASCII_SPACE = re.compile(r"[ \t\n\v\f\r]")  # trec_eval splits here; other white space may be part of an id


def shown(value: Any) -> str:
    """Return a value as error messages show it: the first 60 characters of its representation.

    >>> shown("q1"), shown("x" * 100) == repr("x" * 57 + "...")
    ("'q1'", True)
    """
    if isinstance(value, bytes):
        value = value[:300].decode(errors="backslashreplace")
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else f"{value[:57]}...")
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_id(word: str, where: str, what: str = "an id") -> None:
    r"""Refuse an id that a TREC file can't hold.

    Args:
        word: The id.
        where: Start of the message: file and line.
        what: Description of the id in the message.

    Raises:
        DataError: The id is empty, has ASCII white space or a NUL character, or is longer than `MAX_ID_BYTES` in UTF-8.

    >>> check_id("no\u00a0break", "queries.tsv:1")
    """
    if not word or _ASCII_SPACE.search(word):
        raise DataError(
            f"{where}: expected {what} without white space, got {shown(word)}; rename it, since TREC files are split "
            "there"
        )
    if "\0" in word:
        raise DataError(
            f"{where}: expected {what} without NUL characters, got {shown(word)}; save the file as UTF-8 text"
        )
    size = len(word) if word.isascii() else len(word.encode("utf-8", "surrogatepass"))
    if size > MAX_ID_BYTES:
        raise DataError(
            f"{where}: expected {what} of at most {MAX_ID_BYTES} bytes, got {size} ({shown(word)}); give it a shorter "
            "one"
        )


def read_grade(text: str | bytes, where: str) -> int:
    """Parse a relevance grade: a whole number within `MAX_GRADE`.

    Args:
        text: The number.
        where: Start of the message: file and line.

    Raises:
        DataError: The text is no such number.

    >>> read_grade(b"+2", "qrels.txt:1")
    2
    """
    grade = _number(int, text)
    if grade is None:
        raise DataError(f"{where}: expected a whole number as relevance, got {shown(text)}; correct the line")
    check_grade(int(grade), where)
    return int(grade)


def check_grade(grade: int, where: str) -> None:
    """Refuse a grade that evaluation programs can't handle.

    Raises:
        DataError: The grade is below `-MAX_GRADE` or above `MAX_GRADE`.
    """
    if not -MAX_GRADE <= grade <= MAX_GRADE:
        raise DataError(
            f"{where}: expected a relevance from {-MAX_GRADE} to {MAX_GRADE}, got {shown(grade)}; correct it"
        )


def read_score(text: str | bytes, where: str, single: bool = False) -> float:
    """Parse a score: a finite number.

    Args:
        text: The number.
        where: Start of the message: file and line.
        single: Whether the number must also be finite in single precision, because training stores it in float32.

    Raises:
        DataError: The text is no such number.

    >>> read_score(b"-1e-3", "a.run:1")
    -0.001
    """
    score = _number(float, text)
    if score is None or not math.isfinite(score):
        raise DataError(f"{where}: expected a finite number as score, got {shown(text)}; correct the line")
    if single and abs(score) >= _MAX_FLOAT32:
        raise DataError(
            f"{where}: expected a score within single precision (3.4e38), got {shown(text)}; scale the run's scores "
            "down"
        )
    return float(score)


def _number(convert: Callable[[Any], int | float], text: str | bytes) -> int | float | None:
    try:
        grouped = "_" in text if isinstance(text, str) else b"_" in text  # Python parses 1_0 as 10
        return None if grouped else convert(text)
    except ValueError:
        return None


def parse_json(line: str, where: str) -> Any:
    """Parse one line of JSON.

    Raises:
        DataError: The line is not JSON, or has deeper nesting than Python's parser allows.
    """
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataError(
            f"{where}: expected a JSON object, got {shown(line.strip())} ({error}); correct the line"
        ) from None
    except RecursionError:
        raise DataError(
            f"{where}: expected a JSON object, got brackets nested too deep in {shown(line.strip())}; correct the line"
        ) from None
