"""Read the values of one row: texts, ids, grades, scores and lists of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from ranker.data.instructions import joined
from ranker.data.parsing import check_grade, check_id, read_score, shown
from ranker.data.row_files import Rows
from ranker.errors import DataError


class RowValues:
    """One row, whose values are read by role.

    Args:
        rows: A chunk of rows.
        row: Number of the row in the chunk.
        columns: Role -> names of its columns.

    Raises:
        DataError: A value is missing or of another type; the message names the file, the row and the column.
    """

    def __init__(self, rows: Rows, row: int, columns: dict[str, tuple[str, ...]]) -> None:
        self._rows, self._row, self.columns = rows, row, columns

    def value(self, role: str, column: int = 0) -> Any:
        return self._rows.columns[self.columns[role][column]][self._row]

    def where(self, role: str, column: int = 0) -> str:
        return self._rows.where(self._row, self.columns[role][column])

    def text(self, role: str, filled: bool = False, column: int = 0) -> str:
        """Return a text; with `filled`, a text of white space only is an error."""
        return _text(self.value(role, column), lambda: self.where(role, column), filled)

    def query(self) -> str:
        query = self.text("query", filled=True)
        prompt = self.value("prompt") if "prompt" in self.columns else None
        query = f"{self.text('prompt')} {query}" if prompt else query
        if "instruction" not in self.columns:
            return query
        return joined("" if self.value("instruction") is None else self.text("instruction"), query)

    def values(self, role: str, column: int = 0) -> list[Any]:
        """Return a list that is not empty; in CSV and TSV files, a list is written as JSON."""
        value = self.value(role, column)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                value = None
        if not isinstance(value, list) or not value:
            raise DataError(
                f"{self.where(role, column)}: expected a list of at least one, got {shown(self.value(role, column))}; "
                "fill it in or remove the row"
            )
        return value

    def texts(self, role: str, column: int = 0) -> list[str]:
        """Return the texts of a list."""
        where = lambda: self.where(role, column)  # noqa: E731 - messages are made only where they are needed
        return [_text(value, where) for value in self.values(role, column)]

    def ids(self, role: str) -> list[str]:
        return [read_id(value, lambda: self.where(role)) for value in self.values(role)]

    def numbers(self, role: str, count: int, read: Callable[[Any, Callable[[], str]], Any]) -> list[Any]:
        """Return the numbers of a list with one number for each of `count` docs."""
        values = self.values(role)
        if len(values) != count:
            raise DataError(
                f"{self.where(role)}: expected {count} numbers, one for each doc, got {len(values)}; correct the row"
            )
        return [read(value, lambda: self.where(role)) for value in values]


def _text(value: Any, where: Callable[[], str], filled: bool = False) -> str:
    if not isinstance(value, str) or (filled and not value.strip()):
        raise DataError(f"{where()}: expected a text, got {shown(value)}; fill it in or remove the row")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where()}: expected characters, got the lone surrogate {value[error.start]!r}; remove it"
            ) from None
    return value


def read_id(value: Any, where: Callable[[], str]) -> str:
    """Return an id; a whole number is converted to its digits.

    Raises:
        DataError: The value is missing, or is not an id.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise DataError(f"{where()}: expected an id, got {shown(value)}; fill it in or remove the row")
    check_id(_text(value, where), where())
    return value


def score_of(value: Any, where: Callable[[], str]) -> float:
    """Return a number or the text of a number as a score.

    Raises:
        DataError: The value is no finite number within single precision.
    """
    if isinstance(value, str):
        return read_score(value, where(), single=True)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise DataError(f"{where()}: expected a finite number as score, got {shown(value)}; correct or remove the row")
    if abs(value) > 3.4e38:
        raise DataError(
            f"{where()}: expected a score within single precision (3.4e38), got {value!r}; scale scores down"
        )
    return float(value)


def grade_of(value: Any, where: Callable[[], str]) -> int:
    """Return a label as a grade; true is 1, false is 0.

    Raises:
        DataError: The value is no whole number, or no valid grade.
    """
    if isinstance(value, bool):
        return int(value)
    try:
        number = score_of(value, where)
    except DataError:
        raise DataError(
            f"{where()}: expected a whole number as grade, got {shown(value)}; correct or remove the row"
        ) from None
    if number != int(number):
        raise DataError(
            f"{where()}: expected a whole number as grade, got {shown(value)}; if these are a teacher's scores, "
            "name the column as score (or scores) with data.columns"
        )
    check_grade(int(number), where())
    return int(number)
