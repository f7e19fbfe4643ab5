"""The data model of probing: query-doc pairs with labelled spans. A probe reads the hidden states of the spans.

A *target* is one labelled item, one or two spans with their label, as in edge probing (Tenney et al., ICLR 2019). The
*label* is the target's class.
"""

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
    """A range of characters of the query or the doc, which suits any tokenizer.

    Args:
        side: `query` or `doc`.
        start: First character. If `start` and `end` are None, the span is the whole side after truncation.
        end: One past the last character.
    """

    side: str
    start: int | None = None
    end: int | None = None


@dataclass(frozen=True)
class Target:
    """A labelled item: one or two spans with their label.

    Args:
        spans: One or two spans.
        label: The class, or None if the label is the bin of `value`.
        value: The number to be binned, in a task whose labels are bins.
    """

    spans: tuple[Span, ...]
    label: str | None = None
    value: float | None = None


@dataclass(frozen=True)
class ProbeExample:
    """A query and a doc with all their targets.

    Args:
        query_id: Id of the query, by which pairs are split and standard errors are clustered.
        doc_id: Id of the doc.
        query: Text of the query. If empty, for a task without queries, the doc is encoded alone.
        doc: Text of the doc that the ranker reads.
        targets: At least one target; pairs without targets have no example.
        part: `train`, `val` or `test` if the source assigns the part, else None.
    """

    query_id: str
    doc_id: str
    query: str
    doc: str
    targets: tuple[Target, ...]
    part: str | None = None

    def text_of(self, span: Span) -> str:
        """Return the text of a span."""
        side = self.query if span.side == "query" else self.doc
        return side if span.start is None else side[span.start : span.end]


@dataclass(frozen=True)
class PairSample:
    """The query-doc pairs from which tasks make their examples.

    Args:
        collection: Queries, docs, judgements and candidates.
        pairs: The (query_id, doc_id) pairs of all tasks that do not sample their own pairs.
        max_pairs: Maximum number of pairs of a task that samples its own pairs.
        docs_per_query: Maximum number of docs per query.
        depth: Docs are drawn from this number of top candidates of a query.
        seed: Seed of all sampling.
        parts: query_id -> `train`, `val` or `test`: a split by query, for tasks that choose docs by part.
    """

    collection: Collection
    pairs: tuple[tuple[str, str], ...]
    max_pairs: int
    docs_per_query: int
    depth: int
    seed: int
    parts: dict[str, str]

    def texts(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield (query_id, doc_id, query, doc) of every shared pair."""
        for query_id, doc_id in self.pairs:
            yield query_id, doc_id, self.collection.queries[query_id], self.collection.docs[doc_id].full_text


class TaskUnavailable(DataError):
    """The labels of a task cannot be computed, because a package or a file is missing.

    `probe=all` skips the task with a warning.
    """


class ProbeTask(Protocol):
    """A probing task, with a file in `tasks/` and a yaml in `conf/probe/`.

    Attributes:
        name: Name in reports. Options that change the labels change the name too.
        labeller: Id and version of the labelling code, with every setting that changes a label; part of the data hash.
        classes: The labels. None: all labels that occur, sorted. Empty: the targets have numbers, which are binned.
        whole_text: Whether each pair has one target, which reads the whole query and the whole doc.
        ranks: Whether log-odds of class 1 against class 0 rank the docs of a query, so that ranking measures apply.
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
    """Return an example with one target, which reads the whole query and the whole doc.

    Args:
        ids_and_texts: query_id, doc_id, query, doc.
        label: Label of the target, or None.
        value: Value of the target, or None.
    """
    query_id, doc_id, query, doc = ids_and_texts
    return ProbeExample(query_id, doc_id, query, doc, (Target((Span("query"), Span("doc")), label, value),))


def file_fingerprint(path: Path) -> str:
    """Return a hash of a file's content."""
    digest = hashlib.blake2b(digest_size=10)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# files
# --------------------------------------------------------------------------------------------------------------


def to_record(example: ProbeExample, source: str) -> dict[str, Any]:
    """Return the edge-probing record of an example, with character spans."""
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
        DataError: A field is missing, or a span is outside its text.
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
    """Check the spans and the part of an example.

    Args:
        example: The example.
        where: File and line, for the error message.

    Raises:
        DataError: A side is neither query nor doc, a span is outside its text, or the part is unknown.
    """
    for span in (span for target in example.targets for span in target.spans):
        text = example.query if span.side == "query" else example.doc
        if span.side not in SIDES:
            raise DataError(f"{where}: expected a span's side to be query or doc, got {shown(span.side)}; fix the span")
        whole = span.start is None and span.end is None
        if not whole and not (
            type(span.start) is int and type(span.end) is int and 0 <= span.start < span.end <= len(text)
        ):
            raise DataError(
                f"{where}: expected a span inside the {span.side}'s {len(text)} characters, "
                f"got {shown(span.start)} to {shown(span.end)}; fix the span"
            )
    if example.part not in (None, *PARTS):
        raise DataError(
            f"{where}: expected part to be train, val or test, got {shown(example.part)}; fix it or leave it out"
        )


def write_examples(path: Path, examples: Iterable[ProbeExample], source: str) -> None:
    """Write one edge-probing record per line.

    Args:
        path: The file.
        examples: The examples.
        source: Labeller, stored in each record.
    """
    with path.open("w", encoding="utf-8") as file:
        for example in examples:
            file.write(json.dumps(to_record(example, source), ensure_ascii=False) + "\n")


def read_examples(path: Path) -> Iterator[ProbeExample]:
    """Read the file of `write_examples`: edge-probing records with character spans, one per line.

    Raises:
        DataError: A line is not an edge-probing record; the message names file and line.
    """
    for number, line in read_lines(path):
        yield from_record(parse_line(line, f"{path}:{number}"), f"{path}:{number}")


def parse_line(line: str, where: str) -> Any:
    """Parse one line of JSON.

    Raises:
        DataError: The line is not JSON, or contains a lone surrogate.
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
