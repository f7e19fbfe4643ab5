"""Probing task: labels of other tools, imported from a file of edge-probing records, one JSON object per line."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ranker.data.corpus_files import read_lines
from ranker.data.parsing import shown
from ranker.errors import ConfigError, DataError
from ranker.probing.examples import (
    PairSample,
    ProbeExample,
    Span,
    Target,
    TaskUnavailable,
    check_example,
    file_fingerprint,
    from_record,
    parse_line,
)

SPANS = ("chars", "spacy_tokens")


class JsonLines:
    """Import examples whose labels another tool has computed.

    A record is `{"info": {"qid", "pid", "part"?}, "input": {"query", "passage"}, "targets": [{"span1", "span2"?,
    "label" or "value"}]}`. With `spans=chars`, a span is `{"side": "query" or "doc", "start", "end"}` in characters;
    without start and end, the span is the whole side. With `spans=spacy_tokens`, a span is `[first, end]` in words of
    spaCy's English tokenizer over query + " " + passage, as in published data sets; a target without spans reads both
    whole sides.

    Args:
        path: The file, plain or gzipped.
        name: Name of the task in reports.
        spans: `chars` or `spacy_tokens`.
        whole_text: Whether each pair has one target, which reads the whole query and the whole doc.
        bins: Number of classes, if the targets have values.
        binning: `mean2std`, `minmax` or `quantile`.

    Raises:
        ConfigError: An unknown `spans`.
    """

    ranks = False

    def __init__(
        self,
        path: str | Path | None = None,
        name: str = "jsonl",
        spans: str = "chars",
        whole_text: bool = False,
        bins: int = 10,
        binning: str = "mean2std",
    ) -> None:
        if spans not in SPANS:
            raise ConfigError(f"probe.jsonl.spans: expected one of {', '.join(SPANS)}; got {spans!r}")
        self.path = None if path is None else Path(path).expanduser()
        self.name, self.spans, self.whole_text = name, spans, whole_text
        self.bins, self.binning = bins, binning

    @cached_property
    def labeller(self) -> str:  # type: ignore[override]
        """Id and version of the labels, and a hash of the file."""
        return f"jsonl@2 spans={self.spans} {file_fingerprint(self._file())}"

    @cached_property
    def classes(self) -> tuple[str, ...] | None:  # type: ignore[override]
        """None: all labels that occur. If the first record has values, the tuple is empty, and values are binned."""
        first = next(self._records((0,)), None)
        targets = first[1].get("targets") if first is not None and isinstance(first[1], dict) else None
        entries = targets if isinstance(targets, list) else []  # `examples` reports malformed records
        return () if any(isinstance(target, dict) and "value" in target for target in entries) else None

    def examples(self, sample: PairSample) -> Iterator[ProbeExample]:
        """Yield the file's records in order; if there are more than `max_pairs`, `max_pairs` records are drawn by seed.

        Raises:
            TaskUnavailable: The file does not exist, or spaCy is needed and not installed.
            DataError: A line is not an edge-probing record; the message names file and line.
        """
        words = _words() if self.spans == "spacy_tokens" else None
        total = sum(1 for _ in read_lines(self._file()))
        drawn = set(np.random.default_rng(sample.seed).permutation(total)[: sample.max_pairs].tolist())
        for where, record in self._records(drawn):
            example = from_record(record, where) if words is None else _from_words(record, where, words)
            if example.targets:
                yield example

    def _file(self) -> Path:
        if self.path is None or not self.path.is_file():
            got = "none" if self.path is None else f"{str(self.path)!r}, which is no file"
            raise TaskUnavailable(f"probe.jsonl.path: expected a file of records, got {got}; set probe.jsonl.path=FILE")
        return self.path

    def _records(self, chosen: Container[int]) -> Iterator[tuple[str, Any]]:
        for i, (number, line) in enumerate(read_lines(self._file())):
            if i in chosen:
                yield f"{self.path}:{number}", parse_line(line, f"{self.path}:{number}")


def _words() -> Any:
    """Return spaCy's English tokenizer, which needs no trained pipeline."""
    try:
        import spacy
    except ImportError as error:
        raise TaskUnavailable(
            "probe.jsonl.spans: spacy_tokens expected spaCy, got no such package; "
            "install it with: pip install -e '.[probe]'"
        ) from error
    return spacy.blank("en").tokenizer


def _from_words(record: Any, where: str, words: Any) -> ProbeExample:
    """Convert spans in words of query + " " + passage to characters of a side.

    Raises:
        DataError: A field is missing, or a span is empty or covers both sides.
    """
    try:
        query, doc = record["input"]["query"], record["input"]["passage"]
        joined = words(f"{query} {doc}")
        border = len(query) + 1
        targets = []
        for entry in record["targets"]:
            bounds = [entry[key] for key in ("span1", "span2") if entry.get(key) is not None]
            spans = [_side_span(joined[first:end], border, where) for first, end in bounds]
            spans = spans or [Span("query"), Span("doc")]
            label, value = entry.get("label"), entry.get("value")
            if (label is None) == (value is None) or not math.isfinite(float(value or 0)):
                raise ValueError("exactly one of label and finite value")
            targets.append(
                Target(tuple(spans), None if label is None else str(label), None if value is None else float(value))
            )
        info = record["info"]
        example = ProbeExample(str(info["qid"]), str(info["pid"]), query, doc, tuple(targets), info.get("part"))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as error:
        raise DataError(
            f"{where}: expected info (qid, pid), input (query, passage) and targets with spans [first, end], "
            f"got a record where {shown(str(error))} fails"
        ) from error
    check_example(example, where)
    return example


def _side_span(words: Any, border: int, where: str) -> Span:
    if not len(words):
        raise DataError(f"{where}: expected a span of at least one word inside the text, got none; fix the span")
    start, end = words.start_char, words.end_char
    if end < border:
        return Span("query", start, end)
    if start >= border:
        return Span("doc", start - border, end - border)
    raise DataError(
        f"{where}: expected a span inside the query or the passage, got {words.text!r} across both; fix the span"
    )
