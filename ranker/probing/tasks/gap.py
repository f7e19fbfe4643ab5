"""Probing task: does a pronoun refer to a name? Gold labels of GAP (Webster et al., TACL 2018, arXiv:1810.05201)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path

from ranker.data.corpus_files import read_lines
from ranker.data.parsing import shown
from ranker.errors import DataError
from ranker.probing.examples import (
    PairSample,
    ProbeExample,
    Span,
    Target,
    TaskUnavailable,
    check_example,
    file_fingerprint,
)

FILES = {"train": "gap-development.tsv", "val": "gap-validation.tsv", "test": "gap-test.tsv"}


class Gap:
    """Targets with two spans, a pronoun and a name. A Wikipedia snippet has two targets and is encoded without a query.

    GAP's development set is the train part (2,000 snippets), its validation set the val part (454), and its test set
    the test part (2,000).

    Args:
        path: Folder of gap-{development,validation,test}.tsv, plain or gzipped.
        max_pairs: Maximum snippets of each part; None: all.
    """

    name = "coref_gap"
    classes: tuple[str, ...] | None = ("0", "1")
    whole_text = False
    ranks = False

    def __init__(self, path: str | Path | None = None, max_pairs: int | None = None) -> None:
        self.path, self.max_pairs = None if path is None else Path(path).expanduser(), max_pairs

    @cached_property
    def labeller(self) -> str:  # type: ignore[override]
        """Id and version of the labels, and hashes of the files."""
        return f"gap@1 max_pairs={self.max_pairs} " + " ".join(
            file_fingerprint(self._file(name)) for name in FILES.values()
        )

    def examples(self, sample: PairSample) -> Iterator[ProbeExample]:  # noqa: ARG002 - GAP has its own texts
        """Yield the snippets, part by part.

        Raises:
            TaskUnavailable: A file is missing.
            DataError: A line lacks a column, or an offset does not fit its text.
        """
        for part, name in FILES.items():
            path = self._file(name)
            lines = read_lines(path)
            columns = next(lines, (0, ""))[1].split("\t")
            for number, line in islice(lines, self.max_pairs):
                yield _example(dict(zip(columns, line.split("\t"), strict=False)), part, f"{path}:{number}")

    def _file(self, name: str) -> Path:
        for path in () if self.path is None else (self.path / name, self.path / f"{name}.gz"):
            if path.is_file():
                return path
        got = "none" if self.path is None else repr(str(self.path))
        raise TaskUnavailable(
            f"probe.gap.path: expected a folder with {name} or {name}.gz, got {got}; set probe.gap.path=DIR"
        )


def _example(row: dict[str, str], part: str, where: str) -> ProbeExample:
    try:
        text = row["Text"]
        pronoun = _span(text, row["Pronoun"], row["Pronoun-offset"])
        targets = tuple(
            Target(
                (pronoun, _span(text, row[name], row[f"{name}-offset"])),
                "1" if row[f"{name}-coref"].upper() == "TRUE" else "0",
            )
            for name in ("A", "B")
        )
        example = ProbeExample(row["ID"], row["ID"], "", text, targets, part)
    except (KeyError, ValueError) as error:
        raise DataError(
            f"{where}: expected GAP's columns and offsets, got a line where {shown(str(error))} fails; "
            "take the file as published"
        ) from error
    check_example(example, where)
    return example


def _span(text: str, words: str, offset: str) -> Span:
    start = int(offset)
    if text[start : start + len(words)] != words:
        raise ValueError(f"{words!r} at character {start}")
    return Span("doc", start, start + len(words))
