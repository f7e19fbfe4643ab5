"""The built-in collection: find the weaknesses (MITRE's CWE 4.14) that list a vulnerability as an example."""

from __future__ import annotations

import csv
import importlib.metadata
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ranker.data.collection import Collection, Doc, MemoryDocs, Splits
from ranker.data.splits import take_queries
from ranker.errors import DataError

if TYPE_CHECKING:  # ranker.types imports torch, which readers of data do not need
    from ranker.types import Qrels

_VERSION = "3.0.0"
_EXAMPLE = re.compile(r"::REFERENCE:.*?:DESCRIPTION:(.*?)(?=:LINK:|::REFERENCE:|::$)", re.DOTALL)
_NUMBER_IN_BRACKETS = re.compile(r"\s*\(\s*CWE-\d+[^)]*\)")
_NUMBER = re.compile(r"CWE-\d+")
_MIN_WORDS = 4  # shorter examples, such as "deadlock in library", are not meaningful as queries
_NUM_VAL, _NUM_TEST = 200, 300


class CWE:
    """The collection from the installed package cwe2 3.0.0: 938 docs, 1,967 queries, 2,720 judgements.

    A doc is a weakness: its name is the title, its description and extended description are the text. A query is the
    description of an observed example (a real vulnerability), without weakness numbers, which would reveal the answer.
    Every weakness that lists the example is relevant. Examples that differ only in letter case are one query. 1,467
    queries are for training, 200 for validation and 300 for the test.

    Args:
        split_seed: Seed of the split; published figures are for seed 0.
    """

    def __init__(self, split_seed: int = 0) -> None:
        self.split_seed = split_seed

    def load(self) -> Splits:
        """Derive docs, queries and qrels.

        Raises:
            DataError: The package is missing or has another version.
        """
        folder = _package_folder()
        weaknesses = _read_weaknesses(folder / "navigate_cwe" / "1000.csv")
        docs = MemoryDocs(
            Doc(
                f"CWE-{row['CWE-ID']}", _tidy(f"{row['Description']} {row['Extended Description']}"), _tidy(row["Name"])
            )
            for row in weaknesses
        )
        queries, qrels = _queries(weaknesses)
        everything = Collection("cwe", docs, queries, qrels)
        shuffled = list(queries)
        random.Random(self.split_seed).shuffle(shuffled)
        test, val = shuffled[:_NUM_TEST], shuffled[_NUM_TEST : _NUM_TEST + _NUM_VAL]
        return Splits(
            train=take_queries(everything, set(queries) - set(test) - set(val), "train"),
            val=take_queries(everything, val, "val"),
            tests={"cwe": take_queries(everything, test, "cwe")},
            notice="\n\n".join(
                (folder / name).read_text(encoding="utf-8").strip() for name in ("cwe.NOTICE", "cwe-tou.LICENSE")
            ),
        )


def _package_folder() -> Path:
    # The package is not imported, because an import would parse its whole database
    try:
        package = importlib.metadata.distribution("cwe2")
    except importlib.metadata.PackageNotFoundError as error:
        raise DataError(
            "data=cwe: expected the package cwe2, which holds MITRE's texts, got no such package; run "
            "pip install -e '.[demo]'"
        ) from error
    if package.version != _VERSION:
        raise DataError(
            f"data=cwe: expected cwe2 {_VERSION}, whose CWE 4.14 the split was made for, got {package.version}; run "
            "pip install -e '.[demo]'"
        )
    return Path(str(package.locate_file("cwe2"))) / "database_v49"


def _read_weaknesses(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _tidy(text: str) -> str:
    return " ".join(text.split())


def _examples(weakness: dict[str, str]) -> Iterator[str]:
    for description in _EXAMPLE.findall(weakness["Observed Examples"]):
        text = _tidy(_NUMBER.sub("", _NUMBER_IN_BRACKETS.sub("", description)))
        if len(text.split()) >= _MIN_WORDS:
            yield text


def _queries(weaknesses: list[dict[str, str]]) -> tuple[dict[str, str], Qrels]:
    """Return queries and qrels; a query's number follows the first weakness that lists the query, then its text."""
    texts: dict[str, str] = {}
    listed: dict[str, dict[str, int]] = {}
    first: dict[str, int] = {}
    for weakness in weaknesses:
        for text in _examples(weakness):
            key = text.lower()
            texts.setdefault(key, text)
            first.setdefault(key, int(weakness["CWE-ID"]))
            listed.setdefault(key, {})[f"CWE-{weakness['CWE-ID']}"] = 1
    numbered = {
        f"q{number:04d}": key for number, key in enumerate(sorted(texts, key=lambda key: (first[key], texts[key])), 1)
    }
    return {query_id: texts[key] for query_id, key in numbered.items()}, {
        query_id: listed[key] for query_id, key in numbered.items()
    }
