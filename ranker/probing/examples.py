"""Probing data: texts, the spans whose states a probe reads, and what it has to tell about them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ranker.data.collection import Collection
from ranker.data.corpus_files import read_lines
from ranker.data.parsing import parse_json, shown
from ranker.errors import DataError

SIDES = ("query", "doc")
PARTS = ("train", "val", "test")


@dataclass(frozen=True)
class Span:
    """Characters `start` to `end` (not included) of the query or the doc, so that any tokenizer can be probed.

    Args:
        side: `query` or `doc`.
        start: First character; None, with `end`, for the whole side as far as truncation leaves it.
        end: One past the last character.
    """

    side: str
    start: int | None = None
    end: int | None = None


@dataclass(frozen=True)
class Target:
    """One thing to tell: about one span or about two.

    Args:
        spans: One or two spans.
        label: The class, or None where `value` is binned later.
        value: The raw number of a task whose labels are bins.
    """

    spans: tuple[Span, ...]
    label: str | None = None
    value: float | None = None


@dataclass(frozen=True)
class ProbeExample:
    """A query and a doc with all their targets.

    Args:
        query_id: Its queries decide the split, and errors are clustered by it.
        doc_id: The doc.
        query: The query's text; empty where the task has none, then the doc is encoded by itself.
        doc: The doc's text, as the ranker reads it.
        targets: At least one; examples without targets are not made.
        part: `train`, `val` or `test` where the source says it, else None.
    """

    query_id: str
    doc_id: str
    query: str
    doc: str
    targets: tuple[Target, ...]
    part: str | None = None

    def text_of(self, span: Span) -> str:
        """The characters of a span."""
        side = self.query if span.side == "query" else self.doc
        return side if span.start is None else side[span.start : span.end]


@dataclass(frozen=True)
class PairSample:
    """What a task makes its examples of.

    Args:
        collection: Queries, docs, judgements and candidates.
        pairs: The (query_id, doc_id) pairs that all tasks share which bring none of their own.
        max_pairs: At most so many pairs from a task that draws its own.
        docs_per_query: At most so many docs of a query.
        depth: Candidates of a query to draw from.
        seed: Seed of every draw.
        parts: query_id -> `train`, `val` or `test`, for tasks whose examples differ by part; a query split, always.
    """

    collection: Collection
    pairs: tuple[tuple[str, str], ...]
    max_pairs: int
    docs_per_query: int
    depth: int
    seed: int
    parts: dict[str, str]

    def texts(self) -> Iterator[tuple[str, str, str, str]]:
        """(query_id, doc_id, query, doc) of every shared pair."""
        for query_id, doc_id in self.pairs:
            yield query_id, doc_id, self.collection.queries[query_id], self.collection.docs[doc_id].full_text


class TaskUnavailable(DataError):
    """A task whose labels can't be made here: a package or a file is missing.

    `probe=all` goes on without it and says so.
    """


class ProbeTask(Protocol):
    """A probing task: one file in `tasks/`, one yaml in `conf/probe/`.

    Attributes:
        name: The task's row in reports; a variant with other labels has a name of its own.
        labeller: Who made the labels: id, version and every setting that changes a label; part of the data's hash.
        classes: The label set; None takes the labels that occur, sorted. Empty for numbers, which are binned.
        whole_text: Whether its spans are whole texts, one target a pair.
        ranks: Whether class 1 against class 0 orders the docs of a query, so that ranking measures make sense.
    """

    name: str
    labeller: str
    classes: tuple[str, ...] | None
    whole_text: bool
    ranks: bool

    def examples(self, sample: PairSample) -> Iterator[ProbeExample]:
        """Make the examples, in a fixed order."""
        ...


def whole_text_example(
    ids_and_texts: tuple[str, str, str, str], label: str | None = None, value: float | None = None
) -> ProbeExample:
    """An example whose one target reads the whole query and the whole doc."""
    query_id, doc_id, query, doc = ids_and_texts
    return ProbeExample(query_id, doc_id, query, doc, (Target((Span("query"), Span("doc")), label, value),))


def file_fingerprint(path: Path) -> str:
    """Hash of a file's content."""
    digest = hashlib.blake2b(digest_size=10)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# files
