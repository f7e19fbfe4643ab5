"""The shapes of rows: which columns have the query, its docs, grades and scores, and how to read these columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ranker.data.row_files import Rows
from ranker.data.row_values import RowValues, grade_of, read_id, score_of
from ranker.errors import DataError

# Role -> recognised names of columns. The columns `negative_1`, `negative_2`, ... are recognised by their numbers.
NAMES = {
    "query": ("query", "question", "anchor"),
    "prompt": ("prompt",),
    "instruction": (),  # only data.columns sets this role, because a model without prompts can't read it
    "positive": ("positive", "pos", "positives"),
    "negative": ("negative", "neg", "negatives"),
    "positive_scores": ("pos_scores", "positive_scores"),
    "negative_scores": ("neg_scores", "negative_scores"),
    "docs": ("docs", "documents", "passages"),
    "scores": ("scores",),
    "labels": ("labels",),
    "query_id": ("query_id", "qid"),
    "doc_ids": ("document_ids", "doc_ids", "passage_ids"),
    "document": ("document", "doc", "passage", "text"),
    "score": ("score",),
    "label": ("label", "relevance", "grade"),
}
_NUMBERED = re.compile(r"neg(ative)?_?(\d+)")
# Shape -> roles that are all required, and roles of which at least one is required
SHAPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "contrast": (("query", "positive", "negative"), ()),
    "list": (("query", "docs"), ("scores", "labels")),
    "ids": (("query_id", "doc_ids"), ("scores", "labels")),
    "pair": (("query", "document"), ("label", "score")),
}
EXAMPLES = (
    "(query, positive, negative_1 ..), (query, docs, scores), (query_id, document_ids, scores), "
    "(query, document, label or score), (query, pos, neg, pos_scores, neg_scores, prompt)"
)
Columns = Mapping[str, str | list[str]]


@dataclass
class Examples:
    """Rows in a common form: query i has the next `counts[i]` docs.

    Args:
        queries: Text of each query (in the shape `ids`, its id), with the number of its row in the chunk.
        counts: Number of docs of each query.
        docs: Texts, or in the shape `ids` ids.
        grades: Grade of each doc; empty if the rows have no grades.
        scores: Score of each doc; empty if the rows have no scores.
    """

    queries: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    docs: list[str] = field(default_factory=list)
    grades: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Shape:
    """A shape of rows. It determines how rows are read.

    Args:
        name: A key of `SHAPES`.
        columns: Role -> its columns; only `negative` may have several columns.
    """

    name: str
    columns: dict[str, tuple[str, ...]]

    @property
    def judged(self) -> bool:
        """Whether rows have grades or show which docs are relevant."""
        return self.name == "contrast" or "label" in self.columns or "labels" in self.columns

    @property
    def scored(self) -> bool:
        """Whether rows have a teacher's scores."""
        return bool({"score", "scores", "positive_scores"} & self.columns.keys())

    @property
    def needed(self) -> list[str]:
        """The names of all columns to read."""
        return list(dict.fromkeys(name for names in self.columns.values() for name in names))

    def __str__(self) -> str:
        parts = (f"{role}={'+'.join(names)}" for role, names in self.columns.items())
        return f"{self.name} ({', '.join(parts)})"

    def read(self, rows: Rows) -> Examples:
        """Read rows.

        Raises:
            DataError: A value is missing, empty or of another type, or lists of a row differ in length; the message
                names file, row and column.
        """
        examples = Examples()
        for row in range(len(rows.numbers)):
            _READERS[self.name](RowValues(rows, row, self.columns), examples)
        return examples


