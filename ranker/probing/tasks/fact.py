"""Probing task: does the doc support or refute the query? The labels come from a data set."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ranker.data.corpus_files import JsonlDocs, read_lines, read_queries
from ranker.data.parsing import read_grade, shown
from ranker.errors import DataError
from ranker.probing.examples import (
    PairSample,
    ProbeExample,
    TaskUnavailable,
    file_fingerprint,
    parse_line,
    whole_text_example,
)

PART_OF = {"train": "train", "dev": "val", "val": "val", "validation": "val", "test": "test", "": None}
_GRADE = re.compile(r"[-+]?[0-9]+")
Row = tuple[str, str, str, str | None]  # query_id, doc_id, label, part


class FactChecking:
    """Pairs of claim (query) and evidence (doc) with the annotators' labels. Pairs without a verdict are left out.

    The folder has one of two layouts, with plain or gzipped files. The first layout is docs.jsonl, queries.tsv and
    labels.tsv, with the columns query_id, doc_id, label and optionally split. The second layout is BEIR's:
    corpus.jsonl, queries.jsonl and qrels/*.tsv, with the label in the query's metadata. Train, val and test are the
    splits of the data set, so that no claim is in both train and test.

    Args:
        path: The folder; None: there are no labels, so the task is unavailable.
    """

    classes: tuple[str, ...] | None = None
    whole_text = True
    ranks = False

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path).expanduser()
        self.name = "fact"

    @cached_property
    def labeller(self) -> str:  # type: ignore[override]
        """Id and version of the labels, and hashes of the files.

        Raises:
            TaskUnavailable: There is no folder, or no labels in it.
            DataError: A file is missing.
        """
        labels = self._find("labels.tsv") or self._find("queries.jsonl")
        if labels is None:
            raise TaskUnavailable(
                f"probe.fact.path: expected a folder with labels.tsv or BEIR's queries.jsonl, got {str(self.path)!r}; "
                "set probe.fact.path=DIR"
            )
        if labels.name.startswith("labels.tsv"):
            files = [labels, self._need("docs.jsonl"), self._need("queries.tsv")]
        else:
            files = [labels, self._need("corpus.jsonl"), *self._qrels()]
        return "fact-labels@2 " + " ".join(file_fingerprint(path) for path in files)

    def examples(self, sample: PairSample) -> Iterator[ProbeExample]:
        """Yield at most `max_pairs` pairs, drawn by seed, with one target: the whole claim and the whole evidence.

        Raises:
            TaskUnavailable: There is no folder, or no labels in it.
            DataError: A file is missing, or a line is malformed.
        """
        labeller = self.labeller  # raises if there are no labels
        assert labeller and self.path is not None
        beir = self._find("labels.tsv") is None
        queries, docs, rows = self._read_beir() if beir else self._read_labels()
        rows = [row for row in rows if row[0] in queries and row[1] in docs]
        if not rows:
            raise DataError(
                f"{self.path}: expected labelled pairs of its queries and docs, got none; check labels and ids"
            )
        drawn = sorted(np.random.default_rng(sample.seed).permutation(len(rows))[: sample.max_pairs])
        for query_id, doc_id, label, part in (rows[i] for i in drawn):
            example = whole_text_example((query_id, doc_id, queries[query_id], docs[doc_id]), label=label)
            yield ProbeExample(query_id, doc_id, example.query, example.doc, example.targets, part)

    def _find(self, name: str) -> Path | None:
        if self.path is None:
            return None
        return next((path for path in (self.path / name, self.path / f"{name}.gz") if path.is_file()), None)

    def _need(self, name: str) -> Path:
        path = self._find(name)
        if path is None:
            raise DataError(f"{self.path}: expected {name} or {name}.gz beside the labels, got neither; put it there")
        return path

    def _qrels(self) -> list[Path]:
        assert self.path is not None
        return sorted((self.path / "qrels").glob("*.tsv"))

    def _read_labels(self) -> tuple[dict[str, str], dict[str, str], list[Row]]:
        path = self._need("labels.tsv")
        lines = read_lines(path)
        columns = next(lines, (0, ""))[1].split("\t")
        if not {"query_id", "doc_id", "label"} <= set(columns):
            raise DataError(
                f"{path}:1: expected columns query_id, doc_id, label (and split), got {shown(columns)}; "
                "write them in the first line"
            )
        rows: list[Row] = []
        for number, line in lines:
            cells = line.split("\t")
            if len(cells) != len(columns):
                raise DataError(f"{path}:{number}: expected {len(columns)} columns, got {len(cells)}; fix the line")
            row = dict(zip(columns, cells, strict=True))
            label = _verdict(row["label"])
            if label is not None:
                rows.append((row["query_id"], row["doc_id"], label, _part(row.get("split", ""), f"{path}:{number}")))
        wanted = {row[1] for row in rows}
        docs = JsonlDocs(self._need("docs.jsonl"))
        texts = {doc_id: docs[doc_id].full_text for doc_id in wanted if doc_id in docs}
        return read_queries(self._need("queries.tsv")), texts, rows

    def _read_beir(self) -> tuple[dict[str, str], dict[str, str], list[Row]]:
        queries, metadata = {}, {}
        for entry in _objects(self._need("queries.jsonl")):
            queries[entry["_id"]], metadata[entry["_id"]] = entry["text"], entry.get("metadata")
        rows: list[Row] = []
        for path in self._qrels():
            part = _part(path.stem, str(path))
            for number, line in read_lines(path):
                cells = line.split("\t")
                if number == 1 and not _GRADE.fullmatch(cells[-1].strip()):  # header
                    continue
                if len(cells) < 3:
                    raise DataError(
                        f"{path}:{number}: expected query-id, corpus-id and a whole number between tabs, "
                        f"got {shown(line)}; fix the line"
                    )
                label = _beir_label(metadata.get(cells[0]), cells[1])
                if read_grade(cells[2].strip(), f"{path}:{number}") > 0 and label is not None:
                    rows.append((cells[0], cells[1], label, part))
        wanted = {row[1] for row in rows}
        docs = {
            entry["_id"]: f"{entry['title']} {entry['text']}" if entry.get("title") else entry["text"]
            for entry in _objects(self._need("corpus.jsonl"))
            if entry["_id"] in wanted
        }
        return queries, docs, rows


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in read_lines(path):
        entry = parse_line(line, f"{path}:{number}")
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("_id"), (str, int))
            or not isinstance(entry.get("text"), str)
        ):
            raise DataError(f"{path}:{number}: expected an object with _id and text, got {shown(line)}; fix the line")
        yield entry | {"_id": str(entry["_id"])}


def _beir_label(metadata: Any, doc_id: str) -> str | None:
    """Return the claim's label; with a list of annotated sentences, as in SciFact, the label for this doc."""
    if not isinstance(metadata, dict):
        return None
    label = metadata.get("label", metadata.get(doc_id))
    if isinstance(label, list):
        label = next((entry.get("label") for entry in label if isinstance(entry, dict)), None)
    return None if label is None else _verdict(str(label))


def _verdict(label: str) -> str | None:
    """Return the label; None if the label is empty or means that there is not enough information."""
    words = label.replace("_", " ").strip().upper()
    return None if words in ("", "NEI") or "NOT ENOUGH" in words else label


def _part(name: str, where: str) -> str | None:
    if name not in PART_OF:
        raise DataError(f"{where}: expected the split to be train, dev or test, got {shown(name)}; fix it")
    return PART_OF[name]