# ------------------------------------------------------------------------------------------------------------------------------


def to_record(example: ProbeExample, source: str) -> dict[str, Any]:
    """The edge-probing record of an example, with character spans."""
    targets = []
    for target in example.targets:
        entry: dict[str, Any] = {f"span{i}": _span_record(span) for i, span in enumerate(target.spans, 1)}
        if target.label is not None:
            entry["label"] = target.label
        if target.value is not None:
            entry["value"] = target.value
        targets.append(entry)
    info = {"qid": example.query_id, "pid": example.doc_id, "source": source, "part": example.part}
    return {"info": info, "input": {"query": example.query, "passage": example.doc}, "targets": targets}


def _span_record(span: Span) -> dict[str, Any]:
    return {"side": span.side} if span.start is None else {"side": span.side, "start": span.start, "end": span.end}


def from_record(record: Any, where: str) -> ProbeExample:
    """Read an edge-probing record with character spans.

    Raises:
        DataError: Something is missing, or a span is not inside its text.
    """
    try:
        info, texts = record["info"], record["input"]
        example = ProbeExample(
            str(info["qid"]), str(info["pid"]), str(texts.get("query") or ""), str(texts["passage"]),
            tuple(_target(entry) for entry in record["targets"]), info.get("part"),
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{where}: expected info (qid, pid), input (query, passage) and targets (span1, span2, label or value), "
            f"got a record without {shown(str(error))}; see docs/add_a_probe.md"
        ) from error
    check_example(example, where)
    return example


def _target(entry: dict[str, Any]) -> Target:
    spans = tuple(
        Span(part["side"], part.get("start"), part.get("end"))
        for key in ("span1", "span2")
        if (part := entry.get(key)) is not None
    )
    value = entry.get("value")
    label = entry.get("label")
    if not spans:
        raise KeyError("span1")
    if (label is None) == (value is None):
        raise ValueError("exactly one of label and value")
    if value is not None and not math.isfinite(float(value)):
        raise ValueError("a finite value")
    return Target(spans, None if label is None else str(label), None if value is None else float(value))


def check_example(example: ProbeExample, where: str) -> None:
    """Refuse spans that do not fit their text.

    Raises:
        DataError: A side other than query and doc, or characters outside the text.
    """
    for span in (span for target in example.targets for span in target.spans):
        text = example.query if span.side == "query" else example.doc
        if span.side not in SIDES:
            raise DataError(
                f"{where}: expected a span's side to be query or doc, got {shown(span.side)}; mend the span"
            )
        whole = span.start is None and span.end is None
        if not whole and not (
            type(span.start) is int and type(span.end) is int and 0 <= span.start < span.end <= len(text)
        ):
            raise DataError(
                f"{where}: expected a span inside the {span.side}'s {len(text)} characters, got {shown(span.start)} to {shown(span.end)}; mend the span"
            )
    if example.part not in (None, *PARTS):
        raise DataError(
            f"{where}: expected part to be train, val or test, got {shown(example.part)}; mend it or leave it out"
        )


def write_examples(path: Path, examples: Iterable[ProbeExample], source: str) -> None:
    """Write one record a line."""
    with path.open("w", encoding="utf-8") as file:
        for example in examples:
            file.write(json.dumps(to_record(example, source), ensure_ascii=False) + "\n")


def read_examples(path: Path) -> Iterator[ProbeExample]:
    """Read what `write_examples` wrote, or records from elsewhere with character spans.

    Raises:
        DataError: A line is not such a record; the message names file and line.
    """
    for number, line in read_lines(path):
        yield from_record(parse_line(line, f"{path}:{number}"), f"{path}:{number}")


def parse_line(line: str, where: str) -> Any:
    """Parse one line of JSON.

    Raises:
        DataError: It is none.
    """
    record = parse_json(line, where)
    if "\\u" in line:
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: expected characters, got the lone surrogate {error.object[error.start]!r}; remove it"
            ) from None
    return record