def recognise(columns: Iterable[str], path: Path, given: Columns | None = None) -> Shape:
    """Return the shape of a file's rows.

    Args:
        columns: Names of its columns.
        path: The file, for messages.
        given: Role -> column, or a list of columns for `negative`; other columns are ignored. None: `NAMES` decides.

    Raises:
        DataError: The columns fit no shape or several shapes, a given column is missing, or a role is unknown.
    """
    known = list(columns)
    if given is not None:
        roles = {role: (names,) if isinstance(names, str) else tuple(names) for role, names in given.items()}
        for role, names in roles.items():
            if role not in NAMES:
                raise DataError(f"data.columns: expected roles such as {', '.join(NAMES)}, got {role!r}; correct it")
            for name in names:
                if name not in known:
                    raise DataError(
                        f"{path}: expected the column {name!r} of data.columns, got {', '.join(known)}; correct one of "
                        "them"
                    )
    else:
        roles = {
            role: (next(name for name in names if name in known),)
            for role, names in NAMES.items()
            if any(name in known for name in names)
        }
        numbered = sorted((int(match[2]), name) for name in known if (match := _NUMBERED.fullmatch(name)))
        if numbered:
            roles["negative"] = (*roles.get("negative", ()), *(name for _, name in numbered))
    fitting = [
        name
        for name, (all_of, one_of) in SHAPES.items()
        if set(all_of) <= roles.keys() and (not one_of or set(one_of) & roles.keys())
    ]
    if len(fitting) != 1:
        fault = f"those of several ({' and '.join(fitting)})" if fitting else "none of them"
        raise DataError(
            f"{path}: expected the columns of one shape: {EXAMPLES}; got {', '.join(known)}, {fault}; name them with "
            "data.columns"
        )
    all_of, one_of = SHAPES[fitting[0]]
    optional = ("prompt", "instruction", *(("positive_scores", "negative_scores") if fitting[0] == "contrast" else ()))
    used = {role: roles[role] for role in (*all_of, *one_of, *optional) if role in roles}
    if ("positive_scores" in used) != ("negative_scores" in used):
        raise DataError(
            f"{path}: expected scores of both positives and negatives, got {', '.join(used)}; add the others, or leave "
            "these out with data.columns"
        )
    return Shape(fitting[0], used)


def _read_contrast(row: RowValues, examples: Examples) -> None:
    value = row.value("positive")
    positives = row.texts("positive") if _is_list(value) else [row.text("positive")]
    negatives: list[str] = []
    for column in range(len(row.columns["negative"])):
        many = _is_list(row.value("negative", column))
        negatives += row.texts("negative", column) if many else [row.text("negative", column=column)]
    examples.queries.append(row.query())
    examples.counts.append(len(positives) + len(negatives))
    examples.docs += positives + negatives
    examples.grades += [1] * len(positives) + [0] * len(negatives)
    if "positive_scores" in row.columns:
        examples.scores += row.numbers("positive_scores", len(positives), score_of)
        examples.scores += row.numbers("negative_scores", len(negatives), score_of)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, str) and value.startswith('["') and value.endswith('"]'))


def _read_list(row: RowValues, examples: Examples) -> None:
    examples.queries.append(row.query())
    _add_list(row, examples, row.texts("docs"))


def _read_ids(row: RowValues, examples: Examples) -> None:
    examples.queries.append(read_id(row.value("query_id"), lambda: row.where("query_id")))
    _add_list(row, examples, row.ids("doc_ids"))


def _add_list(row: RowValues, examples: Examples, docs: list[str]) -> None:
    examples.counts.append(len(docs))
    examples.docs += docs
    if "labels" in row.columns:
        examples.grades += row.numbers("labels", len(docs), grade_of)
    if "scores" in row.columns:
        examples.scores += row.numbers("scores", len(docs), score_of)


def _read_pair(row: RowValues, examples: Examples) -> None:
    examples.queries.append(row.query())
    examples.counts.append(1)
    examples.docs.append(row.text("document"))
    if "label" in row.columns:
        examples.grades.append(grade_of(row.value("label"), lambda: row.where("label")))
    if "score" in row.columns:
        examples.scores.append(score_of(row.value("score"), lambda: row.where("score")))


_READERS = {"contrast": _read_contrast, "list": _read_list, "ids": _read_ids, "pair": _read_pair}
